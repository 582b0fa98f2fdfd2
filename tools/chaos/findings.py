"""What became of a run to which something was done, beside one to which nothing was."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.fault_injection import MARKER
from rl.observability.events import read_events
from rl.observability.run_folder import EVENTS, ROLLOUTS, read_status

NOT_COMPARED = ("time/", "perf/", "limit/")
"""Keys of metrics.jsonl that tell of the machine."""

Rollout = tuple[int, str, int]
"""Step, problem, sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """Of one run."""

    struck: bool
    """Whether the moment came."""
    finished: bool
    recovered_after_s: float | None
    """From the kill until the last event by which the run goes on as before."""
    num_lost: int
    """Rollouts that the undisturbed run trained on and this one did not."""
    num_doubled: int
    """And the other way round."""
    differences: tuple[str, ...]
    """Of the metrics; empty where they are equal."""

    @property
    def is_good(self) -> bool:
        return self.struck and self.finished and not (self.num_lost or self.num_doubled or self.differences)


def look_at(folder: Path, *, reference: Path, same_numbers: bool = True) -> Findings:
    """Compare a run's folder with the undisturbed one's.

    Args:
        same_numbers: the two are to be equal in every number, not only in what they trained on.
    """
    wanted, found = trained_rollouts(reference), trained_rollouts(folder)
    if not same_numbers:
        # Which step a group comes into depends on what is ready; that it comes into one does not.
        wanted, found = _without_steps(wanted), _without_steps(found)
    marker = folder / "logs" / MARKER
    return Findings(
        struck=marker.exists(),
        finished=read_status(folder) == "finished",
        recovered_after_s=_recovered_after_s(folder, marker) if marker.exists() else None,
        num_lost=(wanted - found).total(),
        num_doubled=(found - wanted).total(),
        differences=tuple(differences(reference, folder)) if same_numbers else (),
    )


def differences(reference: Path, folder: Path) -> list[str]:
    """Where metrics.jsonl of the two runs differ, in words."""
    expected, found = (_lines(path / "metrics.jsonl") for path in (reference, folder))
    told = []
    if len(expected) != len(found):
        told.append(f"{len(found)} lines, the undisturbed run has {len(expected)}")
    for number, (one, other) in enumerate(zip(expected, found, strict=False), start=1):
        keys = {key for key in one.keys() | other.keys() if not key.startswith(NOT_COMPARED)}
        unequal = sorted(key for key in keys if one.get(key) != other.get(key))
        if unequal:
            first = unequal[0]
            told.append(
                f"line {number}: {len(unequal)} of {len(keys)} numbers differ, {first} is "
                f"{other.get(first)}, in the undisturbed run {one.get(first)}"
            )
    return told


def trained_rollouts(folder: Path) -> Counter[Any]:
    """How often each was trained on, by rollouts.jsonl."""
    lines = [line for name in reversed(ROLLOUTS) for line in _lines(folder / name)]
    return Counter((r["step"], r["problem"], r["sample"]) for r in lines if r["kind"] == "train")


def _without_steps(rollouts: Counter[Any]) -> Counter[Any]:
    told: Counter[Any] = Counter()
    for (_, problem, sample), num in rollouts.items():
        told[problem, sample] += num
    return told


def _lines(file: Path) -> list[dict[str, Any]]:
    """As they are written: what is not a number is a text there, and equal to itself."""
    if not file.exists():
        return []
    # The last line of a run that was killed may have no end.
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _recovered_after_s(folder: Path, marker: Path) -> float | None:
    """Until whoever was lost does again what is asked, and the run has gone back where it had to."""
    struck_at = json.loads(marker.read_text())["time"]
    done = [e["time"] for e in read_events(folder / EVENTS) if e["event"] in ("recovered", "went_back")]
    return max((at - struck_at for at in done if at > struck_at), default=None)
