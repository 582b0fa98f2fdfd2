"""pytest hooks that fail a session which leaves a process or a shared-memory file behind.

A process is the session's when it descends from it, or when it carries the session's mark in its environment:
a process that loses its parent is handed to init, and only the mark still tells.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterable, Iterator

import psutil
import pytest

from actors.guard import GUARD_NAME
from actors.processes import SHARED_MEMORY, mapped_shared_memory

MARK = "RELAY_TEST_SESSION"
GRACE_S = 10.0
"""Time that the last processes may take to exit after the last test."""
HELPERS = (
    "multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch/_inductor/compile_worker",
    f"actors.guard {GUARD_NAME}",
)  # fmt: skip
"""Processes that exit with the interpreter."""


class LeakError(Exception):
    """Names of the processes and files that a session left behind."""


def find_session_processes(mark: str) -> dict[int, str]:
    """Return the command line by pid of all living processes of this session except this one."""
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    found: dict[int, str] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) or process.pid == os.getpid():
                continue
            if process.pid in children or process.environ().get(MARK) == mark:
                # A process has no arguments in the middle of an exec.
                command = " ".join(process.cmdline()) or f"[{process.name()}]"
                if not any(helper in command for helper in HELPERS):
                    found[process.pid] = command
    return found


def list_shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()}


def drop_files_of_others(names: Iterable[str], *, own: Iterable[int]) -> set[str]:
    """Return the names without files that a process outside of `own` has mapped."""
    left = set(names)
    return (
        left - {path.name for path in mapped_shared_memory(set(psutil.pids()) - set(own))} if left else left
    )


def check_nothing_left(*, mark: str, shared_memory_before: set[str], grace_s: float) -> None:
    """Kill the remaining processes of the session, and raise a LeakError that lists them."""
    deadline = time.monotonic() + grace_s
    while (processes := find_session_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    own = {os.getpid(), *processes}
    files = drop_files_of_others(list_shared_memory() - shared_memory_before, own=own)
    for pid in processes:
        with contextlib.suppress(psutil.Error):
            psutil.Process(pid).kill()
    lines = [f"process {pid}: {text}" for pid, text in sorted(processes.items())]
    lines += [f"shared-memory file {SHARED_MEMORY / name}" for name in sorted(files)]
    if lines:
        raise LeakError("the test session left behind:\n  " + "\n  ".join(lines))


_before = pytest.StashKey[tuple[str, set[str]]]()
"""The session's mark, and the names in shared memory at its start."""


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):  # a worker of pytest-xdist leaves the check to its parent
        os.environ[MARK] = uuid.uuid4().hex
        session.config.stash[_before] = os.environ[MARK], list_shared_memory()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Run after the teardown of the session's fixtures and the end of its workers."""
    yield
    if _before not in session.config.stash:
        return
    mark, shared_memory = session.config.stash[_before]
    try:
        check_nothing_left(mark=mark, shared_memory_before=shared_memory, grace_s=GRACE_S)
    except LeakError as error:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(f"\nERROR: {error}", red=True)
