"""Runs a child process in a folder, watches it from outside, and leaves nothing of it.

Watched are wall-clock time, output, and the numbers of files and threads; all else it must be held to from
inside (`rl/tools/confinement.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Stop = Literal["time limit", "output limit", "file limit", "thread limit"]

LOOK_S = 0.05
"""How often files and threads are counted."""
GRACE_S = 5.0
"""How long a killed process may take to be gone."""
STDOUT, STDERR = 1, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchLimits:
    time_s: float
    output_bytes: int
    """Of stdout and stderr together."""
    num_files: int
    """In its folder."""
    num_threads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a child process ended."""

    status: int
    """As of `subprocess.Popen.returncode`: negative for a signal."""
    stopped: Stop | None
    """The limit at which it was killed."""
    stdout: bytes
    """Its beginning, at most the limit's bytes."""
    stderr: bytes
    """Its end, at most the limit's bytes."""
    wall_s: float


async def run_child(command: Sequence[str], *, stdin: bytes, folder: str, limits: WatchLimits) -> Ended:
    """Start `command` in a session of its own with no environment, and wait for its end.

    When this returns, raises or is cancelled, the process is dead, and with it all of its session.

    Raises:
        OSError: it cannot be started.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    transport, child = await loop.subprocess_exec(
        lambda: _Child(limits.output_bytes),
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=folder,
        env={},
        start_new_session=True,
    )
    try:
        child.send(stdin)
        await _watch(child, folder=folder, limits=limits, deadline=started + limits.time_s)
    finally:
        child.kill()
        try:
            await asyncio.wait([child.gone], timeout=GRACE_S)
        finally:
            transport.close()
    status = transport.get_returncode()
    if status is None:
        raise OSError(f"child process {transport.get_pid()} was killed and is not gone after {GRACE_S:g} s")
    return Ended(
        status=status,
        stopped=child.stopped,
        stdout=bytes(child.stdout),
        stderr=bytes(child.stderr),
        wall_s=loop.time() - started,
    )


class _Child(asyncio.SubprocessProtocol):
    """Collects output, and kills at its limit."""

    def __init__(self, output_bytes: int) -> None:
        self.output_bytes = output_bytes
        self.stdout, self.stderr = bytearray(), bytearray()
        self.stopped: Stop | None = None
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when it has ended and its output was read."""
        self._num_bytes = 0
        self._transport: asyncio.SubprocessTransport | None = None

    @property
    def pid(self) -> int:
        assert self._transport is not None
        return self._transport.get_pid()

    def send(self, data: bytes) -> None:
        assert self._transport is not None
        pipe = self._transport.get_pipe_transport(0)
        assert isinstance(pipe, asyncio.WriteTransport)
        pipe.write(data)
        pipe.close()

    def stop(self, why: Stop) -> None:
        self.stopped = self.stopped or why
        self.kill()

    def kill(self) -> None:
        """All of its session that stayed in its process group; a confined one cannot make another."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._num_bytes += len(data)
        if fd == STDOUT:
            self.stdout += data[: self.output_bytes - len(self.stdout)]
        else:
            self.stderr += data
            del self.stderr[: -self.output_bytes]
        if self._num_bytes > self.output_bytes:
            self.stop("output limit")

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.gone.done():
            self.gone.set_result(None)


async def _watch(child: _Child, *, folder: str, limits: WatchLimits, deadline: float) -> None:
    """Until it has ended or was stopped."""
    loop = asyncio.get_running_loop()
    while child.stopped is None:
        left_s = deadline - loop.time()
        await asyncio.wait([child.gone], timeout=max(0.0, min(left_s, LOOK_S)))
        if child.gone.done():
            return
        num_threads = _count_threads(child.pid)
        if num_threads == 0:
            # It ended, perhaps long ago while this loop was busy elsewhere: its output is yet to be read.
            await asyncio.wait([child.gone], timeout=GRACE_S)
            return
        if num_threads > limits.num_threads:
            child.stop("thread limit")
        elif _count_files(folder, limits.num_files) > limits.num_files:
            child.stop("file limit")
        elif loop.time() >= deadline:
            child.stop("time limit")


def _count_threads(pid: int) -> int:
    """0 for a process that has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in b"ZX" else int(fields[17])


def _count_files(folder: str, most: int) -> int:
    """Counts no further than one over `most`."""
    with os.scandir(folder) as entries:
        return sum(1 for _, _ in zip(entries, range(most + 1), strict=False))
