"""HTTP server of an application: sockets, limits, and the settings of uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from rl.http.open_files import limit_connections

HEADER_BYTES = 65_536
"""Bytes of a request's line and headers."""
BACKLOG = 128
"""Connections that the kernel keeps until they are accepted. asyncio accepts as many at a time, and
logs an error for each of them that it cannot open a file for."""
WRITE_TIMEOUT_S = 30.0
"""Time after which the kernel closes a connection whose client does not take its answer."""
DRAIN_TIMEOUT_S = 5.0
"""Time for answers in progress once the server is stopping."""


class ImpatientProtocol(H11Protocol):
    """uvicorn's protocol with a limit on the bytes of headers, which h11 has, and on the time in
    which a client takes what it was sent.

    The kernel's own limit does not end the connection of a client that is alive and only stops
    reading.
    """

    _giving_up: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._giving_up = self.loop.call_later(WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _stop_timer(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None


def make_server(app: ASGIApp) -> uvicorn.Server:
    """Return the server of an application; `serve` takes its sockets.

    It handles no signals, and ends after `should_exit` is set.
    """
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=ImpatientProtocol,
            h11_max_incomplete_event_size=HEADER_BYTES,
            limit_concurrency=limit_connections(),
            backlog=BACKLOG,
            lifespan="off",
            ws="none",
            # Clients without a key can cause warnings, and the application logs its errors itself.
            log_level="critical",
            access_log=False,
            server_header=False,
            # Longer than a client's pause between calls; otherwise the client writes to a closing
            # connection.
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(DRAIN_TIMEOUT_S),
        )
    )
    # uvicorn's own handlers would end the process by the signal itself, and in a thread of a
    # notebook they cannot be installed.
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
    return server


@contextlib.contextmanager
def listen(host: str, port: int) -> Iterator[socket.socket]:
    """Listen on a socket; raise ValueError if the address is unavailable."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's algorithm, 40 ms of each answer, only on sockets whose protocol is
    # TCP.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform == "linux":  # Connections inherit the option, which other systems lack.
            timeout_ms = round(1000 * WRITE_TIMEOUT_S)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except OSError as error:
            raise ValueError(
                f"host={host!r}, port={port}: cannot listen there: {error.strerror}"
            ) from None
        yield listener


def format_url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
