"""Whether a run moves: what its folder says of it, read by somebody else while it goes on.

Nothing in the folder is written, and no lock is taken.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl.folder_lock import LOCK
from rl.observability.activity import STATE_FOLDER
from rl.observability.events import read_events
from rl.observability.metrics import read_metrics
from rl.observability.process_state import ProcessState, read_states
from rl.observability.run_folder import EVENTS, STATUS, read_status
from rl.process_id import is_alive, kernel_state

LEAST_EXPECTED_S = 60.0
TIMES_LONGEST = 5.0
"""A wait is too long that takes so many times as long as the longest step or evaluation before."""
SETUP_S = 600.0
"""Where the run's config does not say otherwise."""
SHOWN_EVENTS = 5

Status = Literal["running", "finished", "ended"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessHealth:
    """One process of a run."""

    state: ProcessState
    lives: bool | None
    """None: it is on another machine."""
    is_stopped: bool

    def describe(self, *, has_finished: bool = False) -> str:
        """A line; `has_finished`: the run, so that its processes need not live."""
        state, lives = self.state, self.lives
        where = f"pid {state.process.pid}" if state.is_here else f"pid {state.process.pid} on {state.host}"
        how = {True: "alive", False: "ended" if has_finished else "dead", None: "elsewhere"}[lives]
        how = "STOPPED" if self.is_stopped else how
        version = "" if state.policy_version is None else f", version {state.policy_version}"
        verb = "was doing" if lives is False else "does"
        did = "" if has_finished and not lives else f": {verb} {state.describe()}"
        return f"{state.name:<16} {how:<9} {where}{version}{did}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHealth:
    """What `examine` found."""

    folder: Path
    status: Status
    """ended: without having finished."""
    last_step: int | None
    last_step_age_s: float | None
    expected_s: float
    """The longest that the controller should wait for one thing."""
    processes: tuple[ProcessHealth, ...]
    events: tuple[dict[str, Any], ...]
    problems: tuple[str, ...]
    """Why it does not move; empty where it does, or has finished."""

    def describe(self) -> str:
        """Lines for people."""
        step = "no step is done" if self.last_step is None else f"step {self.last_step} was the last"
        age = "" if self.last_step_age_s is None else f", {self.last_step_age_s:.1f} s ago"
        lines = [f"{self.folder}: {self.status}; {step}{age}"]
        has_finished = self.status == "finished"
        lines += [f"  {process.describe(has_finished=has_finished)}" for process in self.processes]
        lines += [f"  event: {json.dumps(event)}" for event in self.events[-SHOWN_EVENTS:]]
        if self.problems:
            return "\n".join([*lines, *(f"PROBLEM: {problem}" for problem in self.problems)])
        moving = f"it moves: nothing waits longer than {self.expected_s:.0f} s"
        return "\n".join([*lines, "it has finished" if has_finished else moving])


def examine(folder: Path, *, expected_s: float | None = None) -> RunHealth:
    """What a run does, and whether it moves.

    Args:
        expected_s: the longest that the controller should wait for one thing. None: five times the longest
            step or evaluation so far, at least a minute; before the first one, `timeouts.setup_s`.

    Raises:
        ValueError: it is no run's folder.
    """
    status = read_status(folder) if folder.is_dir() else None
    if status is None:
        raise ValueError(f"{folder} is not the folder of a run: it has no {STATUS}")
    records = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    expected_s = _expected_s(folder, records) if expected_s is None else expected_s
    states = list(read_states(folder / "logs" / STATE_FOLDER))
    processes = tuple(_process(state) for state in states)
    controller = next((process for process in processes if process.state.role == "controller"), None)
    now: Status = "finished" if status == "finished" else "running"
    if now == "running" and controller is not None and controller.lives is False:
        now = "ended"
    steps = [int(record["step"]) for record in records if "step" in record]
    return RunHealth(
        folder=folder,
        status=now,
        last_step=max(steps, default=None),
        last_step_age_s=_age_s(folder / "metrics.jsonl") if steps else None,
        expected_s=expected_s,
        processes=processes,
        events=tuple(read_events(folder / EVENTS)),
        problems=tuple(_problems(folder, now, processes, controller, expected_s)),
    )


def _process(state: ProcessState) -> ProcessHealth:
    if not state.is_here:
        return ProcessHealth(state=state, lives=None, is_stopped=False)
    return ProcessHealth(
        state=state,
        lives=is_alive(state.process),
        is_stopped="stopped" in (kernel_state(state.process) or ""),
    )


def _problems(
    folder: Path,
    status: Status,
    processes: Sequence[ProcessHealth],
    controller: ProcessHealth | None,
    expected_s: float,
) -> list[str]:
    if status == "finished":
        return []
    if controller is None:
        holder = (folder / LOCK).read_text().strip() if (folder / LOCK).exists() else "nobody"
        return [f"its controller has not said what it does (the folder was taken by {holder or 'nobody'})"]
    if status == "ended":
        return ["its controller is dead, and the run has not finished"]
    found = [f"{p.state.name} is dead" for p in processes if p.lives is False]
    found += [f"{p.state.name} is stopped by a signal" for p in processes if p.is_stopped]
    state = controller.state
    silent_s = state.ago_s(state.changed)
    waits = [
        d for d in state.doing if d.what.startswith("waits for trainer") and state.ago_s(d.since) > expected_s
    ]
    if silent_s > expected_s:
        found.append(
            f"in the controller nothing has begun or ended for {silent_s:.0f} s, expected are at most "
            f"{expected_s:.0f} s; it does {state.describe()}"
        )
    elif waits:
        longest = max(state.ago_s(d.since) for d in waits)
        found.append(
            f"the controller {waits[0].what} for {longest:.0f} s, expected are at most {expected_s:.0f} s"
        )
    return found


def _expected_s(folder: Path, records: Sequence[dict[str, float]]) -> float:
    took = [record[name] for record in records for name in ("time/step_s", "time/eval_s") if name in record]
    if took:
        return max(LEAST_EXPECTED_S, TIMES_LONGEST * max(took))
    try:
        values = json.loads((folder / "config.json").read_text())["values"]
        return float(values["timeouts"]["setup_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return SETUP_S


def _age_s(file: Path) -> float:
    """By the wall clock: it is shown, and decides nothing."""
    return max(0.0, time.time() - file.stat().st_mtime)
