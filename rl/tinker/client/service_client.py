"""Where one begins: a session on a backend, which makes the other clients."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from tinker import types
from tinker.lib.public_interfaces import APIFuture
from tinker.lib.public_interfaces.custom_loss import LossHandle, PerDatumLossFn, trace_loss

from rl.config.configurable import Configurable
from rl.tinker.backend import Backend
from rl.tinker.client.deprecated import async_variant, awaited_variant, warn_of
from rl.tinker.client.futures import ClientFuture, finished
from rl.tinker.client.hosts import acquire, release
from rl.tinker.client.rest_client import RestClient
from rl.tinker.client.sampling_client import BackcompatSamplingClientFuture, create_sampling_client
from rl.tinker.client.session import Session
from rl.tinker.client.training_client import BackcompatTrainingClientFuture, TrainingClient, training_client
from rl.tinker.client.unsupported import refuse
from rl.tinker.messages import LoRASettings, ModelSettings
from rl.tinker.service.responses import Submitted
from rl.tinker.service.service import LOCAL_OWNER

if TYPE_CHECKING:
    from tinker.lib.retry_handler import RetryConfig
    from tinker.lib.telemetry import Telemetry


class ServiceClient:
    """Training and sampling in this process; nothing is sent anywhere.

        with tinker.ServiceClient(backend="tiny") as service:
            training = service.create_lora_training_client("tiny", rank=8).result()

    Clients of equal backends and storage folders share one backend, which ends when the last of them is
    closed or forgotten, or with the interpreter.
    """

    def __init__(
        self,
        user_metadata: dict[str, str] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        backend: Backend | Configurable.Config | str | None = None,
        storage_folder: str | Path | None = None,
        progress: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Starts the backend, and waits for it, unless it is running.

        Args:
            backend: What computes: a Backend, its config, or the name of one in `configs/tinker.py`. None is
                the one that is running. The official client does not have this argument and the next two.
            storage_folder: Of checkpoints; None is `outputs/tinker`.
            progress: Whether a line on standard error tells what takes long, where this call starts the
                backend. None: on a terminal and in a notebook.
            project_id, api_key, default_headers_overrides: Without effect; they are for a server.

        Raises:
            ValueError: a `base_url` (that is for the official client), or no such backend.
            tinker.BadRequestError: the metadata are no JSON, or too large.
        """
        refuse("base_url", base_url, only=None, why="the official client is for servers")
        if kwargs:
            warnings.warn(
                f"ServiceClient ignores arguments that it does not have: {', '.join(sorted(kwargs))}",
                FutureWarning,
                stacklevel=2,
            )
        host = acquire(backend, storage_folder, progress)
        try:
            self._session = Session(host, user_metadata=user_metadata, display_name=display_name)
        except BaseException:
            release(host)
            raise
        self._training = host.service.training
        self._closing = threading.Lock()
        self._closed: ClientFuture[None] | None = None

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
        optimizer: types.OptimizerConfig | None = None,
    ) -> BackcompatTrainingClientFuture:
        """A new model to train: adapters of this rank on a base model, or with rank 0 all its parameters."""
        _check_optimizer(optimizer)
        if not (train_mlp or train_attn or train_unembed):
            raise ValueError(
                "train_mlp, train_attn and train_unembed are all False: nothing would be trained"
            )
        lora = LoRASettings(
            rank=rank, seed=seed, train_mlp=train_mlp, train_attn=train_attn, train_unembed=train_unembed
        )
        settings = ModelSettings(base_model=base_model, lora=lora if rank else None)
        submit = functools.partial(
            self._training.create_model, settings=settings, user_metadata=user_metadata
        )
        return self._training_client(submit)

    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: types.OptimizerConfig | None = None,
    ) -> BackcompatTrainingClientFuture:
        """A new model with the weights of `TrainingClient.save_state`; the optimizer starts anew."""
        _check_optimizer(optimizer)
        return self._from_state(path, base_model, user_metadata, weights_access_token, optimizer=False)

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
    ) -> BackcompatTrainingClientFuture:
        """The same, and the optimizer goes on where it was."""
        return self._from_state(path, base_model, user_metadata, weights_access_token, optimizer=True)

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> BackcompatSamplingClientFuture:
        """A client that samples from saved weights, or from a base model. `retry_config` has nothing to do
        here."""
        if model_path is None and base_model is None:
            raise ValueError("model_path and base_model are both None: give one of them")
        refuse("record_stability_info", record_stability_info, only=False, why="nothing is recorded")
        created = create_sampling_client(self._open(), model_path=model_path, base_model=base_model)
        return BackcompatSamplingClientFuture(
            self._session.host.submit(created, title="create a sampling client")
        )

    def create_custom_loss(
        self, fn: PerDatumLossFn, input_ranks: Mapping[str, types.CustomLossInputRank]
    ) -> APIFuture[LossHandle]:
        """A loss of a single datum, checked and traced, for `TrainingClient.forward_backward_custom`."""
        return finished(trace_loss(fn, input_ranks, self._open().session_id))

    def copy_weights(
        self, path: str, *, ttl_seconds: int | None = None, weights_access_token: str | None = None
    ) -> APIFuture[str]:
        """Raises NotImplementedError: there are no projects to copy between."""
        raise NotImplementedError(f"copy_weights(path={path!r}) is not supported: there are no projects here")

    def get_server_capabilities(self) -> types.GetServerCapabilitiesResponse:
        """Deprecated: `RestClient().get_server_capabilities()`."""
        warn_of("ServiceClient.get_server_capabilities()", instead="RestClient().get_server_capabilities()")
        return self._rest_client().get_server_capabilities().result()

    def create_rest_client(self) -> RestClient:
        """Deprecated: `RestClient()`."""
        warn_of("ServiceClient.create_rest_client()", instead="RestClient()")
        return self._rest_client()

    def get_console_url(self) -> str:
        """What names this session; there is no console."""
        return f"tinker://{self._session.session_id}"

    def get_telemetry(self) -> Telemetry | None:
        """None: nothing is reported to anybody."""
        return None

    def close(
        self, status: Literal["success", "errored", "interrupted"], detail: str | None = None
    ) -> APIFuture[None]:
        """End the session: its models leave the memory, and the backend ends if nobody else uses it.

        Checkpoints stay. What waits fails. Idempotent.
        """
        with self._closing:
            if self._closed is None:
                self._closed = _in_a_thread(self._session.close)
            return self._closed

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close("success" if exc_type is None else "errored").result()

    # As in the official client

    get_server_capabilities_async = async_variant(get_server_capabilities)
    create_lora_training_client_async = awaited_variant(create_lora_training_client)
    create_training_client_from_state_async = awaited_variant(create_training_client_from_state)
    create_training_client_from_state_with_optimizer_async = awaited_variant(
        create_training_client_from_state_with_optimizer
    )
    create_sampling_client_async = awaited_variant(create_sampling_client)

    def _open(self) -> Session:
        if self._closed is not None:
            raise RuntimeError("the ServiceClient is closed")
        return self._session

    def _rest_client(self) -> RestClient:
        return RestClient(self._open().host)

    def _from_state(
        self,
        path: str,
        base_model: str | None,
        user_metadata: dict[str, str] | None,
        weights_access_token: str | None,
        *,
        optimizer: bool,
    ) -> BackcompatTrainingClientFuture:
        refuse("weights_access_token", weights_access_token, only=None, why="all weights here are yours")
        submit = functools.partial(
            self._training.create_from_state,
            path=path,
            optimizer=optimizer,
            base_model=base_model,
            user_metadata=user_metadata,
        )
        return self._training_client(submit)

    def _training_client(self, submit: Callable[..., Submitted]) -> BackcompatTrainingClientFuture:
        session = self._open()
        model_seq_id = next(session.model_seq_ids)

        async def create() -> TrainingClient:
            submitted = submit(session.session_id, model_seq_id, owner=LOCAL_OWNER)
            return await training_client(session, submitted.request_id, submitted.model_id)

        return BackcompatTrainingClientFuture(session.host.submit(create(), title="create a model"))


def _check_optimizer(optimizer: types.OptimizerConfig | None) -> None:
    if optimizer is not None and not isinstance(optimizer, types.AdamOptimizerConfig):
        raise ValueError(f"optimizer={optimizer!r} is not supported: must be AdamOptimizerConfig() or None")


def _in_a_thread(function: Callable[[], None]) -> ClientFuture[None]:
    future: Future[None] = Future()

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001  (handed to whoever waits)
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="tinker-close", daemon=True).start()
    return ClientFuture(future)
