"""Processes, shared memory and addresses of a run on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import sys
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from rl.utils.errors import RunError
from rl.utils.processes import ROLE_VARIABLE, ProcessId, identify, is_alive

SHARED_MEMORY = Path("/dev/shm")
RUN = uuid.uuid4().hex[:8]
"""Id that every process started by this controller carries in its environment."""
RUN_VARIABLE = "RELAY_RUN"


async def wait_until_gone(processes: Sequence[ProcessId], *, role: str, grace_s: float) -> None:
    """Wait for processes that were killed.

    Raises:
        RunError: a process is stuck in the kernel; names the role and the pids.
    """
    deadline = time.monotonic() + grace_s
    while left := [process for process in processes if is_alive(process)]:
        if time.monotonic() > deadline:
            raise RunError(
                f"{role}: processes {[p.pid for p in left]} outlived SIGKILL for {grace_s:g} s"
            )
        await asyncio.sleep(0.02)


def with_descendants(roots: Iterable[ProcessId]) -> list[ProcessId]:
    found: dict[ProcessId, None] = {}
    for root in roots:
        found[root] = None
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(root.pid).children(recursive=True):
                if (process := identify(child.pid)) is not None:
                    found[process] = None
    return list(found)


def processes_of_role(role: str, *, parents: Iterable[int]) -> list[ProcessId]:
    """Return the processes of a role that these processes have started, without those that they
    start themselves.
    """
    found: list[ProcessId] = []
    for parent in parents:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(parent).children():
                with contextlib.suppress(psutil.Error):
                    started = child.environ().get(ROLE_VARIABLE) == role
                    if started and (process := identify(child.pid)) is not None:
                        found.append(process)
    return found


def carrying_environment(name: str, value: str) -> list[ProcessId]:
    found: list[ProcessId] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (
                process.environ().get(name) == value
                and (living := identify(process.pid)) is not None
            ):
                found.append(living)
    return found


def mapped_shared_memory(pids: Iterable[int]) -> set[Path]:
    """Return the files in /dev/shm that any of the processes has mapped, including deleted ones.

    psutil's `memory_maps` reads smaps, which takes the kernel seconds for a large process; maps is
    instant.
    """
    files: set[Path] = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                _, separator, name = line.partition(f"{SHARED_MEMORY}/")
                if separator:
                    files.add(SHARED_MEMORY / name.removesuffix(" (deleted)"))
    return files


def remove_unmapped(files: Iterable[Path]) -> list[Path]:
    """Delete and return the shared-memory files that no living process has mapped."""
    candidates = {file for file in files if file.exists()}
    if not candidates:
        return []
    orphans = sorted(candidates - mapped_shared_memory(psutil.pids()))
    for file in orphans:
        file.unlink(missing_ok=True)
    return orphans


def outward_address() -> str:
    """Return this host's address for other hosts, even where its name is a loopback address
    (Debian's /etc/hosts).
    """
    address = socket.gethostbyname(socket.gethostname())
    if not address.startswith("127."):
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        # The address that a packet to another network would leave from. Nothing is sent;
        # 192.0.2.0/24 is reserved.
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return address


def free_port() -> int:
    """Return an unused port of this host, below the range that the system assigns.

    An outgoing connection could take a port of that range between this call and the use.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with (
            socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe,
            contextlib.suppress(OSError),
        ):
            probe.bind(("", port))
            return port


def import_path() -> str:
    """Return a PYTHONPATH with which actors can import what the controller can, also a user's
    modules.
    """
    paths = [os.getcwd(), str(Path(__file__).resolve().parent.parent), *sys.path]
    outside = [
        p for p in dict.fromkeys(paths) if p and not p.startswith((sys.prefix, sys.base_prefix))
    ]
    return os.pathsep.join(outside)
