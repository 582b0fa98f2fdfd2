"""What is promised of a recipe's run, and whether its own files keep the promise.

A check takes what a run left behind and returns a finding; none raises for what a run may leave.
"""

from __future__ import annotations

import json
import math
import signal
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

REWARD = "env/all/reward/total"
TURNS = "env/all/turns_per_episode"
NLL = "train_mean_nll"
KL_FIRST_ORDER, KL_SECOND_ORDER = "optim/kl_sample_train_v1", "optim/kl_sample_train_v2"
"""Means over sampled tokens of d and of d^2 / 2, where d is the sampler's logprob less the trainer's."""
FINAL = "final"
"""Name of the checkpoint of a run's end."""
MAX_KL = 1e-3
WINDOW = 3
"""Steps at each end that are averaged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What a run left behind."""

    statuses: tuple[int, ...]
    """Exit status of each of its processes; the last is the one that was to finish."""
    rows: tuple[Row, ...]
    """Of metrics.jsonl, in order."""
    checkpoints: tuple[Row, ...]
    """Of checkpoints.jsonl, in order."""
    log: str
    """What the last process printed."""
    kept: tuple[str, ...] = ()
    """`tinker://` paths that the server has afterwards."""

    @property
    def steps(self) -> list[Row]:
        """The rows of training steps; totals of a whole run have rows too."""
        return [row for row in self.rows if REWARD in row or NLL in row]

    @property
    def finals(self) -> list[Row]:
        return [row for row in self.checkpoints if row["name"] == FINAL]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    promise: str
    holds: bool
    seen: str


Check = Callable[[Evidence], Finding]


def read_rows(path: Path) -> tuple[Row, ...]:
    """Whole lines of a JSONL file; none where there is no file."""
    if not path.exists():
        return ()
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return tuple(json.loads(line) for line in lines if line.strip())


def values(rows: Sequence[Row], name: str) -> list[float]:
    """Of the rows that have it."""
    return [float(row[name]) for row in rows if row.get(name) is not None]


def completes(num_steps: int) -> Check:
    """Status 0, each step once and in order, and a checkpoint of the end."""

    def check(evidence: Evidence) -> Finding:
        steps = [row["step"] for row in evidence.steps]
        status = evidence.statuses[-1] if evidence.statuses else None
        return Finding(
            promise=f"completes {num_steps} steps",
            holds=status == 0 and steps == list(range(num_steps)) and len(evidence.finals) == 1,
            seen=f"status {status}, {len(set(steps))} different steps in {len(steps)} rows, "
            f"{len(evidence.finals)} final checkpoints",
        )

    return check


def kl_stays_low(evidence: Evidence) -> Finding:
    """Both estimates in every step, the first one's sign aside."""
    first, second = _kls(evidence)
    return Finding(
        promise=f"KL of sampler and trainer below {MAX_KL:g} in every step",
        holds=_are_low(first) and _are_low(second),
        seen=f"at most {_highest(first):.1e} and {_highest(second):.1e}",
    )


def _kls(evidence: Evidence) -> tuple[list[float], list[float]]:
    """Of each step, by both estimates; nan where a step has none."""
    names = (KL_FIRST_ORDER, KL_SECOND_ORDER)
    first, second = ([float(row.get(name, math.nan)) for row in evidence.steps] for name in names)
    return first, second


def _are_low(found: Sequence[float]) -> bool:
    # nan compares false, so that a step without the metric does not pass.
    return bool(found) and all(abs(value) < MAX_KL for value in found)


def _highest(found: Sequence[float]) -> float:
    return max(map(abs, found), default=math.nan)


def _ends(name: str, rows: Sequence[Row]) -> tuple[float, float]:
    """Means of the first and last steps; nan where there are too few for both."""
    found = values(rows, name)
    if len(found) < 2 * WINDOW:
        return math.nan, math.nan
    return statistics.fmean(found[:WINDOW]), statistics.fmean(found[-WINDOW:])


def reward_rises(*, by: float) -> Check:
    def check(evidence: Evidence) -> Finding:
        first, last = _ends(REWARD, evidence.rows)
        return Finding(
            promise=f"reward rises by {by:g}", holds=last - first >= by, seen=f"{first:.3f} -> {last:.3f}"
        )

    return check


def loss_falls(*, to_share: float) -> Check:
    """Nats a token of the last steps, as a share of the first ones'."""

    def check(evidence: Evidence) -> Finding:
        first, last = _ends(NLL, evidence.rows)
        return Finding(
            promise=f"loss falls to {to_share:.0%}",
            holds=last <= to_share * first,
            seen=f"{first:.3f} -> {last:.3f} nats a token",
        )

    return check


def resumes(evidence: Evidence) -> Finding:
    """The process before the last was killed, and the last one began where a checkpoint was."""
    rolling = [row for row in evidence.checkpoints if row["name"] != FINAL]
    taken = [row for row in rolling if f"Resumed training from {row['state_path']}" in evidence.log]
    killed = evidence.statuses[:-1] == (-signal.SIGKILL,)
    where = f"from step {taken[-1]['batch']} of epoch {taken[-1].get('epoch')}" if taken else "from nothing"
    return Finding(
        promise="killed, it resumes from its last checkpoint",
        holds=killed and len(taken) == 1,
        seen=f"statuses {', '.join(map(str, evidence.statuses))}, resumed {where}",
    )


def old_checkpoints_go(evidence: Evidence) -> Finding:
    """Of the run that finished, the server has the final state and no rolling one."""
    finals = [row["state_path"] for row in evidence.finals]
    folder = finals[-1].rpartition("/")[0] if finals else None
    kept = [path for path in evidence.kept if folder and path.startswith(f"{folder}/")]
    return Finding(
        promise="rolling checkpoints are deleted",
        holds=bool(finals) and kept == finals[-1:],
        seen="kept are " + (", ".join(path.rpartition("/")[2] for path in kept) or "none"),
    )


def guesses_are_read(evidence: Evidence) -> Finding:
    """A guess that cannot be read costs 1: most turns do not, and there are several of them."""
    turns, rewards = values(evidence.rows, TURNS), values(evidence.rows, REWARD)
    holds = bool(turns) and min(turns) > 1 and sum(rewards) > -0.5 * sum(turns)
    mean = statistics.fmean(turns) if turns else math.nan
    reward = statistics.fmean(rewards) if rewards else math.nan
    return Finding(
        promise="episodes have several turns, most of them read",
        holds=holds,
        seen=f"{mean:.1f} turns, reward {reward:.2f}",
    )
