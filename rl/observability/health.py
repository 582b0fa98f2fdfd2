"""Diagnosis of a run from the files of its folder, while it runs or afterwards. Nothing is written or locked."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl.observability.events import read_events
from rl.observability.metrics import read_metrics
from rl.observability.run_folder import RunFolder
from rl.observability.span_reader import WAITS, ProcessState, read_states
from rl.utils.processes import is_alive, kernel_state

MIN_EXPECTED_S = 60.0
EXPECTED_STEPS = 5.0
"""Longest normal wait, in durations of the longest step or evaluation so far."""
SETUP_S = 600.0
"""Longest normal wait before the first step, if the run's config names none."""
SHOWN_EVENTS = 5

Status = Literal["running", "finished", "ended"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessHealth:
    """Health of one process of a run."""

    state: ProcessState
    is_alive: bool | None
    """Liveness of the process; None on another machine."""
    is_stopped: bool

    @classmethod
    def of(cls, state: ProcessState) -> ProcessHealth:
        if not state.is_here:
            return cls(state=state, is_alive=None, is_stopped=False)
        activity = kernel_state(state.process) or ""
        return cls(state=state, is_alive=is_alive(state.process), is_stopped="stopped" in activity)

    def describe(self, *, run_is_finished: bool) -> str:
        """Return one line about the process."""
        state = self.state
        where = f"pid {state.process.pid}" if state.is_here else f"pid {state.process.pid} on {state.host}"
        how = {True: "alive", False: "ended" if run_is_finished else "dead", None: "elsewhere"}[self.is_alive]
        how = "STOPPED" if self.is_stopped else how
        version = "" if state.policy_version is None else f", version {state.policy_version}"
        return f"{state.name:<16} {how:<9} {where}{version}: {state.describe()}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHealth:
    """Health of a run and its processes."""

    folder: Path
    status: Status
    """`ended` means without having finished."""
    last_step: int | None
    last_step_age_s: float
    """Time since the last line of metrics.jsonl."""
    expected_s: float
    """Longest time that the controller should wait for one thing."""
    processes: tuple[ProcessHealth, ...]
    events: tuple[dict[str, Any], ...]
    problems: tuple[str, ...]
    """Reasons why the run makes no progress; empty for a finished or healthy run."""

    def describe(self) -> str:
        step = f"the last step was step {self.last_step}, {self.last_step_age_s:.1f} s ago"
        lines = [f"{self.folder}: {self.status}; {'no step is done' if self.last_step is None else step}"]
        is_finished = self.status == "finished"
        lines += [f"  {process.describe(run_is_finished=is_finished)}" for process in self.processes]
        lines += [f"  event: {json.dumps(event)}" for event in self.events[-SHOWN_EVENTS:]]
        lines += [f"PROBLEM: {problem}" for problem in self.problems]
        if is_finished:
            lines.append("the run has finished")
        elif not self.problems:
            lines.append(
                f"no problem found; the controller may wait up to {self.expected_s:.0f} s for one thing"
            )
        return "\n".join(lines)


def examine(folder: Path, *, expected_s: float | None = None) -> RunHealth:
    """Examine a run.

    Args:
        expected_s: the longest that the controller should wait for one thing; None: five times the longest
            step or evaluation so far, but at least a minute, and `timeouts.setup_s` before the first one.

    Raises:
        ValueError: the folder is not that of a run.
    """
    run = RunFolder.to_read(folder)
    records = read_metrics(run.metrics) if run.metrics.exists() else []
    expected_s = _expected_s(run.config_json, records) if expected_s is None else expected_s
    processes = tuple(map(ProcessHealth.of, read_states(run.logs)))
    controller = next((process for process in processes if process.state.role == "controller"), None)
    status: Status = "finished" if run.is_finished else "running"
    if status == "running" and controller is not None and controller.is_alive is False:
        status = "ended"
    problems: Sequence[str] = ()
    if status == "ended":
        problems = ("the controller is dead, and the run has not finished",)
    elif status == "running":
        problems = _problems(processes, controller, expected_s)
    steps = [int(record["step"]) for record in records]
    return RunHealth(
        folder=folder,
        status=status,
        last_step=max(steps, default=None),
        last_step_age_s=max(0.0, time.time() - run.metrics.stat().st_mtime) if steps else 0.0,
        expected_s=expected_s,
        processes=processes,
        events=tuple(read_events(run.events)),
        problems=tuple(problems),
    )


def _problems(
    processes: Sequence[ProcessHealth], controller: ProcessHealth | None, expected_s: float
) -> list[str]:
    if controller is None:
        return ["the controller has recorded nothing"]
    found = [f"{p.state.name} is dead" for p in processes if p.is_alive is False]
    found += [f"{p.state.name} is stopped by a signal" for p in processes if p.is_stopped]
    state = controller.state
    silent_s = state.age_s(state.changed_s)
    expected = f"expected are at most {expected_s:.0f} s"
    waits = [wait for wait in state.open if wait.name.startswith(f"{WAITS}trainer")]
    if silent_s > expected_s:
        found.append(
            f"in the controller nothing has begun or ended for {silent_s:.0f} s, {expected}; open spans: "
            f"{state.describe()}"
        )
    elif waits and (waits_s := max(state.age_s(wait.since_s) for wait in waits)) > expected_s:
        found.append(f"the controller {waits[0].name} for {waits_s:.0f} s, {expected}")
    return found


def _expected_s(config_json: Path, records: Sequence[dict[str, float]]) -> float:
    took = [record[name] for record in records for name in ("time/step_s", "time/eval_s") if name in record]
    if took:
        return max(MIN_EXPECTED_S, EXPECTED_STEPS * max(took))
    try:
        return float(json.loads(config_json.read_text())["values"]["timeouts"]["setup_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return SETUP_S
