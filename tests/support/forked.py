"""Forked copies of this process that are killed or run out of disk space."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable


def run_in_fork(function: Callable[[], str]) -> tuple[int, str]:
    """Run `function` in a forked copy; return the exit status (negative for a signal) and the answer."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reading)
            os.write(writing, function().encode()[:60_000])
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as answers:
        answer = answers.read().decode()
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), answer


def die_at_flush(number: int) -> None:
    """Kill this process at the `number`th time that it flushes a file to the disk."""
    flush, remaining = os.fsync, number

    def counted(descriptor: int) -> None:
        nonlocal remaining
        remaining -= 1
        if remaining == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        flush(descriptor)

    os.fsync = counted  # type: ignore[assignment]


def limit_files(num_bytes: int) -> None:
    """Limit the length of the files that this process writes, which acts like a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
