"""Diagnosis of a run: `python -m rl.doctor outputs/x`.

Prints the run's status, its last step, the open spans of each process, the latest events, and the
stacks of all processes of this machine. Nothing in the folder is written or locked, and the run is
not disturbed.

Exit status: 0 for a run that is healthy, has finished, or was stopped by its user; 1 for a run that
ended by an error, or if something is dead, stopped or waits for too long; 2 for a folder that is
not a run's.

The folder may come from anybody: nothing in it is followed or believed, and a process gets a signal
only if it writes into this folder (`rl.observability.stacks`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl.observability.events import read_events
from rl.observability.metrics import read_metrics
from rl.observability.run_folder import LOGS, RunFolder
from rl.observability.spans import WAITS, ProcessState, read_states
from rl.observability.stacks import collect_reports, format_reports
from rl.utils.compat import exit_after
from rl.utils.files import parse_json, read_regular
from rl.utils.printing import say, say_error
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
    """Each process with its liveness: alive, STOPPED, dead, ended (with its run), or elsewhere (on
    another machine, or in another container)."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    folder = Path(options.folder).expanduser()
    try:
        health = examine(folder, expected_s=options.expected_s)
        say(health.text)
        stacks = asyncio.run(_report_stacks(health, folder / LOGS))
        say(f"\n{stacks}" if stacks else "")
    except (ValueError, OSError) as error:
        say_error(f"error: {error}")
        return 2
    return 1 if health.problems else 0


def examine(folder: Path, *, expected_s: float | None = None) -> RunHealth:
    """Examine a run, while it runs or afterwards.

    Args:
        expected_s: the longest that the controller should wait for one thing; None: five times the
            longest step or evaluation so far, but at least a minute, and `timeouts.setup_s` before
            the first one.

    Raises:
        ValueError: the folder is not that of a run, or holds something else in place of its files.
    """
    run = RunFolder.to_read(folder)
    records, events = read_metrics(run.metrics), read_events(run.events)
    expected_s = _expected_s(run.config_json, records) if expected_s is None else expected_s
    states = {state: _liveness(state) for state in read_states(run.logs)}
    status, problems, end = _judge(run, states, end=_end(events), expected_s=expected_s)
    if status != "running":
        states = {state: "ended" if how == "dead" else how for state, how in states.items()}
    step, steps = "no step is done", [record["step"] for record in records]
    if steps:
        age_s = max(0.0, time.time() - run.metrics.stat().st_mtime)
        step = f"the last step was step {max(steps):.0f}, {age_s:.1f} s ago"
    lines = [
        f"{folder}: {status}; {step}",
        *(_describe(state, how) for state, how in states.items()),
    ]
    lines += [f"  event: {json.dumps(event)}" for event in events[-SHOWN_EVENTS:]]
    lines += [f"PROBLEM: {problem}" for problem in problems]
    if end is not None:
        lines.append(end)
    return RunHealth(status=status, problems=tuple(problems), text="\n".join(lines), states=states)


def _judge(
    run: RunFolder,
    states: Mapping[ProcessState, str],
    *,
    end: Mapping[str, Any] | None,
    expected_s: float,
) -> tuple[Literal["running", "finished", "ended"], list[str], str | None]:
    """Return the status, the problems, and the last line for the user if there is one besides the
    problems.

    Args:
        end: the event by which the run says that it has stopped, if it has.
    """
    if run.is_finished:
        return "finished", [], "the run has finished"
    go_on = f"continue it with --resume {run.path}"
    if end is not None:
        reason = str(end.get("reason", "for an unknown reason"))
        if (signal_name := _signal_of(reason)) is not None:
            return "ended", [], f"the run was stopped by {signal_name}; {go_on}"
        return "ended", [f"the run was ended by an error: {reason}"], go_on
    controller = next((state for state in states if state.role == "controller"), None)
    if controller is not None and states[controller] == "dead":
        return "ended", ["the controller is dead, and the run has not finished"], go_on
    problems = _problems(states, controller, expected_s)
    healthy = f"no problem found; the controller may wait up to {expected_s:.0f} s for one thing"
    return "running", problems, None if problems else healthy


def _end(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the event of the run's end if it has ended since it was last started."""
    names = ("started", "resumed", "stopped")
    last = next((event for event in reversed(events) if event["event"] in names), None)
    return last if last is not None and last["event"] == "stopped" else None


def _signal_of(reason: str) -> str | None:
    """Return the name of the signal by which a user has stopped the run, from the reason of its
    event.
    """
    if reason.startswith("KeyboardInterrupt"):
        return "Ctrl-C"
    status = reason.removeprefix("SystemExit: ")
    return {str(128 + number): number.name for number in (signal.SIGTERM, signal.SIGHUP)}.get(
        status
    )


def _liveness(state: ProcessState) -> str:
    if not state.is_here:
        return "elsewhere"
    activity = kernel_state(state.process)
    return "dead" if activity is None else "STOPPED" if "stop" in activity else "alive"


def _describe(state: ProcessState, how: str) -> str:
    host = "" if state.is_here else f" on {state.place}"
    version = "" if state.policy_version is None else f", version {state.policy_version}"
    return f"  {state.name:<16} {how:<9} pid {state.process.pid}{host}{version}: {state.describe()}"


def _problems(
    states: Mapping[ProcessState, str], controller: ProcessState | None, expected_s: float
) -> list[str]:
    if controller is None:
        return ["the controller has recorded nothing"]
    found = [f"{state.name} is dead" for state, how in states.items() if how == "dead"]
    found += [
        f"{state.name} is stopped by a signal" for state, how in states.items() if how == "STOPPED"
    ]
    silent_s, expected = (
        controller.age_s(controller.changed_s),
        f"expected are at most {expected_s:.0f} s",
    )
    waits = [wait for wait in controller.open if wait.name.startswith(f"{WAITS}trainer")]
    if silent_s > expected_s:
        found.append(
            f"in the controller nothing has begun or ended for {silent_s:.0f} s, {expected}; open "
            f"spans: {controller.describe()}"
        )
    elif waits and (waits_s := max(controller.age_s(wait.since_s) for wait in waits)) > expected_s:
        found.append(f"the controller {waits[0].name} for {waits_s:.0f} s, {expected}")
    return found


def _expected_s(config_json: Path, records: Sequence[dict[str, float]]) -> float:
    took = [
        record[name]
        for record in records
        for name in ("time/step_s", "time/eval_s")
        if name in record
    ]
    if finite := [seconds for seconds in took if math.isfinite(seconds)]:
        return max(MIN_EXPECTED_S, EXPECTED_STEPS * max(finite))
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        setup_s = parse_json(read_regular(config_json))["values"]["timeouts"]["setup_s"]
        if isinstance(setup_s, int | float) and math.isfinite(setup_s):
            return max(MIN_EXPECTED_S, setup_s)
    return SETUP_S


async def _report_stacks(health: RunHealth, logs: Path) -> str:
    states = [state for state, how in health.states.items() if how not in ("dead", "ended")]
    return format_reports(await collect_reports(states, logs)).rstrip()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rl.doctor",
        description="What a run is doing, and whether it makes progress.",
    )
    parser.add_argument("folder", help="folder of the run, such as outputs/x")
    parser.add_argument(
        "--expected_s",
        type=float,
        help="longest time that the controller should wait for one thing; by default five times "
        "the longest step or evaluation so far, at least a minute",
    )
    options = parser.parse_args(argv)
    if options.expected_s is not None and not options.expected_s > 0:
        parser.error(f"--expected_s {options.expected_s}: must be a number of seconds above 0")
    return options


if __name__ == "__main__":
    exit_after(main)
