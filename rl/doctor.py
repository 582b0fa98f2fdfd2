"""Diagnosis of a run: `python -m rl.doctor outputs/x`.

Prints the run's status, its last step, the open spans of each process, the latest events, and the stacks of all
processes of this machine. Nothing in the folder is written or locked, and the run is not disturbed.

Exit status: 0 for a healthy or finished run, 1 if something is dead, stopped or waits for too long, 2 for a folder
that is not a run's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rl.observability.events import read_events
from rl.observability.metrics import read_metrics
from rl.observability.run_folder import RunFolder
from rl.observability.spans import WAITS, ProcessState, read_states
from rl.observability.stacks import request_stacks
from rl.utils.processes import kernel_state

MIN_EXPECTED_S = 60.0
EXPECTED_STEPS = 5.0
"""Longest normal wait, in durations of the longest step or evaluation so far."""
SETUP_S = 600.0
"""Longest normal wait before the first step, if the run's config names none."""
SHOWN_EVENTS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHealth:
    status: Literal["running", "finished", "ended"]
    """`ended` means without having finished."""
    problems: tuple[str, ...]
    """Reasons why the run makes no progress; empty for a finished or healthy run."""
    text: str
    """Lines for the user, without stacks."""
    states: dict[ProcessState, str]
    """Each process with its liveness: alive, STOPPED, dead, ended (with its run), or elsewhere (on another
    machine)."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    try:
        health = examine(Path(options.folder).expanduser(), expected_s=options.expected_s)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(health.text, flush=True)
    print(asyncio.run(_stacks(health, Path(options.folder).expanduser() / "logs")))
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
    states = {state: _liveness(state) for state in read_states(run.logs)}
    controller = next((state for state in states if state.role == "controller"), None)
    status: Literal["running", "finished", "ended"] = "finished" if run.is_finished else "running"
    problems: list[str] = []
    if status == "running" and controller is not None and states[controller] == "dead":
        status, problems = "ended", ["the controller is dead, and the run has not finished"]
    elif status == "running":
        problems = _problems(states, controller, expected_s)
    step = "no step is done"
    if records:
        age_s = max(0.0, time.time() - run.metrics.stat().st_mtime)
        step = f"the last step was step {max(int(r['step']) for r in records)}, {age_s:.1f} s ago"
    if status == "finished":
        states = {state: "ended" if how == "dead" else how for state, how in states.items()}
    lines = [f"{folder}: {status}; {step}", *(_describe(state, how) for state, how in states.items())]
    lines += [f"  event: {json.dumps(event)}" for event in read_events(run.events)[-SHOWN_EVENTS:]]
    lines += [f"PROBLEM: {problem}" for problem in problems]
    if status == "finished":
        lines.append("the run has finished")
    elif not problems:
        lines.append(f"no problem found; the controller may wait up to {expected_s:.0f} s for one thing")
    return RunHealth(status=status, problems=tuple(problems), text="\n".join(lines), states=states)


def _liveness(state: ProcessState) -> str:
    if not state.is_here:
        return "elsewhere"
    activity = kernel_state(state.process)
    return "dead" if activity is None else "STOPPED" if "stop" in activity else "alive"


def _describe(state: ProcessState, how: str) -> str:
    host = "" if state.is_here else f" on {state.host}"
    version = "" if state.policy_version is None else f", version {state.policy_version}"
    return f"  {state.name:<16} {how:<9} pid {state.process.pid}{host}{version}: {state.describe()}"


def _problems(
    states: Mapping[ProcessState, str], controller: ProcessState | None, expected_s: float
) -> list[str]:
    if controller is None:
        return ["the controller has recorded nothing"]
    found = [f"{state.name} is dead" for state, how in states.items() if how == "dead"]
    found += [f"{state.name} is stopped by a signal" for state, how in states.items() if how == "STOPPED"]
    silent_s, expected = controller.age_s(controller.changed_s), f"expected are at most {expected_s:.0f} s"
    waits = [wait for wait in controller.open if wait.name.startswith(f"{WAITS}trainer")]
    if silent_s > expected_s:
        found.append(
            f"in the controller nothing has begun or ended for {silent_s:.0f} s, {expected}; open spans: "
            f"{controller.describe()}"
        )
    elif waits and (waits_s := max(controller.age_s(wait.since_s) for wait in waits)) > expected_s:
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


async def _stacks(health: RunHealth, logs: Path) -> str:
    states = [state for state, how in health.states.items() if how not in ("dead", "ended")]
    texts = await asyncio.gather(*(request_stacks(state, logs) for state in states))
    blocks = [f"\n==== {s.name}: {s.describe()}\n{t.rstrip()}" for s, t in zip(states, texts, strict=True)]
    return "\n".join(blocks)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rl.doctor", description="What a run is doing, and whether it makes progress."
    )
    parser.add_argument("folder", help="folder of the run, such as outputs/x")
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
