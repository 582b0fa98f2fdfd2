"""HTTP server of the Tinker API around a backend.

`TinkerServer` is a process of its own (`python -m rl.tinker.server`), `ServerThread` a thread of
the process that uses it (`rl.tinker.ServiceClient`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import secrets
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from rl.config.configurable import Configurable
from rl.config.registry import RunRequest
from rl.config.tree import check_bounds
from rl.http.keys import Keys, check_reach, read_keys
from rl.http.open_files import raise_open_files
from rl.http.server import format_url, listen, make_server
from rl.http.signals import END_TIMEOUT_S, stop_on_signals
from rl.ledger.config import LedgerConfig
from rl.observability.console import print_line
from rl.rollouts.renderer import RendererConfig
from rl.tinker.app import make_app
from rl.tinker.auth import ANTHROPIC_PREFIX, KEY_PREFIX, OPENAI_PREFIX
from rl.tinker.backend import TinkerBackend
from rl.tinker.service.service import Service
from rl.tinker.types import Limits
from rl.utils.files import hold_folder_lock
from rl.utils.printing import print_error
from rl.utils.processes import give_back_freed_memory
from rl.utils.proxies import LOOPBACK_NAMES, is_loopback

KEY_FILE = ".api_key"
ANY_KEY = (
    "without keys_file any key is accepted: every user of this machine can use this server, and "
    "reach the models and checkpoints of a key that is easily guessed"
)
MEMORY_S = 10.0
"""Time between two looks whether freed memory can be given back."""


class TinkerServer(Configurable):
    """Server process that runs until Ctrl-C, SIGTERM or SIGHUP and then exits with status 0."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Backend, address, storage folder, keys and limits of a server."""

        description: str = ""
        """One line about what the server serves."""
        backend: Configurable.Config
        """Config whose `build()` returns a `rl.tinker.backend.TinkerBackend`."""
        host: str = "127.0.0.1"
        """Address to listen on. Any address beyond loopback needs API keys and a TLS proxy in
        front.
        """
        port: int = 8000
        """Port to listen on; 0 picks a free one, which the first printed line names."""
        storage_folder: str = "outputs/tinker"
        """Folder of training runs and checkpoints; the next server on the same folder finds them
        again.
        """
        keys_file: str | None = None
        """File with one API key per line, readable by its owner only."""
        limits: Limits = field(default_factory=lambda: Limits(session_timeout_s=600.0))
        """Limits on the work and the state of one API key."""
        renderer: RendererConfig = field(default_factory=RendererConfig)
        """How conversations of OpenAI's and Anthropic's clients are written for the base model."""
        ledger: LedgerConfig = field(default_factory=LedgerConfig)
        """What is recorded of each training run, in its folder."""

        def __post_init__(self) -> None:
            check_bounds(self, "port", at_least=0, at_most=65_535)
            if not self.storage_folder:
                raise ValueError("storage_folder='': must be a folder's name")
            if self.ledger.share < 1:
                raise ValueError(
                    f"ledger.share={self.ledger.share}: must be 1.0, as the data of a client are "
                    "recorded whole or not at all"
                )

    def __init__(self, *, config: Config, request: RunRequest | None = None) -> None:
        """Raise ValueError for API keys that cannot be read, or are missing although the address is
        public.
        """
        self._config = config
        self._keys = read_keys(config.keys_file, prefix=KEY_PREFIX)
        check_reach(config.host, self._keys)

    def run(self) -> None:
        """Serve until a signal arrives.

        Raises:
            ValueError: the address or the storage folder is unavailable, or the backend refuses its
                config.
        """
        config = self._config
        folder = Path(config.storage_folder).expanduser()
        # First what fails at once, then the model, which may load for minutes.
        with lock_storage(folder), listen(config.host, config.port) as listener:
            backend = config.backend.build()
            service = Service(
                backend=backend,
                storage_folder=folder,
                limits=config.limits,
                renderer=config.renderer,
                ledger=config.ledger,
            )
            if not is_loopback(config.host):
                _warn(f"{config.host} speaks plain HTTP: put TLS in front of it")
            if not self._keys.configured:
                _warn(ANY_KEY)
            raise_open_files()  # Before the application reads how many connections there may be.
            asyncio.run(self._serve(service, listener, backend))

    async def _serve(
        self, service: Service, listener: socket.socket, backend: TinkerBackend
    ) -> None:
        def print_ready(url: str) -> None:
            base = backend.base_model
            aliases = f", also as {', '.join(base.aliases)}" if base.aliases else ""
            print_line(f"serving the Tinker API at {url}\nbase model: {base.name}{aliases}")
            print_line(f"for OpenAI's clients: {url}{OPENAI_PREFIX}/v1")
            print_line(f"for Anthropic's clients: {url}{ANTHROPIC_PREFIX}")

        memory = asyncio.create_task(give_back_memory(service))
        with stop_on_signals() as stop:
            await serve(
                service,
                listener,
                keys=self._keys,
                hosts=None
                if self._keys.configured
                else (*LOOPBACK_NAMES, self._config.host.lower()),
                stop=stop,
                ready=print_ready,
            )
        memory.cancel()


class ServerThread:
    """Server on a free loopback port in a thread of this process.

    Its API key is kept in the storage folder, so that the next server there has the same owner. The
    thread has its own event loop, so a caller may block on it inside a running loop.
    """

    def __init__(
        self,
        backend: TinkerBackend,
        *,
        storage_folder: str | Path,
        ledger: LedgerConfig | None = None,
        more_keys: Sequence[str] = (),
    ) -> None:
        """Start the backend and wait until the server answers.

        Args:
            more_keys: API keys that may call beside `api_key`, each an owner of its own.

        Raises:
            ValueError: the storage folder is unavailable, or the backend refuses its config.
        """
        self._more_keys = more_keys
        folder = Path(storage_folder).expanduser().absolute()
        self._lock = contextlib.ExitStack()
        self._lock.enter_context(lock_storage(folder))
        self.api_key = _read_or_make_key(folder / KEY_FILE)
        self._service = Service(backend=backend, storage_folder=folder, ledger=ledger)
        # A failure of the start comes through this future too.
        self._ready: Future[str] = Future()
        self._thread = threading.Thread(target=self._run, name="tinker-server", daemon=True)
        self._thread.start()
        try:
            self.url = self._ready.result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the sessions, the backend and the thread; idempotent."""
        with contextlib.suppress(
            RuntimeError, AttributeError
        ):  # the loop has ended, or never started
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(END_TIMEOUT_S)
        # A thread that hangs may still write into the folder.
        if not self._thread.is_alive():
            self._lock.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001  (handed to the caller of __init__)
            if not self._ready.done():
                self._ready.set_exception(error)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        with listen("127.0.0.1", 0) as listener:
            await serve(
                self._service,
                listener,
                keys=Keys([self.api_key, *self._more_keys]),
                hosts=LOOPBACK_NAMES,
                stop=self._stop,
                ready=self._ready.set_result,
            )


@contextlib.contextmanager
def lock_storage(folder: Path) -> Iterator[None]:
    """Lock a storage folder, which another process would clean up; make a new one for this user
    only.
    """
    is_new = not folder.exists()
    with hold_folder_lock(
        folder, as_what="the storage folder", otherwise="choose another storage_folder"
    ):
        # A folder that exists may have other uses, so its rights stay.
        if is_new:
            folder.chmod(stat.S_IRWXU)
        elif folder.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            _warn(f"other users can read checkpoints in {folder}: chmod 700 it")
        yield


def _warn(text: str) -> None:
    print_error(f"warning: {text}")


def _read_or_make_key(file: Path) -> str:
    if not file.exists():
        # Private before the key is in it.
        file.touch(mode=0o600)
        file.write_text(KEY_PREFIX + secrets.token_hex(16))
    return file.read_text()


async def serve(
    service: Service,
    listener: socket.socket,
    *,
    keys: Keys,
    hosts: tuple[str, ...] | None,
    stop: asyncio.Event,
    ready: Callable[[str], object],
) -> None:
    """Start the service, call `ready` with its URL, answer requests until `stop` is set, and close
    the service.
    """
    server = make_server(make_app(service, keys=keys, hosts=hosts))

    async def run() -> None:
        await service.start()
        ready(format_url(listener))
        await server.serve(sockets=[listener])

    running, stopping = asyncio.create_task(run()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        # First, because uvicorn waits for answers in progress: polls for results last 25 s.
        service.stop_waiting()
        server.should_exit = True
        if not server.started:  # The backend still loads its model, which nobody waits for now.
            running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    finally:
        stopping.cancel()
        await service.close()


async def give_back_memory(service: Service) -> None:
    """Give this process's memory back to the system while nothing is computed.

    Training keeps freed memory for its next tensors, and a refused body of hundreds of MB may hang
    in a cycle with its error.
    """
    while True:
        await asyncio.sleep(MEMORY_S)
        if not service.has_work:
            gc.collect()
            await asyncio.to_thread(give_back_freed_memory)
