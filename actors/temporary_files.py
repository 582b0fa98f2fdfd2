"""A folder for a run's temporary files that is removed however the run ends.

Monarch, vLLM and multiprocessing keep sockets in TMPDIR, which stay behind when a process is killed. During a
run TMPDIR is a folder of the controller, /tmp/relay-tmp-ab12cd34, which the controller removes at its end. A lock
file beside the folder is locked meanwhile. The kernel drops the lock of a killed process: the next run removes
folders without a lock, and kills the processes that still carry the id of the folder's run.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from actors import processes
from actors.processes import RUN_VARIABLE, carrying_environment
from rl.utils.processes import kill

logger = logging.getLogger(__name__)

PREFIX = "relay-tmp-"
MAX_PATH = 45
"""Characters of the folder's path: the sockets in it are limited to 107 characters."""
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"

_made: list[Path] = []
"""This process's folder: one for all its runs, as Monarch's client keeps its sockets from run to run."""


@contextmanager
def temporary_files() -> Iterator[None]:
    """Point TMPDIR at a folder that ends with this process, for this process and the processes it starts.

    The folder is made in the current TMPDIR, or in /tmp if that path is too long for sockets. If no folder can
    be made (a file system without locks), TMPDIR stays as it is.
    """
    try:
        folder = _made[0] if _made else _make()
    except (OSError, Timeout) as error:
        logger.info("temporary files stay in %s: %s", tempfile.gettempdir(), error)
        yield
        return
    # Compiled kernels are for later runs too: their cache is not in the folder.
    cache = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"
    settings = {"TMPDIR": str(folder), INDUCTOR_CACHE: os.environ.get(INDUCTOR_CACHE, str(cache))}
    before, python_before = {name: os.environ.get(name) for name in settings}, tempfile.tempdir
    os.environ.update(settings)
    tempfile.tempdir = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = python_before
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def remove_dead(parent: Path) -> list[Path]:
    """Kill the processes and remove the folders that killed runs left in `parent`; return the folders."""
    removed = []
    for lock in sorted(parent.glob(f"{PREFIX}*.lock")):
        folder = lock.with_suffix("")
        with suppress(OSError, Timeout):
            if folder.is_symlink() or lock.lstat().st_uid != os.geteuid():
                continue
            with FileLock(lock, timeout=0):
                for process in carrying_environment(RUN_VARIABLE, folder.name.removeprefix(PREFIX)):
                    if process.pid != os.getpid():
                        logger.warning("killed process %d, which a killed run left behind", process.pid)
                        kill(process)
                shutil.rmtree(folder, ignore_errors=True)
                lock.unlink()
                removed.append(folder)
    return removed


def _make() -> Path:
    parent = Path(tempfile.gettempdir())
    if len(str(parent / PREFIX)) + len(processes.RUN) > MAX_PATH:
        parent = Path("/tmp")
    for removed in remove_dead(parent):
        logger.info("removed %s of a killed run", removed)
    folder = parent / f"{PREFIX}{processes.RUN}"
    lock = FileLock(f"{folder}.lock", timeout=0)
    lock.acquire()
    folder.mkdir(mode=0o700)
    _made.append(folder)
    atexit.register(_remove, folder, lock, os.getpid())
    return folder


def _remove(folder: Path, lock: FileLock, owner: int) -> None:
    if os.getpid() == owner:  # not a forked copy of that process
        shutil.rmtree(folder, ignore_errors=True)
        Path(lock.lock_file).unlink(missing_ok=True)
