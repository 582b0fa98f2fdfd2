"""Limits on connections, which hold before a key is known: their number, the time of their headers,
their log.

uvicorn has h11's limit on the bytes of headers, but no deadline for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import time
from collections.abc import Iterator
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from rl.tinker.types import HttpLimits

HEADER_BYTES = 65_536
"""Bytes of a request's line and headers."""
BACKLOG = 128
"""Connections that the kernel keeps until they are accepted. asyncio accepts as many at a time, and
would log an error for each of them that it cannot open a file for."""
OPEN_FILES = 16_384
"""Open files that a server process asks for."""
WRITE_TIMEOUT_S, WRITE_BYTES = 30.0, 65_536
"""Within this time a client has to take so many bytes of an answer that waits for it."""
LOG_EVERY_S = 10.0
"""Shortest time between two lines of the log about the same thing, for what clients without a key
can cause.
"""
LOGGERS = ("asyncio", "uvicorn.error")


def most_connections(limits: HttpLimits) -> int:
    """Return the limit on open connections; the other half of the process's files is for
    checkpoints and processes.
    """
    return min(limits.connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


def raise_open_files() -> None:
    """Raise this process's soft limit on open files, often 1,024, within its hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < (most := min(OPEN_FILES, hard)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class Connection(H11Protocol):
    """HTTP/1.1 connection that waits for headers or takes an answer only so long.

    A client without a key can hold a connection only while others do not need it. So at the limit
    the connection goes that has waited longest, and a new one is refused only if a request with a
    key is in progress on every other.

    Args:
        limits: of the number of connections and the time of the headers.
        waiting: the server's connections without a request in progress, the longest waiting first;
            also those whose client has no key and does not take its answer.
    """

    def __init__(
        self, *args: Any, limits: HttpLimits, waiting: dict[Connection, None], **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._most = most_connections(limits)
        self._headers_timeout_s = limits.headers_timeout_s
        self._waiting = waiting
        self._deadline: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._most:
            oldest = next(iter(self._waiting), self)
            self._waiting.pop(oldest, None)
            oldest.transport.abort()
        self._watch(comes=True)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch(comes=True)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch(comes=False)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._waiting.pop(self, None)
        self._stop_deadline()
        if self._stalled is not None:
            self._stalled.cancel()

    def _watch(self, *, comes: bool) -> None:
        """Note whether a request is in progress; without one, headers that have begun to come have
        a deadline.

        An answer that a client without a key does not take is no progress.
        """
        is_in_progress = self.cycle is not None and not self.cycle.response_complete
        if is_in_progress and not (self.flow.write_paused and "owner" not in self.scope["state"]):
            self._waiting.pop(self, None)
            self._stop_deadline()
            return
        self._waiting.setdefault(self)
        if comes and self._deadline is None:
            self._deadline = self.loop.call_later(self._headers_timeout_s, self.transport.abort)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    # Answers that are not taken

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch(comes=False)
        self._await_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch(comes=False)
        if self._stalled is not None:
            self._stalled.cancel()

    def _await_writing(self) -> None:
        def check(before: int) -> None:
            if self.transport.get_write_buffer_size() > before - WRITE_BYTES:
                self.transport.abort()
            else:
                self._await_writing()

        self._stalled = self.loop.call_later(
            WRITE_TIMEOUT_S, check, self.transport.get_write_buffer_size()
        )


class _RateFilter(logging.Filter):
    """Filter that lets a message pass once in `LOG_EVERY_S`; its arguments and its end make no
    other message.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        start, now_s = str(record.msg)[:40], time.monotonic()
        passes = now_s >= self._next_s.get(start, 0.0)
        if passes:
            self._next_s[start] = now_s + LOG_EVERY_S
        return passes


@contextlib.contextmanager
def limited_log() -> Iterator[None]:
    """Limit the rate of the messages of asyncio and uvicorn within the block."""
    rate = _RateFilter()
    for name in LOGGERS:
        logging.getLogger(name).addFilter(rate)
    try:
        yield
    finally:
        for name in LOGGERS:
            logging.getLogger(name).removeFilter(rate)
