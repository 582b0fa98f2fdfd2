"""Runs with several values of options, one after another: `relay sweep`.

    relay sweep --name try --over lr=1e-5,3e-5 --over seed=0,1 -- --module sum_digits --config tiny
    relay sweep --name try --list sets.json -- --model NAME --data qa.jsonl --reward my_reward:f

The options after `--` are those of `relay train` and hold for all runs. The values of all runs are
checked before the first one starts. The same command goes on with a sweep that was interrupted:
runs that have finished are skipped, and others are resumed.

Exit status: 0; 1 if a run failed; 2 for options that cannot run; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from relay.command import choose_origin
from relay.run_table import format_duration, format_table, summarize_run
from relay.sweep_plan import (
    SUFFIX,
    PlannedRun,
    SweepRecord,
    make_grid,
    parse_over,
    plan_runs,
    read_list,
    read_record,
    write_record,
)
from rl.observability.run_folder import CONFIG, is_run, read_status
from rl.utils.extras import is_checkout
from rl.utils.printing import print_error, print_text
from rl.utils.user_code import TREE

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 130
"""Exit status of a run or a sweep that was interrupted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepTask:
    """Next action for one run of a sweep."""

    run: PlannedRun
    folder: Path
    action: Literal["skip", "resume", "start", "replace"]
    """skip: it has finished; replace: it ended before its config was written."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sweep, and return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    own, common = _split(argv)
    options = _parse(own)
    # Nothing is written before every run has been checked.
    try:
        runs = plan_runs(options.name, _list_option_sets(options))
        _refuse_options(common, runs)
        folder = check_runs(runs, common)
        tasks = plan_tasks(options.name, runs, common, folder=folder)
        if options.dry_run:
            _print_plan(tasks, common)
            return 0
        _record(folder / f"{options.name}{SUFFIX}", runs, common)
        return run_tasks(tasks, common)
    except ValueError as error:
        print_error(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        print_error("stopped by Ctrl-C")
        return INTERRUPTED


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the sweep's own arguments, and those after `--`."""
    argv = list(argv)
    if "--" not in argv:
        return argv, []
    place = argv.index("--")
    return argv[:place], argv[place + 1 :]


def _list_option_sets(options: argparse.Namespace) -> list[Any]:
    """Return the options of each run: each set of the list with each combination of the grid."""
    if not options.over and not options.list:
        raise ValueError(
            "nothing to sweep over: give --over OPTION=VALUE,VALUE,... or --list FILE.json"
        )
    # Without --over the grid is one point without options, and without --list there is one set.
    grid = make_grid(map(parse_over, options.over))
    option_sets = read_list(Path(options.list).expanduser()) if options.list else [{}]
    combined = []
    for option_set in option_sets:
        for point in grid:
            if twice := option_set.keys() & point.keys():
                raise ValueError(f"{', '.join(sorted(twice))}: is in --list and in --over")
            combined.append({**option_set, **point})
    return combined


def _refuse_options(common: Sequence[str], runs: Sequence[PlannedRun]) -> None:
    """Raise ValueError for common options that a sweep cannot have."""
    swept = {option for run in runs for option in run.options}
    for token in common:
        if not token.startswith("--"):
            continue
        name = token.removeprefix("--").partition("=")[0].replace("-", "_")
        if name in _REFUSED:
            raise ValueError(f"{token}: not for the runs of a sweep; {_REFUSED[name]}")
        if name in swept:
            raise ValueError(f"{token}: the sweep has values of it; leave it out after --")


_REFUSED = {
    "name": "their names begin with that of the sweep, --name before --",
    "overwrite": "what has finished is skipped; with another --name everything runs again",
    "resume": "the sweep resumes its runs itself",
    "explain": "--dry_run before -- shows the commands of the runs",
    "help": "`relay train --help` shows the options of a run",
    "help_all": "`relay train --help-all` shows the options of a run",
}
"""Options that runs of a sweep cannot have, and what to do instead."""


def _record(file: Path, runs: Sequence[PlannedRun], common: Sequence[str]) -> None:
    """Write the record of the sweep, which keeps the runs of an earlier and larger grid."""
    before = read_record(file)
    names = dict.fromkeys([*(before.names if before else ()), *(run.name for run in runs)])
    write_record(file, SweepRecord(common=tuple(common), names=tuple(names)))


# Checks


def check_runs(runs: Sequence[PlannedRun], common: Sequence[str]) -> Path:
    """Check the options of all runs, and return the folder of the runs.

    Raises:
        ValueError: a run of these options could not start; names the run.
    """
    # It imports PyTorch, after the quick errors.
    from rl.config.cli import parse_cli
    from rl.config.rules import check_rules
    from rl.run_rules import RULES

    folder = Path()
    for run in runs:
        arguments = [*common, *run.list_arguments()]
        module, config = choose_origin(arguments)
        try:
            request = parse_cli(arguments, default_module=module, default_config=config)
            # A server's config, for example, has no folder of runs.
            if not hasattr(request.config, "dump_folder"):
                raise ValueError(f"{request.origin} is not a training run")
            check_rules(request.config, RULES)
        except SystemExit:  # the reason has been printed
            raise ValueError(f"run {run.name} of the sweep cannot start; nothing runs") from None
        except ValueError as error:
            raise ValueError(f"run {run.name} of the sweep: {error}") from error
        folder = Path(request.config.dump_folder).expanduser().absolute()
    return folder


def plan_tasks(
    sweep: str, runs: Sequence[PlannedRun], common: Sequence[str], *, folder: Path
) -> list[SweepTask]:
    """Return what is to do for each run.

    Raises:
        ValueError: the folder holds a sweep of this name with other options, or another run with
            the name of one of the runs.
    """
    record = read_record(folder / f"{sweep}{SUFFIX}")
    # A sweep of which nothing has run yet, as its runs were refused, may have other options.
    has_runs = record is not None and any(is_run(folder / name) for name in record.names)
    if record is not None and has_runs and list(record.common) != list(common):
        raise ValueError(
            f"the sweep {sweep} was started with other options: `{shlex.join(record.common)}`; "
            "give the same ones to go on, or choose another --name"
        )
    names = () if record is None else record.names
    return [_plan_task(run, folder / run.name, is_known=run.name in names) for run in runs]


def _plan_task(run: PlannedRun, folder: Path, *, is_known: bool) -> SweepTask:
    # A run that was refused has left no folder.
    if not is_run(folder):
        return SweepTask(run=run, folder=folder, action="start")
    if not is_known:
        raise ValueError(f"{folder} holds a run that is not of this sweep: choose another --name")
    if read_status(folder) == "finished":
        return SweepTask(run=run, folder=folder, action="skip")
    # A run that was killed at its very start has no config to go on with.
    action: Literal["resume", "replace"] = "resume" if (folder / CONFIG).is_file() else "replace"
    return SweepTask(run=run, folder=folder, action=action)


def make_command(task: SweepTask, common: Sequence[str]) -> list[str]:
    """Return the command of a run."""
    # `-P`: a folder `relay` of the current one is the user's.
    command = [sys.executable, "-P", "-m", "relay", "train"]
    # A resumed run has all of its options in its config.json.
    if task.action == "resume":
        return [*command, "--resume", str(task.folder)]
    command += [*common, *task.run.list_arguments(), f"--name={task.run.name}"]
    return [*command, "--overwrite"] if task.action == "replace" else command


def _print_plan(tasks: Sequence[SweepTask], common: Sequence[str]) -> None:
    for task in tasks:
        command = make_command(task, common)
        text = "has finished" if task.action == "skip" else shlex.join(["relay", *command[4:]])
        print_text(f"{task.run.name}: {text}")


# The runs


def run_tasks(tasks: Sequence[SweepTask], common: Sequence[str]) -> int:
    """Run what is to do, print the table, and return the exit status."""
    failures: dict[str, int] = {}
    interrupted = False
    for number, task in enumerate(tasks, start=1):
        place = f"{task.run.name} ({number} of {len(tasks)})"
        if task.action == "skip":
            print_text(f"sweep: {place} has finished already")
            continue
        print_text(f"sweep: {place} {_BEGINS[task.action]}")
        started_s = time.monotonic()
        status, interrupted = _run(make_command(task, common))
        took = format_duration(time.monotonic() - started_s)
        if interrupted:
            print_text(f"sweep: {place} was stopped after {took}")
            break
        # The others go on: one value that diverges should not cost the rest of the sweep.
        if status:
            failures[task.run.name] = status
        how = f"failed with status {status}" if status else "finished"
        print_text(f"sweep: {place} {how} after {took}")

    # Of a run that was refused there is no folder.
    folders = [task.folder for task in tasks if is_run(task.folder)]
    if folders:
        print_text(f"\n{format_table(map(summarize_run, folders))}")
    for name, status in failures.items():
        print_error(f"error: run {name} failed with status {status}; the same command retries it")
    if interrupted:
        num_done = sum(read_status(task.folder) == "finished" for task in tasks)
        print_error(
            f"the sweep was stopped with {num_done} of {len(tasks)} runs finished; the same "
            "command goes on with it"
        )
        return INTERRUPTED
    return 1 if failures else 0


_BEGINS = {"start": "starts", "resume": "goes on", "replace": "starts again"}


def _run(command: Sequence[str]) -> tuple[int, bool]:
    """Run a command to its end; return its status, and whether this process was told to stop."""
    received: list[int] = []
    processes: list[subprocess.Popen[bytes]] = []

    def stop(number: int, _: object) -> None:
        received.append(number)
        for process in processes:
            process.send_signal(number)

    with _handle(stop):
        # In a session of its own, so that Ctrl-C of a terminal reaches it once: through `stop`.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env=_make_environment(), start_new_session=True
        )
        processes.append(process)
        if received:  # before there was a process
            process.send_signal(received[0])
        return process.wait(), bool(received)


@contextlib.contextmanager
def _handle(handler: Any) -> Iterator[None]:
    """Call a handler for the signals that end a program."""
    before = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _make_environment() -> dict[str, str]:
    """Return the environment in which a child finds the same relay as this process."""
    environment = dict(os.environ)
    if is_checkout():
        paths = [str(TREE), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="relay sweep",
        usage="relay sweep --name NAME --over OPTION=VALUE,VALUE ... -- <options of relay train>",
        description="Train with several values of options, one run after another. The same "
        "command goes on with a sweep that was interrupted.",
        allow_abbrev=False,
    )
    parser.add_argument("--name", required=True, help="beginning of the names of its runs")
    parser.add_argument(
        "--over",
        nargs="+",
        action="extend",
        default=[],
        metavar="OPTION=VALUE,VALUE",
        help="values of an option, with every combination of several --over; commas separate "
        'values, and spaces the elements of a tuple: "betas=0.9 0.95,0.8 0.9"',
    )
    parser.add_argument(
        "--list", metavar="FILE", help='JSON list of option sets, such as [{"lr": 1e-5}, ...]'
    )
    parser.add_argument(
        "--dry_run", action="store_true", help="print the commands of the runs and start none"
    )
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"{unknown[0]}: options of the runs follow after --")
    return options
