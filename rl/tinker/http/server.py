"""The server process: a backend, the service and the HTTP application, from a config to a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from rl.config.configurable import Configurable
from rl.config.registry import ResolvedRun
from rl.tinker.http.app import make_app
from rl.tinker.http.auth import Keys, read_keys
from rl.tinker.http.context import Context, HttpLimits
from rl.tinker.service.limits import Limits
from rl.tinker.service.service import Service
from rl.tinker.service.storage_lock import StorageLock

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
DRAIN_TIMEOUT_S = 5.0
"""For answers under way when the server is told to end."""
END_TIMEOUT_S = 40.0
"""From the signal to the end of the process, whatever hangs."""


class TinkerServer(Configurable):
    """Serves until SIGTERM or Ctrl-C, both of which end it with status 0."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        description: str = ""
        """What it serves, for people."""
        backend: Configurable.Config
        """What computes: its `build()` gives a `rl.tinker.backend.Backend`."""
        host: str = "127.0.0.1"
        """Address to listen on. Others than loopback need keys, and something in front that speaks TLS."""
        port: int = 8000
        """0 takes a free one; the line that is printed says which."""
        storage_folder: str = "outputs/tinker"
        """Where training runs and their checkpoints are; a server that starts there finds them again."""
        keys_file: str | None = None
        """File with the API keys that may call, one a line, readable by its owner only."""
        keys_env: str | None = None
        """Name of the environment variable with those keys, separated by commas."""
        limits: Limits = field(default_factory=lambda: Limits(session_timeout_s=600.0))
        """Of the work and what one key may hold."""
        http: HttpLimits = field(default_factory=HttpLimits)
        """Of single requests."""

        def __post_init__(self) -> None:
            if not 0 <= self.port <= 65_535:
                raise ValueError(f"port={self.port}: must be from 0 to 65535")
            if self.keys_file is not None and self.keys_env is not None:
                raise ValueError(
                    f"keys_file={self.keys_file!r}, keys_env={self.keys_env!r}: give one of them"
                )
            if not self.storage_folder:
                raise ValueError("storage_folder='': must be a folder's name")

    def __init__(self, *, config: Config, run: ResolvedRun | None = None) -> None:
        """
        Args:
            config: Of the server.
            run: Where it came from; an entry says so, and it is not needed.

        Raises:
            ValueError: keys that cannot be read, or none where the address can be reached from elsewhere.
        """
        self._config = config
        self._keys = read_keys(file=config.keys_file, environment=config.keys_env)
        if not is_loopback(config.host) and not self._keys.configured:
            raise ValueError(
                f"host={config.host!r}: can be reached from other machines, so API keys are needed; give "
                "keys_file or keys_env, or listen on 127.0.0.1"
            )

    def run(self) -> None:
        """
        Raises:
            ValueError: the address or the storage folder cannot be had, or the backend refuses its config.
        """
        config = self._config
        with (
            contextlib.closing(StorageLock(config.storage_folder)) as storage,
            _listening(config.host, config.port) as listener,
        ):
            service = Service(
                backend=config.backend.build(), storage_folder=storage.folder, limits=config.limits
            )
            if not is_loopback(config.host):
                print(f"warning: {config.host} speaks plain HTTP: put TLS in front of it", file=sys.stderr)
            asyncio.run(self._serve(service, listener))

    async def _serve(self, service: Service, listener: socket.socket) -> None:
        context = Context(service=service, limits=self._config.http)
        app = make_app(context, keys=self._keys, hosts=_hosts(self._config.host, self._keys))
        server = _Uvicorn(app, ready=lambda: print(f"serving the Tinker API at {_url(listener)}", flush=True))
        told = _told_to_end()
        try:
            if not await _or_told(service.start(), told):
                return
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            telling = asyncio.create_task(told.wait())
            await asyncio.wait((serving, telling), return_when=asyncio.FIRST_COMPLETED)
            telling.cancel()
            context.stopping.set()
            server.should_exit = True
            await serving
        finally:
            await service.close()


class _Uvicorn(uvicorn.Server):
    """Without uvicorn's way with signals, which ends the process by the signal itself."""

    def __init__(self, app: Any, *, ready: Callable[[], None]) -> None:
        """`ready` is called once requests are answered."""
        self._ready = ready
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                ws="none",
                log_level="warning",
                access_log=False,
                server_header=False,
                # Longer than a client's pause between calls, or it meets a connection that is being closed.
                timeout_keep_alive=75,
                timeout_graceful_shutdown=int(DRAIN_TIMEOUT_S),
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _hosts(host: str, keys: Keys) -> frozenset[str] | None:
    """Where any key is good, only requests that name this machine are."""
    return None if keys.configured else frozenset((*LOOPBACK_NAMES, host.lower()))


def _told_to_end() -> asyncio.Event:
    told = asyncio.Event()

    def tell() -> None:
        told.set()
        watchdog = threading.Timer(END_TIMEOUT_S, _give_up)
        watchdog.daemon = True
        watchdog.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, tell)
    return told


def _give_up() -> None:
    print(f"error: the server did not end within {END_TIMEOUT_S:g} s of being told to", file=sys.stderr)
    sys.stderr.flush()
    os._exit(1)


async def _or_told(work: Any, told: asyncio.Event) -> bool:
    """Whether the work was done before the server was told to end; raises what it raises."""
    task, telling = asyncio.ensure_future(work), asyncio.ensure_future(told.wait())
    try:
        await asyncio.wait((task, telling), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return task.done() and not told.is_set()
    finally:
        for each in (task, telling):
            each.cancel()
        await asyncio.gather(task, telling, return_exceptions=True)


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns off Nagle's delay, 40 ms of each answer, only where the protocol is said to be TCP.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ValueError(f"host={host!r}, port={port}: cannot listen there: {error.strerror}") from None
        yield listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
