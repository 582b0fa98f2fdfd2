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
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from actors.processes import SHARED_MEMORY, carrying_environment
from rl.utils.files import is_unlocked
from rl.utils.processes import ProcessId, kill
from tests.support.leaks import drop_files_of_others

MARK = "RELAY_WATCHED"
CACHES = ("torchinductor_", getpass.getuser())
"""Names of temporary folders that other programs use later; Monarch's log contains the user's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftovers:
    processes: dict[int, str] = field(default_factory=dict)
    """Command line by pid."""
    ports: tuple[int, ...] = ()
    shared_memory: tuple[str, ...] = ()
    temporary: tuple[str, ...] = ()
    locks: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.processes or self.ports or self.shared_memory or self.temporary or self.locks)

    def __str__(self) -> str:
        return repr(self) if self else "nothing"


class Watch:
    """Watch over one process at a time."""

    def __init__(self, folder: Path) -> None:
        """Keep temporary files in `folder`, whose path must be short because sockets are made in it."""
        self.mark = uuid.uuid4().hex
        self.folder = folder
        self._before = self._files()

    def environment(self) -> dict[str, str]:
        """Return the environment to start the process with."""
        cache = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
        caches = {"TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(cache))}
        return {**os.environ, **caches, MARK: self.mark, "TMPDIR": str(self.folder)}

    def processes(self) -> list[ProcessId]:
        return [process for process in carrying_environment(MARK, self.mark) if process.pid != os.getpid()]

    def left(self, *, grace_s: float, run_folder: Path | None = None, temporary: bool = True) -> Leftovers:
        """Return everything left after the process has exited and its last children have had the grace
        time."""
        deadline = time.monotonic() + grace_s
        while (left := self._now(run_folder, temporary=temporary)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def _now(self, run_folder: Path | None, *, temporary: bool) -> Leftovers:
        processes, files = self.processes(), self._files() - self._before
        shared = {path for path in files if path.parent == SHARED_MEMORY}
        own = [process.pid for process in processes]
        shared_names = drop_files_of_others((path.name for path in shared), own=own)
        return Leftovers(
            processes={process.pid: _command(process.pid) for process in processes},
            ports=tuple(sorted(port for process in processes for port in listening_ports(process.pid))),
            shared_memory=tuple(sorted(shared_names)),
            temporary=tuple(
                sorted(str(path) for path in files if temporary and path.parent != SHARED_MEMORY)
            ),
            locks=() if run_folder is None or is_unlocked(run_folder / ".lock") else (f"{run_folder}/.lock",),
        )

    def end(self) -> None:
        """Kill the remaining children of the process."""
        for process in self.processes():
            kill(process)

    def _files(self) -> set[Path]:
        paths = (path for folder in (SHARED_MEMORY, self.folder) for path in folder.iterdir())
        return {path for path in paths if not path.name.startswith(CACHES)}


def listening_ports(pid: int) -> list[int]:
    """Return the TCP ports on which a process listens."""
    with suppress(psutil.Error):
        sockets = psutil.Process(pid).net_connections("tcp")
        return [socket.laddr.port for socket in sockets if socket.status == psutil.CONN_LISTEN]
    return []


def _command(pid: int) -> str:
    with suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())
    return "(ended meanwhile)"
