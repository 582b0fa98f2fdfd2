"""Forked copies of this process that are killed or run out of disk space."""

from __future__ import annotations

import json
import os
import resource
import signal
import traceback
from collections.abc import Callable
from typing import Any


def run_in_fork(function: Callable[[], str]) -> tuple[int, str]:
    """Run `function` in a forked copy; return the exit status (negative for a signal) and the
    answer.
    """
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


def answer_in_fork(function: Callable[[], Any]) -> Any:
    """Return the answer of `function`, plain data, in a forked copy of this process."""

    def guarded() -> str:
        try:
            return json.dumps(function())
        except BaseException:  # noqa: BLE001  (told by the parent)
            return json.dumps(f"raised {traceback.format_exc()}")

    status, text = run_in_fork(guarded)
    assert status == 0, status
    answer = json.loads(text)
    assert not str(answer).startswith("raised "), answer
    return answer


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


def limit_files(num_bytes: int | None = None) -> None:
    """Limit the length of the files that this process writes, which acts like a full disk; None
    ends the limit.
    """
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (most if num_bytes is None else num_bytes, most))
