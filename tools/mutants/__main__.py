"""Plant one-line faults in a copy of the tree, one at a time, and see which of the tests notices
each.

    python -m tools.mutants [-k TEXT] [--jobs 2] [--timeout 180] [--list]

`table.tsv` lists the faults: file, original fragment, faulty fragment, and the test files that
should catch it. The tree is copied without what git ignores, and only these files are run, until
the first failure. The table that is printed has a row for each fault: CAUGHT with the test that
failed, or ESCAPED. Status 1 if fewer than 95% are caught, 2 if a row no longer fits the tree.

The process imports PyTorch and other packages once; each fault is tested in a fork of it, which
imports the project from the copy.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import pytest

from tools.mutants.table import MUTANTS, Mutant, find_stale

ROOT = Path(__file__).resolve().parents[2]
SMALLEST_SHARE = 0.95
"""Share of the faults that have to be caught."""
NOT_RUN = (
    pytest.ExitCode.INTERNAL_ERROR,
    pytest.ExitCode.USAGE_ERROR,
    pytest.ExitCode.NO_TESTS_COLLECTED,
)
PRELOADED = (
    "torch",
    "torch.distributed.tensor",
    "transformers",
    "numpy",
    "pytest",
    "safetensors.torch",
    "psutil",
    "pydantic",
)
"""Packages without the project's code that most tests import; a fork has them at once."""

_running: set[int] = set()
"""Process groups of the tests that run now."""
_is_ending = threading.Event()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one fault."""

    mutant: Mutant
    caught_by: str
    """Name of the test that failed, or how else the tests ended; empty if they passed."""
    seconds: float


def copy_tree(target: Path) -> None:
    """Copy what git tracks, and new files that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source = ROOT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)


def run_tests(tree: Path, mutant: Mutant, *, timeout_s: float) -> str:
    """Run the tests of a fault in a fork, and return the test that failed, or an empty text."""
    output = tree / ".mutant_output"
    pid = os.fork()
    if pid == 0:
        _run_in_fork(tree, mutant, output)
    _running.add(pid)
    if _is_ending.is_set():
        _end_group(pid)
    try:
        status = _wait(pid, timeout_s=timeout_s)
    finally:
        _end_group(pid)  # A fault may leave processes of its tests behind.
        _running.discard(pid)
    if status is None:
        return f"timeout of {timeout_s:g} s"
    if os.waitstatus_to_exitcode(status) == 0:
        return ""
    text = output.read_text(errors="replace")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    if failed is None and re.search(r"^\d+ passed", text, re.MULTILINE):
        return ""  # what other processes of the machine leave behind is not this fault's
    code = os.waitstatus_to_exitcode(status)
    if failed is None and code in NOT_RUN:
        print(
            f"{mutant.file}, {mutant.original!r}: the tests did not run:\n{text[-4000:]}",
            flush=True,
        )
        return ""
    return f"the tests ended with status {code}" if failed is None else failed[1]


def _wait(pid: int, *, timeout_s: float) -> int | None:
    """Return the wait status of a fork; None if it was killed at the limit of time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.05)
    _end_group(pid)
    os.waitpid(pid, 0)
    return None


def _end_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _end_at_signal(number: int, _: object) -> None:
    """End all tests that run, whose groups do not hear Ctrl-C, then this process with its copies of
    the tree.
    """
    _is_ending.set()
    for group in tuple(_running):
        _end_group(group)
    sys.exit(128 + number)


def _run_in_fork(tree: Path, mutant: Mutant, output: Path) -> None:
    """Run pytest in this process, and end it."""
    status = 3
    try:
        os.setpgid(0, 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.chdir(tree)
        sys.path[:] = [
            str(tree),
            *(path for path in sys.path if Path(path or ".").resolve() != ROOT),
        ]
        os.environ["PYTHONPATH"] = str(tree)
        # A compiled file may outlive the fault that it was made of.
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        for name in [
            name for name in sys.modules if name.partition(".")[0] in ("tools", "tests", "rl")
        ]:
            del sys.modules[name]
        options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=line"]
        status = int(pytest.main([*options, "-m", mutant.marker, *mutant.tests]))
    finally:
        sys.stdout.flush()
        os._exit(status)


def try_mutant(tree: Path, mutant: Mutant, *, timeout_s: float) -> Outcome:
    """Plant one fault in the copy, run its tests, and take it out again."""
    file = tree / mutant.file
    text = file.read_text()
    started = time.monotonic()
    file.write_text(text.replace(mutant.original, mutant.faulty))
    try:
        caught_by = run_tests(tree, mutant, timeout_s=timeout_s)
    finally:
        file.write_text(text)
    return Outcome(mutant=mutant, caught_by=caught_by, seconds=time.monotonic() - started)


def try_all(mutants: list[Mutant], *, jobs: int, timeout_s: float) -> list[Outcome]:
    """Try all faults, `jobs` at a time, each in a copy of its own."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            tree = Path(name) / str(number)
            copy_tree(tree)
            trees.put(tree)
        lock = threading.Lock()

        def run(mutant: Mutant) -> Outcome:
            if _is_ending.is_set():
                return Outcome(mutant=mutant, caught_by="", seconds=0.0)
            tree = trees.get()
            try:
                outcome = try_mutant(tree, mutant, timeout_s=timeout_s)
            finally:
                trees.put(tree)
            with lock:
                print(describe(outcome), flush=True)
            return outcome

        with ThreadPoolExecutor(jobs) as threads:
            return list(threads.map(run, mutants))


def describe(outcome: Outcome) -> str:
    """Return a row of the table."""
    mutant, verdict = outcome.mutant, outcome.caught_by or "ESCAPED"
    change = f"{' '.join(mutant.original.split())}  ->  {' '.join(mutant.faulty.split())}"
    return f"{mutant.file:36} {change:100.100} {outcome.seconds:5.1f} s  {verdict}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "-k", default="", help="only faults with this text in file, fragments or tests"
    )
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time; 1")
    parser.add_argument(
        "--timeout", type=float, default=180.0, help="seconds for the tests of a fault; 180"
    )
    parser.add_argument("--list", action="store_true", help="print the faults and try none")
    args = parser.parse_args(arguments)
    if args.jobs < 1 or args.timeout <= 0:
        parser.error("--jobs must be at least 1, --timeout above 0")
    if stale := find_stale(ROOT):
        print("\n".join(["error: rows of tools/mutants/table.tsv do not fit the tree:", *stale]))
        return 2
    mutants = [mutant for mutant in MUTANTS if args.k in " ".join(mutant.texts)]
    if args.list or not mutants:
        print(
            "\n".join(" | ".join(mutant.texts) for mutant in mutants) or f"no fault has {args.k!r}"
        )
        return 0 if mutants else 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for package in PRELOADED:
        with suppress(ImportError):
            importlib.import_module(package)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end_at_signal)
    outcomes = try_all(mutants, jobs=args.jobs, timeout_s=args.timeout)
    escaped = [outcome for outcome in outcomes if not outcome.caught_by]
    num_caught = len(outcomes) - len(escaped)
    print(f"\ncaught {num_caught} of {len(outcomes)}")
    for outcome in escaped:
        print(describe(outcome))
    return int(num_caught < SMALLEST_SHARE * len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
