"""Processes and shared memory of this machine, as the kernel lists them (Linux)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rl.errors import RunError
from rl.process_id import ProcessId, identify, is_alive, kill

__all__ = [
    "ProcessId",
    "carrying_environment",
    "identify",
    "is_alive",
    "kill",
    "mapped_shared_memory",
    "remove_unmapped",
    "until_gone",
    "with_descendants",
]

SHARED_MEMORY = Path("/dev/shm")


async def until_gone(processes: Sequence[ProcessId], *, of: str, grace_s: float) -> None:
    """Wait for processes that were killed.

    Raises:
        RunError: one outlived SIGKILL for so long (stuck in the kernel); names `of` and the pids.
    """
    deadline = time.monotonic() + grace_s
    while left := [process for process in processes if is_alive(process)]:
        if time.monotonic() > deadline:
            raise RunError(f"{of}: processes {[p.pid for p in left]} outlived SIGKILL for {grace_s:g} s")
        await asyncio.sleep(0.02)


def with_descendants(roots: Iterable[ProcessId]) -> list[ProcessId]:
    """The processes, their children, and so on."""
    found: dict[ProcessId, None] = {}
    pending = list(roots)
    while pending:
        process = pending.pop()
        if process not in found:
            found[process] = None
            pending += [c for pid in _child_pids(process.pid) if (c := identify(pid)) is not None]
    return list(found)


def carrying_environment(name: str, value: str) -> list[ProcessId]:
    """The living processes that were started with this environment variable."""
    wanted = f"{name}={value}".encode()
    found: list[ProcessId] = []
    for pid in all_pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if wanted in environment and (process := identify(pid)) is not None:
            found.append(process)
    return found


def all_pids() -> list[int]:
    """Of every process there is."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _child_pids(pid: int) -> list[int]:
    # A child belongs to the thread that started it.
    pids: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            pids += map(int, (task / "children").read_text().split())
    except (FileNotFoundError, ProcessLookupError):
        pass
    return pids


def mapped_shared_memory(pids: Iterable[int]) -> set[Path]:
    """Files in /dev/shm that any of the processes has mapped, still there or not."""
    files: set[Path] = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        for line in maps.splitlines():
            _, separator, name = line.partition(f"{SHARED_MEMORY}/")
            if separator:
                files.add(SHARED_MEMORY / name.removesuffix(" (deleted)"))
    return files


def remove_unmapped(files: Iterable[Path]) -> list[Path]:
    """Delete those of the shared-memory files that no living process has mapped; returns them."""
    candidates = {file for file in files if file.exists()}
    if not candidates:
        return []
    orphans = sorted(candidates - mapped_shared_memory(all_pids()))
    for file in orphans:
        file.unlink(missing_ok=True)
    return orphans
