"""The official Tinker client on a server in this process."""

from __future__ import annotations

import importlib
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import tinker
from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture

from rl.config.configurable import Configurable
from rl.tinker.backend import TinkerBackend
from rl.tinker.serving import ServerThread

CONFIGS = "tinker"
"""The module of `configs/` whose functions name the backends."""


class ServiceClient(tinker.ServiceClient):
    """The official `ServiceClient`, connected to a server that starts and ends with it.

        with ServiceClient(backend="tiny") as service:
            training = service.create_lora_training_client("tiny", rank=8).result()

    `base_url` and `api_key` let other official clients reach the same server.
    """

    def __init__(
        self,
        *,
        backend: TinkerBackend | Configurable.Config | str,
        storage_folder: str | Path = "outputs/tinker",
        **options: Any,
    ) -> None:
        """Start the backend and the server, and wait until both are ready.

        Args:
            backend: A backend, its config or a server's, or the name of a config in `configs/tinker.py`.
            storage_folder: Folder of the checkpoints.
            options: Arguments of the official client, such as `user_metadata` and `display_name`.

        Raises:
            ValueError: there is no such backend, it refuses its config, or the storage folder is in use.
        """
        self._server = ServerThread(make_backend(backend), storage_folder=storage_folder)
        # Before the interpreter stops its thread pools, which the server needs to end.
        threading._register_atexit(self._server.close)  # type: ignore[attr-defined]
        self.base_url, self.api_key = self._server.url, self._server.api_key
        super().__init__(base_url=self.base_url, api_key=self.api_key, **options)

    def close(self, status: Any, detail: str | None = None) -> Any:
        """Finish the session and end the server with its backend; checkpoints stay. Idempotent."""
        session = super().close(status, detail)
        closed: Future[None] = Future()

        def end() -> None:
            try:
                session.result()
                self._server.close()
                closed.set_result(None)
            except BaseException as error:  # noqa: BLE001  (handed to the caller)
                closed.set_exception(error)

        # A pool's thread would delay the end of the interpreter.
        threading.Thread(target=end, name="tinker-close", daemon=True).start()
        return AwaitableConcurrentFuture(closed)


def make_backend(backend: TinkerBackend | Configurable.Config | str) -> TinkerBackend:
    """Build a backend from its name, its config or a server's config.

    Raises:
        ValueError: the value is none of these.
        ConfigError: there is no config of this name.
    """
    if isinstance(backend, str):
        registry = importlib.import_module("rl.config.registry")
        backend = registry.resolve(CONFIGS, backend).config
    built: Any = backend
    if isinstance(backend, Configurable.Config):
        built = getattr(backend, "backend", backend).build()
    if not isinstance(built, TinkerBackend):
        raise ValueError(f"backend={backend!r}: must be a TinkerBackend, its config, or the name of a config")
    return built
