"""The Tinker calls computed by actors: a trainer of any layout, and generators that sample.

    backend = ActorBackend.Config(base=Base.Config(name="tiny")).build()
    await backend.start()
    await backend.create_model("m", ModelSettings(base_model="tiny", lora=LoRASettings(rank=8)))

All models in training are in the trainer's processes; those with LoRA have the base's frozen weights in
common there. A snapshot is a copy of a model's weights, adapters merged, in the weight store, from which
generators take it when its turn comes. Folders that models are saved in are those of the local backend; all
hosts of the trainer need to see them.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from actors import launch
from actors.calls import Timeouts
from actors.generator import VLLMGenerator
from actors.launch_config import LaunchConfig
from actors.roles import LogSettings
from actors.temporary_files import temporary_files
from actors.tinker_calls import TrainerCalls
from actors.tinker_fleet import TinkerFleet, TinkerFleetConfig, end_tinker_fleet, start_tinker_fleet
from actors.tinker_samplers import Snapshot, SnapshotServer
from actors.tinker_sampling import answer, check_served
from actors.tinker_snapshots import SnapshotMaker, create_model
from actors.tinker_trainer import TinkerTrainer
from rl.config.configurable import Configurable
from rl.tinker.adam import check_adam
from rl.tinker.errors import InvalidRequestError, NotFoundError
from rl.tinker.local.base import Base
from rl.tinker.local.data import check_data
from rl.tinker.messages import (
    AdamParams,
    BaseModel,
    Datum,
    ForwardBackwardOutput,
    LossCall,
    ModelSettings,
    OptimStepOutput,
    SampleOutput,
    SampleRequest,
)
from rl.weights.files import make_store
from rl.weights.store import WeightStore

T = TypeVar("T")


class ActorBackend(Configurable):
    """A `rl.tinker.backend.Backend`; a process has one at a time, beside no other actors.

    Calls about models run one after another. One that is cancelled before its turn is never made; one that
    has begun does what it was to do.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        base: Base.Config = field(default_factory=lambda: Base.Config(name="tiny"))
        """The model that is offered."""
        trainer: TinkerTrainer.Config = field(default_factory=TinkerTrainer.Config)
        generator: VLLMGenerator.Config = field(
            default_factory=lambda: VLLMGenerator.Config(dtype="float32", max_model_len=1024)
        )
        """Its `max_model_len` is the context that is offered, for training too."""
        weights: WeightStore.Config = field(default_factory=lambda: WeightStore.Config(keep_versions=16))
        """Its `keep_versions` is most snapshots at a time, the base itself among them: whole models each."""
        timeouts: Timeouts = field(default_factory=lambda: Timeouts(close_s=5.0))
        launch: LaunchConfig = field(default_factory=LaunchConfig)
        cache: str = "~/.cache/relay"
        """Folder of a base model that is drawn from a seed."""
        max_lora_rank: int = 128
        log_folder: str | None = None
        """Of the actors' logs; None: nowhere but, from `console_level` up, on the console."""
        console_level: str = "WARNING"

        def __post_init__(self) -> None:
            if self.max_lora_rank < 1:
                raise ValueError(f"max_lora_rank={self.max_lora_rank}: must be at least 1")

        @property
        def fleet(self) -> TinkerFleetConfig:
            return TinkerFleetConfig(
                trainer=self.trainer, generator=self.generator, timeouts=self.timeouts, launch=self.launch
            )

    def __init__(self, *, config: Config) -> None:
        """Raises ValueError for fields that cannot be, by themselves or beside each other."""
        config.__post_init__()  # A field may have been edited since.
        config.fleet.check()
        self.config = config
        self._opened: Base | None = None
        self._fleet: TinkerFleet | None = None
        self._trainer: TrainerCalls
        self._snapshots: SnapshotMaker
        self._server: SnapshotServer
        self._store: WeightStore | None = None
        self._models: dict[str, ModelSettings] = {}
        self._samplers: dict[str, Snapshot] = {}
        self._left: ExitStack = ExitStack()
        self._closed = False

    @property
    def base_models(self) -> Sequence[BaseModel]:
        return [] if self._opened is None else [self._opened.describe()]

    async def start(self) -> None:
        """Open the base model and start the actors; where that fails none of them is left.

        Raises:
            ValueError: a folder that is incomplete or of another architecture, or a field that does not go
                with the model.
            RunError: a process did not come up, or ran into an error there.
        """
        assert self._store is None, "a backend is started once"
        if launch.is_running():
            raise RuntimeError("this process has actors already: close what runs them first")
        config = self.config
        base = await asyncio.to_thread(self._open_base)
        if not config.launch.on_cluster:
            self._left.enter_context(temporary_files())
        folder = Path(self._left.enter_context(tempfile.TemporaryDirectory(prefix="relay-tinker-")))
        self._store = make_store(config.weights, dtype=config.generator.dtype, run_folder=folder)
        logs = Path(config.log_folder).expanduser().absolute() if config.log_folder else folder / "logs"
        try:
            self._fleet = await start_tinker_fleet(
                config.fleet,
                base=base,
                store=self._store,
                logs=LogSettings(folder=logs, console_level=config.console_level),
            )
        except BaseException:
            await self.close()
            raise
        self._trainer = TrainerCalls(self._fleet.trainer, num_ranks=config.trainer.num_procs)
        self._snapshots = SnapshotMaker(trainer=self._trainer, store=self._store)
        self._server = SnapshotServer(generators=self._fleet.generators, forget=self._snapshots.forget)
        self._opened = base

    async def close(self) -> None:
        """End the actors' processes, with what is under way in them."""
        if self._closed:
            return
        self._closed = True
        if self._opened is not None:
            closed = RuntimeError("the backend was closed")
            self._trainer.end(closed)
            await self._server.end(closed)
        with self._left:
            if self._store is not None:
                await end_tinker_fleet(self._fleet, store=self._store)

    def _open_base(self) -> Base:
        config = self.config
        base: Base = config.base.build(
            training=config.trainer.training,
            cache=config.cache,
            device=torch.device("cpu"),
            context=config.generator.max_model_len,
        )
        config.fleet.check_base(base)
        return base

    # Checks

    def check_settings(self, settings: ModelSettings) -> None:
        base = self._base(settings.base_model)
        base.check_settings(settings, max_lora_rank=self.config.max_lora_rank)

    def check_data(self, settings: ModelSettings, data: Sequence[Datum], loss: LossCall) -> None:
        check_data(data, loss, self._base(settings.base_model).data_rules)

    def check_request(self, base_model: str, request: SampleRequest) -> None:
        check_served(self._base(base_model), request)

    # Models in training

    async def create_model(self, model_id: str, settings: ModelSettings) -> None:
        self.check_settings(settings)

        async def create() -> None:
            await create_model(self._trainer, model_id, settings)
            self._models[model_id] = settings

        await self._alone(create)

    async def forward_backward(
        self, model_id: str, data: Sequence[Datum], loss: LossCall, *, backward: bool
    ) -> ForwardBackwardOutput:
        """Where the loss of a call with `backward` is not finite, it drops what earlier ones accumulated too,
        and the error says so."""
        self.check_data(self._settings(model_id), data, loss)
        return await self._learn("forward_backward", model_id, list(data), loss, backward, limit="train_s")

    async def drop_gradient(self, model_id: str) -> None:
        await self._learn("drop_gradient", model_id, limit="train_s")

    async def optim_step(self, model_id: str, params: AdamParams) -> OptimStepOutput:
        check_adam(params)
        return await self._learn("optim_step", model_id, params, limit="train_s")

    async def save_state(self, model_id: str, folder: Path) -> None:
        await self._learn("save_state", model_id, folder.absolute(), limit="checkpoint_s")

    async def load_state(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        await self._learn("load_state", model_id, folder.absolute(), optimizer, limit="checkpoint_s")

    async def delete_model(self, model_id: str) -> None:
        self._settings(model_id)

        async def delete() -> None:
            del self._models[model_id]
            await self._trainer.call("delete_model", model_id, limit="train_s")

        await self._alone(delete)

    # Samplers

    async def save_sampler(self, model_id: str, folder: Path) -> None:
        await self._learn("save_sampler", model_id, folder.absolute(), limit="checkpoint_s")

    async def take_snapshot(self, model_id: str, sampler_id: str) -> None:
        self._settings(model_id)
        self._samplers[sampler_id] = await self._alone(
            lambda: self._snapshots.of_model(model_id), undo=self._snapshots.forget
        )

    async def open_sampler(self, sampler_id: str, settings: ModelSettings, folder: Path | None) -> None:
        self._base(settings.base_model)
        make = (
            partial(self._snapshots.of_base, settings.base_model)
            if folder is None
            else partial(self._snapshots.of_saved, settings, folder.absolute())
        )
        self._samplers[sampler_id] = await self._alone(make, undo=self._snapshots.forget)

    async def close_sampler(self, sampler_id: str) -> None:
        snapshot = self._samplers.pop(sampler_id, None)
        if snapshot is None:
            raise NotFoundError(f"there is no sampler {sampler_id!r}")
        self._server.close_snapshot(snapshot)

    async def sample(self, sampler_id: str, request: SampleRequest) -> SampleOutput:
        snapshot = self._samplers.get(sampler_id)
        if snapshot is None:
            raise NotFoundError(f"there is no sampler {sampler_id!r}")
        base = self._base(self.config.base.name)
        check_served(base, request)
        async with self._server.serving(snapshot, load=request.num_samples) as replica:
            return await answer(replica, request, base=base)

    # Within the trainer's turns

    async def _alone(
        self, work: Callable[[], Awaitable[T]], *, undo: Callable[[T], Awaitable[None]] | None = None
    ) -> T:
        if self._opened is None:
            raise RuntimeError("the backend was not started")
        return await self._trainer.alone(work, undo=undo)

    async def _learn(self, endpoint: str, model_id: str, *args: object, limit: str) -> Any:
        """What the first rank answers."""
        self._settings(model_id)

        async def call() -> Any:
            return (await self._trainer.call(endpoint, model_id, *args, limit=limit))[0]

        return await self._alone(call)

    def _base(self, name: str) -> Base:
        if self._opened is None or name != self._opened.config.name:
            raise InvalidRequestError(f"base_model={name!r}: must be {self.config.base.name!r}")
        return self._opened

    def _settings(self, model_id: str) -> ModelSettings:
        found = self._models.get(model_id)
        if found is None:
            raise NotFoundError(f"there is no model {model_id!r}")
        return found
