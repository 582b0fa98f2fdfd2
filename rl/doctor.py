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
from collections.abc import Iterable, Mapping, Sequence
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
from rl.utils.printing import print_error, print_text
from rl.utils.processes import read_kernel_state

MIN_EXPECTED_S = 60.0
EXPECTED_STEPS = 5.0
"""Longest normal wait, in durations of the longest step or evaluation so far."""
SETUP_S = 600.0
"""Longest normal wait before the first step, if the run's config names none."""
SHOWN_EVENTS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHealth:
    """Result of an examination."""

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
        print_text(health.text)
        stacks = asyncio.run(_report_stacks(health, folder / LOGS))
        print_text(f"\n{stacks}" if stacks else "")
    except (ValueError, OSError) as error:
        print_error(f"error: {error}")
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
    if expected_s is None:
        expected_s = _estimate_longest_wait(run.config_json, records)

    states = {state: _check_liveness(state) for state in read_states(run.logs)}
    status, problems, last_line = _judge(run, states, end=_find_end(events), expected_s=expected_s)
    if status != "running":
        # The end of a process is no problem of a run that has ended.
        for state, liveness in states.items():
            states[state] = "ended" if liveness == "dead" else liveness

    lines = [f"{folder}: {status}; {_describe_progress(run, records)}"]
    for state, liveness in states.items():
        lines.append(_describe(state, liveness))
    for event in events[-SHOWN_EVENTS:]:
        lines.append(f"  event: {json.dumps(event)}")
    # At the end, where they are seen without scrolling.
    for problem in problems:
        lines.append(f"PROBLEM: {problem}")
    if last_line is not None:
        lines.append(last_line)
    return RunHealth(status=status, problems=tuple(problems), text="\n".join(lines), states=states)


def _describe_progress(run: RunFolder, records: Sequence[Mapping[str, float]]) -> str:
    if not records:
        return "no step is done"
    last = max(record["step"] for record in records)
    # Records have no time of their own.
    age_s = max(0.0, time.time() - run.metrics.stat().st_mtime)
    return f"the last step was step {last:.0f}, {age_s:.1f} s ago"


def _judge(
    run: RunFolder,
    states: Mapping[ProcessState, str],
    *,
    end: Mapping[str, Any] | None,
    expected_s: float,
) -> tuple[Literal["running", "finished", "ended"], list[str], str | None]:
    """Return the status, the problems, and the last line for the user besides the problems.

    Args:
        end: the event by which the run says that it has stopped, if it has.
    """
    if run.is_finished:
        return "finished", [], "the run has finished"
    go_on = f"continue it with --resume {run.path}"
    # A run that was told to stop, or failed, has written so. A run that was killed could not.
    if end is not None:
        reason = str(end.get("reason", "for an unknown reason"))
        signal_name = _find_signal(reason)
        if signal_name is not None:
            return "ended", [], f"the run was stopped by {signal_name}; {go_on}"
        return "ended", [f"the run was ended by an error: {reason}"], go_on

    controller = _find_controller(states)
    if controller is not None and states[controller] == "dead":
        return "ended", ["the controller is dead, and the run has not finished"], go_on

    problems = _find_problems(states, controller, expected_s)
    healthy = f"no problem found; the controller may wait up to {expected_s:.0f} s for one thing"
    return "running", problems, None if problems else healthy


def _find_controller(states: Iterable[ProcessState]) -> ProcessState | None:
    for state in states:
        if state.role == "controller":
            return state
    return None


def _find_end(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the event of the run's end if it has ended since it was last started."""
    for event in reversed(events):
        if event["event"] in ("started", "resumed"):
            return None
        if event["event"] == "stopped":
            return event
    return None


def _find_signal(reason: str) -> str | None:
    """Return the name of the signal by which a user has stopped the run, from its reason."""
    if reason.startswith("KeyboardInterrupt"):
        return "Ctrl-C"
    # The controller exits with 128 and the signal's number, as shells do.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if reason.removeprefix("SystemExit: ") == str(128 + number):
            return number.name
    return None


def _check_liveness(state: ProcessState) -> str:
    # The pid is of another machine, or of another container's namespace.
    if not state.is_here:
        return "elsewhere"
    activity = read_kernel_state(state.process)
    if activity is None:
        return "dead"
    return "STOPPED" if "stop" in activity else "alive"


def _describe(state: ProcessState, liveness: str) -> str:
    host = "" if state.is_here else f" on {state.place}"
    version = "" if state.policy_version is None else f", version {state.policy_version}"
    place = f"pid {state.process.pid}{host}{version}"
    return f"  {state.name:<16} {liveness:<9} {place}: {state.describe()}"


def _find_problems(
    states: Mapping[ProcessState, str], controller: ProcessState | None, expected_s: float
) -> list[str]:
    if controller is None:
        return ["the controller has recorded nothing"]
    dead, stopped = [], []
    for state, liveness in states.items():
        if liveness == "dead":
            dead.append(f"{state.name} is dead")
        elif liveness == "STOPPED":
            stopped.append(f"{state.name} is stopped by a signal")
    problems = [*dead, *stopped]

    expected = f"expected are at most {expected_s:.0f} s"
    silent_s = controller.get_age_s(controller.changed_s)
    waits_s, waits_for = 0.0, ""
    for wait in controller.open:
        if wait.name.startswith(f"{WAITS}trainer"):
            waits_s = max(waits_s, controller.get_age_s(wait.since_s))
            waits_for = waits_for or wait.name

    # Only one of the two, as a long wait may be the reason of the silence.
    if silent_s > expected_s:
        problems.append(
            f"in the controller nothing has begun or ended for {silent_s:.0f} s, {expected}; open "
            f"spans: {controller.describe()}"
        )
    elif waits_s > expected_s:
        problems.append(f"the controller {waits_for} for {waits_s:.0f} s, {expected}")
    return problems


def _estimate_longest_wait(config_json: Path, records: Sequence[Mapping[str, float]]) -> float:
    """Return the seconds that the controller of a healthy run may wait for one thing."""
    longest_s = 0.0
    for record in records:
        for name in ("time/step_s", "time/eval_s"):
            seconds = record.get(name, math.nan)
            if math.isfinite(seconds):
                longest_s = max(longest_s, EXPECTED_STEPS * seconds, MIN_EXPECTED_S)
    if longest_s:
        return longest_s

    # Before the first step a run loads and compiles. Its config may be missing or damaged.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        setup_s = parse_json(read_regular(config_json))["values"]["timeouts"]["setup_s"]
        if isinstance(setup_s, int | float) and math.isfinite(setup_s):
            return max(MIN_EXPECTED_S, setup_s)
    return SETUP_S


async def _report_stacks(health: RunHealth, logs: Path) -> str:
    # The stacks of a run that has ended are gone with its processes.
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
