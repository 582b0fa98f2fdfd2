"""Search for processes and files that a process and its children leave on this machine.

    watch = Watch(folder)
    ...start a process with watch.environment()...
    left = watch.left(grace_s=10)

The processes carry a mark in their environment, which children inherit. Temporary files are made in a folder
of their own; other files are found by comparison with before.
"""

from __future__ import annotations

import getpass
import os
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from actors.processes import SHARED_MEMORY, carrying_environment
from rl.utils.processes import ProcessId, kill
from tests.support.leaks import drop_files_of_others

MARK = "RELAY_WATCHED"
CACHES = ("torchinductor_", getpass.getuser())
"""Names of temporary folders that other programs use later; Monarch's log contains the user's name."""


class Watch:
    """Watch over one process at a time."""

    def __init__(self, folder: Path) -> None:
        """Keep temporary files in `folder`, whose path must be short because sockets are made in it."""
        self.mark = uuid.uuid4().hex
        self.folder = folder
        self._before = self._files()

    def environment(self) -> dict[str, str]:
        """Return the environment to start the process with."""
        cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_tests")
        return {
            **os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, MARK: self.mark, "TMPDIR": str(self.folder),
        }  # fmt: skip

    def left(self, *, grace_s: float, run_folder: Path) -> list[str]:
        """Return all that is left after the process has exited and its last children have had the grace time."""
        deadline = time.monotonic() + grace_s
        while (left := self._now(run_folder)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def _now(self, run_folder: Path) -> list[str]:
        left: list[str] = []
        processes, files = self.processes(), self._files() - self._before
        for process in processes:
            with suppress(psutil.Error):
                found = psutil.Process(process.pid)
                ports = [s.laddr.port for s in found.net_connections("tcp") if s.status == psutil.CONN_LISTEN]
                left.append(f"process {process.pid}: {' '.join(found.cmdline())}, listening on {ports}")
        shared = [path.name for path in files if path.parent == SHARED_MEMORY]
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
        return [process for process in carrying_environment(MARK, self.mark) if process.pid != os.getpid()]

    def end(self) -> None:
        """Kill the remaining children of the process."""
        for process in self.processes():
            kill(process)

    def _files(self) -> set[Path]:
        paths = (path for folder in (SHARED_MEMORY, self.folder) for path in folder.iterdir())
        return {path for path in paths if not path.name.startswith(CACHES)}
