"""Search for processes and files that a test session, or a process and its children, leave on this
machine.

A process belongs to a session when it descends from it, or when it carries the session's mark in
its environment: a process that loses its parent is handed to init, and only the mark still tells.

    watch = Watch(folder)
    ...start a process with watch.environment()...
    left = watch.left(grace_s=10, run_folder=...)
"""

from __future__ import annotations

import getpass
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from filelock import FileLock, Timeout

from actors.launch.cleanup import (
    GUARD_NAME,
    SHARED_MEMORY,
    find_by_environment,
    find_shared_memory,
    list_with_descendants,
)
from rl.utils.processes import ProcessId, identify, kill

SESSION_MARK = "RELAY_TEST_SESSION"
WATCH_MARK = "RELAY_WATCHED"
GRACE_S = 10.0
"""Time that the last processes may take to exit after the last test."""
HELPERS = (
    "multiprocessing.resource_tracker", "multiprocessing.forkserver",
    "torch/_inductor/compile_worker",
    f"actors.launch.cleanup {GUARD_NAME}",
)  # fmt: skip
"""Processes that exit with the interpreter."""
CACHES = ("torchinductor_", getpass.getuser())
"""Names of temporary folders that other programs use later; Monarch's log contains the user's name.
"""

FoundT = TypeVar("FoundT", dict[ProcessId, str], list[str])


class LeakError(Exception):
    """Names of the processes and files that a session left behind."""


def commands(processes: Iterable[ProcessId]) -> dict[ProcessId, str]:
    """Return the command lines of all processes except this one that are still alive."""
    found: dict[ProcessId, str] = {}
    for process in processes:
        with suppress(psutil.Error):
            running = psutil.Process(process.pid)
            if process.pid != os.getpid():
                # A process has no arguments in the middle of an exec.
                found[process] = " ".join(running.cmdline()) or f"[{running.name()}]"
    return found


def find_session_processes(mark: str) -> dict[ProcessId, str]:
    """Return the command lines of all living processes of this session except this one."""
    this = identify(os.getpid())
    assert this is not None
    found = commands({*list_with_descendants([this]), *find_by_environment(SESSION_MARK, mark)})
    return {p: text for p, text in found.items() if not any(helper in text for helper in HELPERS)}


def list_shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()}


def drop_files_of_others(names: Iterable[str], *, own: Iterable[int]) -> set[str]:
    """Return the names without files that a process outside of `own` has mapped."""
    left = set(names)
    return (
        left - {path.name for path in find_shared_memory(set(psutil.pids()) - set(own))}
        if left
        else left
    )


def wait_for_none(find: Callable[[], FoundT], *, grace_s: float) -> FoundT:
    """Return what is still found after the grace time."""
    deadline = time.monotonic() + grace_s
    while (found := find()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def check_nothing_left(*, mark: str, shared_memory_before: set[str], grace_s: float) -> None:
    """Kill the remaining processes of the session, and raise a LeakError that lists them."""
    processes = wait_for_none(lambda: find_session_processes(mark), grace_s=grace_s)
    own = {os.getpid(), *(process.pid for process in processes)}
    files = drop_files_of_others(list_shared_memory() - shared_memory_before, own=own)
    lines = [f"process {process.pid}: {text}" for process, text in processes.items()]
    lines += [f"shared-memory file {SHARED_MEMORY / name}" for name in sorted(files)]
    for process in processes:
        kill(process)
    if lines:
        raise LeakError("the test session left behind:\n  " + "\n  ".join(lines))


_before = pytest.StashKey[tuple[str, set[str]]]()
"""The session's mark, and the names in shared memory at its start."""


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(
        session.config, "workerinput"
    ):  # a worker of pytest-xdist leaves the check to its parent
        os.environ[SESSION_MARK] = uuid.uuid4().hex
        session.config.stash[_before] = os.environ[SESSION_MARK], list_shared_memory()


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


class Watch:
    """Watch over one process, whose temporary files are made in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        """Keep temporary files in `folder`, whose path must be short because sockets are made in
        it.
        """
        self.mark = uuid.uuid4().hex
        self.folder = folder
        self._before = self._files()

    def environment(self) -> dict[str, str]:
        """Return the environment to start the process with."""
        cache = os.environ.get(
            "TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_tests"
        )
        return {
            **os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, WATCH_MARK: self.mark,
            "TMPDIR": str(self.folder),
        }  # fmt: skip

    def left(self, *, grace_s: float, run_folder: Path) -> list[str]:
        """Return all that is left after the process has exited and its last children have had the
        grace time.
        """
        return wait_for_none(lambda: self._now(run_folder), grace_s=grace_s)

    def _now(self, run_folder: Path) -> list[str]:
        processes, files = commands(self.processes()), self._files() - self._before
        shared = [path.name for path in files if path.parent == SHARED_MEMORY]
        left = [f"process {process.pid}: {text}" for process, text in processes.items()]
        left += drop_files_of_others(shared, own=[process.pid for process in processes])
        left += [str(path) for path in files if path.parent != SHARED_MEMORY]
        if (lock := run_folder / ".lock").exists():
            try:
                with FileLock(lock, blocking=False):
                    pass
            except Timeout:
                left.append(str(lock))
        return left

    def processes(self) -> list[ProcessId]:
        return find_by_environment(WATCH_MARK, self.mark)

    def end(self) -> None:
        """Kill the remaining children of the process."""
        for process in self.processes():
            kill(process)

    def _files(self) -> set[Path]:
        paths = (path for folder in (SHARED_MEMORY, self.folder) for path in folder.iterdir())
        return {path for path in paths if not path.name.startswith(CACHES)}
