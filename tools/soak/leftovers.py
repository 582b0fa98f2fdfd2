"""What a process and all that it starts leave on this machine: looked for, not asked for.

    watch = Watch(folder)
    ...a process started with watch.environment()...
    left = watch.left(grace_s=10)

Processes are known by a mark in their environment, which children inherit. Temporary files are made in a
folder that only they have; what goes elsewhere is found by comparing with before.
"""

from __future__ import annotations

import getpass
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from actors.processes import ProcessId, all_pids, carrying_environment, kill, mapped_shared_memory
from rl.folder_lock import is_free

MARK = "RELAY_WATCHED"
SHARED_MEMORY = Path("/dev/shm")
LISTENING = "0A"
"""State of a socket in /proc/net/tcp."""
CACHES = ("torchinductor_",)
"""Beginnings of names of what is kept for later programs, in the folder of temporary files. Monarch's log is
one too, in a folder with the user's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftovers:
    processes: dict[int, str] = field(default_factory=dict)
    """Command by pid."""
    ports: tuple[int, ...] = ()
    """On which one of them listens."""
    shared_memory: tuple[str, ...] = ()
    temporary: tuple[str, ...] = ()
    locks: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.processes or self.ports or self.shared_memory or self.temporary or self.locks)

    def __str__(self) -> str:
        lines = [f"process {pid}: {command}" for pid, command in self.processes.items()]
        lines += [f"port {port}" for port in self.ports]
        for what in ("shared_memory", "temporary", "locks"):
            lines += [f"{what.replace('_', ' ')}: {name}" for name in getattr(self, what)]
        return "; ".join(lines) or "nothing"


class Watch:
    """Of one process at a time."""

    def __init__(self, folder: Path, *, also: Path | None = None) -> None:
        """
        Args:
            folder: for temporary files; a short path, as sockets are made in it.
            also: a folder of temporary files that nobody else uses meanwhile, where what does not heed
                TMPDIR is found too.
        """
        self.mark = uuid.uuid4().hex
        self.folder = folder
        self._also = also
        folder.mkdir(parents=True, exist_ok=True)
        self._before = self._entries()

    def environment(self) -> dict[str, str]:
        """To start the process with."""
        cache = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
        caches = {"TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(cache))}
        return {**os.environ, **caches, MARK: self.mark, "TMPDIR": str(self.folder)}

    def processes(self) -> list[ProcessId]:
        return [process for process in carrying_environment(MARK, self.mark) if process.pid != os.getpid()]

    def left(self, *, grace_s: float, run_folder: Path | None = None, temporary: bool = True) -> Leftovers:
        """What is there after the process has ended, and its last children have had their time to.

        `temporary`: whether temporary files count.
        """
        deadline = time.monotonic() + grace_s
        while (left := self._now(run_folder, temporary=temporary)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def _now(self, run_folder: Path | None, *, temporary: bool) -> Leftovers:
        processes = self.processes()
        files = self._entries() - self._before
        if not temporary:
            files = {name for name in files if name.startswith(str(SHARED_MEMORY))}
        if any(name.startswith(str(SHARED_MEMORY)) for name in files):
            others = set(all_pids()) - {process.pid for process in processes}
            files -= set(map(str, mapped_shared_memory(others)))  # another program's
        return Leftovers(
            processes={process.pid: _command(process.pid) for process in processes},
            ports=tuple(sorted(port for process in processes for port in listening_ports(process.pid))),
            shared_memory=tuple(sorted(name for name in files if name.startswith(str(SHARED_MEMORY)))),
            temporary=tuple(sorted(name for name in files if not name.startswith(str(SHARED_MEMORY)))),
            locks=() if run_folder is None or is_free(run_folder / ".lock") else (f"{run_folder}/.lock",),
        )

    def end(self) -> None:
        """SIGKILL to what is left of it."""
        for process in self.processes():
            kill(process)

    def _entries(self) -> set[str]:
        folders = [SHARED_MEMORY, self.folder, *([] if self._also is None else [self._also])]
        return {str(path) for folder in folders for path in folder.iterdir() if not _is_cache(path.name)}


def listening_ports(pid: int) -> list[int]:
    """TCP ports on which a process listens."""
    sockets = set(_socket_inodes(pid))
    found = []
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and fields[9] in sockets:
                    found.append(int(fields[1].rpartition(":")[2], 16))
    return found


def _socket_inodes(pid: int) -> Iterator[str]:
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = os.readlink(link)
                if target.startswith("socket:["):
                    yield target[8:-1]


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return "(ended meanwhile)"


def _is_cache(name: str) -> bool:
    return name.startswith(CACHES) or name == getpass.getuser()
