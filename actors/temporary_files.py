"""A folder for the temporary files of a run: its own, so that nothing of it stays, however it ends.

Monarch, vLLM and multiprocessing keep sockets in the folder that TMPDIR names, which nobody removes where a
process is killed. While a run goes on, TMPDIR is a folder of this process,

    /tmp/relay-run-ab12cd34/

which it removes when it ends, and locks until then. The kernel drops the lock of a process that was killed:
the next run removes folders that are not locked, and ends what still carries the environment of their run.
"""

from __future__ import annotations

import atexit
import fcntl
import getpass
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from actors.client import RUN, RUN_VARIABLE
from actors.processes import carrying_environment, kill

logger = logging.getLogger(__name__)

PREFIX = "relay-run-"
NEW_PREFIX = ".relay-run-"
"""Of a folder that is not locked yet, so that nobody takes it for one that was left."""
RUN_FILE = "run"
"""In the folder: the run's id, which its processes carry in their environment."""
MAX_PATH = 45
"""Characters of the folder: what is put into it are sockets, whose whole path has at most 107."""
SHORT_PARENT = "/tmp"
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Folder:
    path: Path
    descriptor: int
    """Of the lock."""
    owner: int
    """The process that removes it."""


_made: list[_Folder] = []
"""Of this process: one for all its runs, as Monarch's client keeps its sockets from run to run."""


@contextmanager
def temporary_files() -> Iterator[None]:
    """Within this context TMPDIR is a folder that ends with this process; also for what it starts.

    It is made in the one that TMPDIR names, or in /tmp where that path is too long for sockets. Where there
    cannot be one (a file system without locks), all stays as it is.
    """
    folder = _made[0] if _made else _make(_parent())
    if folder is None:
        yield
        return
    # What is compiled is for later runs too: it stays where it would be.
    cache = Path(tempfile.gettempdir()) / f"torchinductor_{_user()}"
    settings = {"TMPDIR": str(folder.path), INDUCTOR_CACHE: os.environ.get(INDUCTOR_CACHE, str(cache))}
    before, python_before = {name: os.environ.get(name) for name in settings}, tempfile.tempdir
    os.environ.update(settings)
    tempfile.tempdir = str(folder.path)
    try:
        yield
    finally:
        tempfile.tempdir = python_before
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _parent() -> Path:
    """Where it is made: where TMPDIR says, unless that is too long a path for the sockets."""
    asked = Path(tempfile.gettempdir())
    fits = len(str(asked / f"{PREFIX}{'x' * 8}")) <= MAX_PATH
    return asked if fits else Path(SHORT_PARENT)


def remove_dead(parent: Path) -> list[Path]:
    """End what is left of killed runs that had their temporary files in this folder; the folders removed."""
    removed = []
    for path in sorted(parent.glob(f"{PREFIX}*")):
        with suppress(OSError):  # it is locked, already gone, or somebody else's
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(descriptor).st_uid != os.geteuid():
                    continue
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _end_processes(path)
                shutil.rmtree(path)
                removed.append(path)
            finally:
                os.close(descriptor)
    return removed


def _end_processes(folder: Path) -> None:
    try:
        run = (folder / RUN_FILE).read_text()
    except FileNotFoundError:  # somebody who removed it was killed on the way
        return
    for process in carrying_environment(RUN_VARIABLE, run) if run else ():
        if process.pid != os.getpid():
            logger.warning("process %d is left of a killed run: ended", process.pid)
            kill(process)


def _make(parent: Path) -> _Folder | None:
    for removed in remove_dead(parent):
        logger.info("removed %s of a killed run", removed)
    try:
        new = Path(tempfile.mkdtemp(prefix=NEW_PREFIX, dir=parent))
    except OSError as error:
        logger.info("temporary files stay in %s: %s", parent, error)
        return None
    path = parent / new.name.removeprefix(".")
    descriptor = os.open(new, os.O_RDONLY | os.O_CLOEXEC)
    try:
        (new / RUN_FILE).write_text(RUN)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(path)
    except OSError as error:
        logger.info("temporary files stay in %s: %s", parent, error)
        os.close(descriptor)
        shutil.rmtree(new, ignore_errors=True)
        return None
    folder = _Folder(path=path, descriptor=descriptor, owner=os.getpid())
    _made.append(folder)
    atexit.register(_remove, folder)
    return folder


def _user() -> str:
    """As PyTorch names its folder; a container may give a process a uid without a name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _remove(folder: _Folder) -> None:
    if os.getpid() == folder.owner:  # not a copy of that process
        shutil.rmtree(folder.path, ignore_errors=True)
