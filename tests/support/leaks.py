"""A test session leaves no process and no shared-memory file behind: hooks that fail it if it does.

A process is the session's when it descends from it, or when it carries the session's mark in its
environment: whoever loses its parent is handed to init, and only the mark still tells.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

MARK = "RELAY_TEST_SESSION"
GRACE_S = 10.0
"""How long the last ones may take to end after the last test."""
SHARED_MEMORY = Path("/dev/shm")
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch/_inductor/compile_worker")
"""Belong to the interpreter itself and end with it."""


class LeakError(Exception):
    """What a session left behind, by name."""


def find_session_processes(mark: str) -> dict[int, str]:
    """Command line by pid of every living process of this session but this one."""
    parents: dict[int, int] = {}
    marked: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        # It may end while it is looked at.
        with contextlib.suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state in "ZX":
                continue
            parents[int(folder.name)] = int(parent)
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                marked.add(int(folder.name))
    found = {pid for pid in parents if pid in marked or _descends(pid, parents)} - {os.getpid()}
    commands = {pid: _read_command(pid) for pid in sorted(found)}
    return {pid: text for pid, text in commands.items() if text and not any(h in text for h in HELPERS)}


def _descends(pid: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == os.getpid():
            return True
    return False


def _read_command(pid: int) -> str:
    """Empty for a process that has ended; its bare name where it has no arguments (yet), as in an exec."""
    process = Path(f"/proc/{pid}")
    try:
        command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        name, _, rest = (process / "stat").read_text(errors="replace").rpartition(")")
    except OSError:
        return ""
    return "" if rest.split()[0] in "ZX" else command or f"[{name.partition('(')[2]}]"


def list_shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()}


def drop_files_of_others(names: Iterable[str], *, own: Iterable[int]) -> set[str]:
    """Without the files that a process outside of `own` has mapped or open: another program's."""
    left = set(names)
    for folder in Path("/proc").glob("[0-9]*") if left else ():
        if int(folder.name) not in set(own):
            left -= {name for name in left if _holds(folder, str(SHARED_MEMORY / name))}
    return left


def _holds(process: Path, path: str) -> bool:
    with contextlib.suppress(OSError):
        if any(line.endswith(path) for line in (process / "maps").read_text(errors="replace").splitlines()):
            return True
        return any(os.readlink(fd) == path for fd in (process / "fd").iterdir())
    return False


def wait_for_none(find: Callable[[], dict[int, str]], *, deadline_s: float) -> dict[int, str]:
    """What is still found at the deadline."""
    end = time.monotonic() + deadline_s
    while (found := find()) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def check_nothing_left(*, mark: str, shared_memory_before: set[str], grace_s: float) -> None:
    """End what is left of the session's processes, and name it.

    Raises:
        LeakError: naming every process and file.
    """
    processes = wait_for_none(lambda: find_session_processes(mark), deadline_s=grace_s)
    own = {os.getpid(), *processes}
    files = drop_files_of_others(list_shared_memory() - shared_memory_before, own=own)
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    lines = [f"process {pid}: {text}" for pid, text in processes.items()]
    lines += [f"shared-memory file {SHARED_MEMORY / name}" for name in sorted(files)]
    if lines:
        raise LeakError("the test session left behind:\n  " + "\n  ".join(lines))


_shared_memory_before = pytest.StashKey[set[str]]()
_mark = pytest.StashKey[str]()


def is_worker(session: pytest.Session) -> bool:
    """Of pytest-xdist: the session that started it looks at the end, and its mark is inherited."""
    return hasattr(session.config, "workerinput")


def pytest_sessionstart(session: pytest.Session) -> None:
    if is_worker(session):
        return
    mark = uuid.uuid4().hex
    # A session inside a test has its own mark; what it leaves is then found by its own check.
    os.environ[MARK] = mark
    session.config.stash[_mark] = mark
    session.config.stash[_shared_memory_before] = list_shared_memory()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """After the teardown of the session's fixtures, and the end of its workers."""
    yield
    if is_worker(session):
        return
    stash = session.config.stash
    before = stash[_shared_memory_before]
    try:
        check_nothing_left(mark=stash[_mark], shared_memory_before=before, grace_s=GRACE_S)
    except LeakError as error:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(f"\nERROR: {error}", red=True)
