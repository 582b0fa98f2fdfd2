"""The Tinker API in this process: a PyTorch backend on one device, and the official client with its
own server.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tinker
from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture

from rl.config.configurable import Configurable
from rl.config.registry import resolve
from rl.config.tree import check_bounds
from rl.ledger.config import LedgerConfig
from rl.local import LocalBackend
from rl.models.draw_calls import MAX_SEQUENCES
from rl.tinker.backend import TinkerBackend, TinkerWorkers
from rl.tinker.base_model import BaseModelFolder
from rl.tinker.compat import call_before_threads_end, keep_clients_direct
from rl.tinker.http_server import ServerThread
from rl.training.config import TrainingConfig
from rl.training.engine import TrainingEngine
from rl.utils.processes import use_threads
from rl.utils.proxies import allow_loopback


class LocalWorkers(LocalBackend, TinkerWorkers):
    """Threads of this process, which train and sample models by id."""

    num_sequences = 2 * MAX_SEQUENCES  # One batch that is drawn, and one for the next slice.


class LocalTinkerBackend(TinkerBackend):
    """LoRA models share the frozen weights of the base; samplers hold copies of the trained tensors
    only.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TinkerBackend.Config):
        """Device, dtypes and sizes of micro-batches of all models."""

        training: TrainingConfig = field(default_factory=TrainingConfig)
        """Dtypes and micro-batch sizes of every model in training. Clipping is up to the client."""
        device: str | None = None
        """Device such as "cpu" or "cuda:0"; None: the GPU if there is one."""
        num_threads: int = 1
        """CPU threads of PyTorch's kernels, for training and for sampling each."""

        def __post_init__(self) -> None:
            check_bounds(self, "num_threads", at_least=1)

    def __init__(self, *, config: Config) -> None:
        super().__init__(config=config)
        self.config = config

    def _open_base(self) -> BaseModelFolder:
        config = self.config
        base: BaseModelFolder = config.base.build(training=config.training, cache=config.cache)
        return base

    async def _start_workers(self, base: BaseModelFolder) -> TinkerWorkers:
        config = self.config

        def start() -> LocalWorkers:
            return LocalWorkers(
                TrainingEngine.Config(training=config.training),
                spec=base.spec,
                hf_assets_path=str(base.folder),
                device=config.device,
                models=True,
            )

        workers = await asyncio.to_thread(start)
        # PyTorch's number of threads belongs to a thread, so each sets its own.
        for thread in workers.threads.values():
            await thread.run(use_threads, config.num_threads)
        return workers


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
        ledger: bool = False,
        **options: Any,
    ) -> None:
        """Start the backend and the server, and wait until both are ready.

        Args:
            backend: A backend, its config or a server's, or the name of a config in
                `configs/tinker.py`.
            storage_folder: Folder of the checkpoints.
            ledger: Record what is trained, for `python -m rl.ledger`.
            options: Arguments of the official client, such as `user_metadata` and `display_name`.

        Raises:
            ValueError: there is no such backend, it refuses its config, or the storage folder is in
                use.
        """
        # The official client reads both when it is created.
        allow_loopback()
        keep_clients_direct()
        self._server = ServerThread(
            make_backend(backend),
            storage_folder=storage_folder,
            ledger=LedgerConfig(enable=ledger),
        )
        # The server needs thread pools to end, so a client that nobody closes ends before them.
        call_before_threads_end(self._server.close)
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
    """Build a backend from its config, a server's config or the name of one.

    Raises:
        ValueError: the value is none of these.
        ConfigError: there is no config of this name.
    """
    if isinstance(backend, str):
        backend = resolve("tinker", backend).config
    built: Any = backend
    if isinstance(backend, Configurable.Config):
        built = getattr(backend, "backend", backend).build()
    if not isinstance(built, TinkerBackend):
        raise ValueError(
            f"backend={backend!r}: must be a TinkerBackend, its config, or the name of a config"
        )
    return built
