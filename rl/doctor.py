"""Diagnosis of a run: `python -m rl.doctor outputs/x`.

Prints the run's status, its last step, the open spans of each process, the latest events, and the stacks of all
processes of this machine. Nothing in the folder is written or locked, and the run is not disturbed: its processes
handle the signal that requests the stacks.

Exit status: 0 for a healthy or finished run, 1 if something is dead, stopped or waits for too long, 2 for a folder
that is not a run's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl.observability.events import read_events
from rl.observability.metrics import read_metrics
from rl.observability.run_folder import RunFolder
from rl.observability.span_reader import WAITS, ProcessState, read_states
from rl.observability.stacks import request_stacks
from rl.utils.processes import is_alive, kernel_state

MIN_EXPECTED_S = 60.0
EXPECTED_STEPS = 5.0
"""Longest normal wait, in durations of the longest step or evaluation so far."""
SETUP_S = 600.0
"""Longest normal wait before the first step, if the run's config names none."""
SHOWN_EVENTS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessHealth:
    """Health of one process of a run."""

    state: ProcessState
    is_alive: bool | None
    """Liveness of the process; None on another machine."""
    is_stopped: bool

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
    status: Literal["running", "finished", "ended"]
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    options = _parse(argv)
    try:
        health = examine(Path(options.folder).expanduser(), expected_s=options.expected_s)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(health.describe(), flush=True)
    if not options.brief:
        print(asyncio.run(_stacks(health)))
    return 1 if health.problems else 0


def examine(folder: Path, *, expected_s: float | None = None) -> RunHealth:
    """Examine a run, while it runs or afterwards.

    Args:
        expected_s: the longest that the controller should wait for one thing; None: five times the longest
            step or evaluation so far, but at least a minute, and `timeouts.setup_s` before the first one.

    Raises:
        ValueError: the folder is not that of a run.
    """
    run = RunFolder.to_read(folder)
    records = read_metrics(run.metrics)
    expected_s = _expected_s(run.config_json, records) if expected_s is None else expected_s
    processes = tuple(map(_health, read_states(run.logs)))
    controller = next((process for process in processes if process.state.role == "controller"), None)
    status: Literal["running", "finished", "ended"] = "finished" if run.is_finished else "running"
    problems = []
    if status == "running" and controller is not None and controller.is_alive is False:
        status, problems = "ended", ["the controller is dead, and the run has not finished"]
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


def _health(state: ProcessState) -> ProcessHealth:
    if not state.is_here:
        return ProcessHealth(state=state, is_alive=None, is_stopped=False)
    is_stopped = "stopped" in (kernel_state(state.process) or "")
    return ProcessHealth(state=state, is_alive=is_alive(state.process), is_stopped=is_stopped)


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


async def _stacks(health: RunHealth) -> str:
    states = [process.state for process in health.processes if process.is_alive is not False]
    texts = await asyncio.gather(*(request_stacks(state, health.folder / "logs") for state in states))
    blocks = [f"\n==== {s.name}: {s.describe()}\n{t.rstrip()}" for s, t in zip(states, texts, strict=True)]
    return "\n".join(blocks)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rl.doctor", description="What a run is doing, and whether it makes progress."
    )
    parser.add_argument("folder", help="folder of the run, such as outputs/x")
    parser.add_argument("--brief", action="store_true", help="without the stacks")
    parser.add_argument(
        "--expected_s",
        type=float,
        help="longest time that the controller should wait for one thing; by default five times the longest "
        "step or evaluation so far, at least a minute",
    )
    options = parser.parse_args(argv)
    if options.expected_s is not None and not options.expected_s > 0:
        parser.error(f"--expected_s {options.expected_s}: must be a number of seconds above 0")
    return options


if __name__ == "__main__":
    sys.exit(main())
