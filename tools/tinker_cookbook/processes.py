"""Processes that write a log and are gone, with all that they started, when the block is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

END_S = 45.0
"""For a process that was told to end, before it is killed."""
POLL_S = 0.05


class ProcessError(Exception):
    """A process that ended, or did not come as far as it should have in time."""


@contextlib.contextmanager
def running(
    argv: Sequence[str], *, log: Path, cwd: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Output is appended to `log`; `environment` comes on top of this process's own."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own, so that what it starts is ended with it
        )
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Tell it to, then kill what is left of its group."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=END_S)
    kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=END_S)


def wait_until(
    is_so: Callable[[], bool], *, process: subprocess.Popen[bytes], what: str, deadline_s: float, log: Path
) -> None:
    """
    Raises:
        ProcessError: the process ended before, or the deadline passed; with the end of its log.
    """
    deadline = time.monotonic() + deadline_s
    while not is_so():
        status = process.poll()
        if status is not None and not is_so():
            raise ProcessError(f"{what}: the process ended with status {status}\n{log_end(log)}")
        if time.monotonic() > deadline:
            raise ProcessError(f"{what}: not within {deadline_s:g} s\n{log_end(log)}")
        time.sleep(POLL_S)


def log_end(log: Path, *, num_lines: int = 20) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:]
    return "\n".join([*(f"  | {line}" for line in lines), f"  all of it: {log}"])
