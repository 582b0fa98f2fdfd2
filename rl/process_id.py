"""A process of this machine by more than its pid, as the kernel lists it (Linux)."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits for a disk or a device",
    "T": "is stopped by a signal",
    "t": "is stopped by a debugger",
    "I": "is idle",
}
"""What the kernel's letters mean."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process for good: pids are reused, a pid with its start time is not."""

    pid: int
    start_ticks: int


def identify(pid: int) -> ProcessId | None:
    """The process that has this pid now; None if there is none, or only its unreaped exit status."""
    if (fields := _stat(pid)) is None:
        return None
    return None if fields[0] in "ZX" else ProcessId(pid, int(fields[19]))


def parent_of(pid: int) -> ProcessId | None:
    """The process that started it, or took it over."""
    return None if (fields := _stat(pid)) is None else identify(int(fields[1]))


def is_alive(process: ProcessId) -> bool:
    return identify(process.pid) == process


def kill(process: ProcessId) -> None:
    """SIGKILL, if this very process still lives."""
    if is_alive(process):
        os.kill(process.pid, signal.SIGKILL)


def kernel_state(process: ProcessId) -> str | None:
    """What the kernel says that it does, such as "sleeps"; None if it is dead."""
    if not is_alive(process) or (fields := _stat(process.pid)) is None:
        return None
    return STATES.get(fields[0], f"is in state {fields[0]}")


def catches(process: ProcessId, number: int) -> bool:
    """Whether it has a handler for this signal, which would otherwise end it."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1) and is_alive(process)


def _stat(pid: int) -> list[str] | None:
    """What follows the command in /proc/<pid>/stat: the state's letter first."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command, in parentheses, may itself hold spaces and parentheses.
    return stat.rpartition(")")[2].split()
