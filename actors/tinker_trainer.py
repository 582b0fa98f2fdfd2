"""The trainer of the Tinker backend: models in training by their ids, one actor a rank.

The models compute in a thread of their own, call after call, the same on every rank. Whoever calls makes
one call at a time (`actors.tinker_calls`): so nothing changes the weights that a push is reading.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch
from monarch.actor import Actor, concurrent_endpoint, endpoint
from torch import Tensor

from rl.config.configurable import Configurable
from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.distributed.compile import CompileConfig
from rl.distributed.mesh import ParallelismConfig
from rl.distributed.process_group import CommConfig, World
from rl.distributed.threads import use_threads
from rl.errors import RunError
from rl.tinker.errors import InvalidRequestError, TinkerError
from rl.tinker.local.base import Base
from rl.tinker.local.layout import Layout
from rl.tinker.local.models import LocalModel
from rl.tinker.messages import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    LossCall,
    ModelSettings,
    OptimStepOutput,
)
from rl.training.config import TrainingConfig
from rl.training.engine import TrainingEngine
from rl.training.place import Place
from rl.types import BoxSum
from rl.weights.store import Transfer, WeightStore
from rl.worker_thread import WorkerThread

logger = logging.getLogger(__name__)

T = TypeVar("T")
Refusal = TinkerError | RunError
"""What an endpoint answers in place of a result: as a value, so that the answers of all ranks are there."""

STOP_TIMEOUT_S = 10.0


class TinkerTrainer(Actor, Configurable):
    """Every endpoint is called on all ranks with the same arguments; the first one answers."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        num_procs: int = 1
        """Ranks; the degrees of `parallelism` multiply to it."""
        num_threads: int = 1
        """CPU threads of each rank."""
        parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
        """Of every model in training."""
        comm: CommConfig = field(default_factory=CommConfig)
        training: TrainingConfig = field(default_factory=TrainingConfig)
        """Of every model in training: dtypes and sizes of micro-batches. Clipping is the caller's."""
        activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
        compile: CompileConfig = field(default_factory=CompileConfig)

        def __post_init__(self) -> None:
            for name in ("num_procs", "num_threads"):
                if getattr(self, name) < 1:
                    raise ValueError(f"trainer.{name}={getattr(self, name)}: must be at least 1")

        def engine(self) -> TrainingEngine.Config:
            """Of every model's engine, but for its converters."""
            return TrainingEngine.Config(
                parallelism=self.parallelism,
                comm=self.comm,
                training=replace(self.training),
                activation_checkpoint=self.activation_checkpoint,
                compile=self.compile,
            )

    def __init__(self, *, config: Config, base: Base.Config, context: int, store: WeightStore) -> None:
        """`base` names a folder that is there; `context` is most tokens of a sequence."""
        use_threads(1)  # This is not the thread that computes.
        self.config = config
        self.store = store
        self._base_config = base
        self._context = context
        self._world = World.from_env()
        self._thread = WorkerThread("tinker-models")
        self._models: dict[str, LocalModel] = {}

    @endpoint
    async def setup(self) -> None:
        """Meet the other ranks and open the base model; weights are read with the first model."""
        await self._thread.run(self._setup)

    @concurrent_endpoint
    async def create_model(self, model_id: str, settings: ModelSettings) -> Refusal | None:
        """The settings say the seed of the adapters, the same to all ranks."""

        def create() -> None:
            self._models[model_id] = LocalModel(
                self._base, settings, training=self.config.training, layout=self._layout
            )

        return await self._answer(create)

    @concurrent_endpoint
    async def forward_backward(
        self, model_id: str, data: Sequence[Datum], loss: LossCall, backward: bool
    ) -> ForwardBackwardOutput | Refusal | None:
        return self._of_first_rank(
            await self._answer(lambda: self._models[model_id].forward_backward(data, loss, backward=backward))
        )

    @concurrent_endpoint
    async def drop_gradient(self, model_id: str) -> Refusal | None:
        return await self._answer(lambda: self._models[model_id].engine.drop_gradient())

    @concurrent_endpoint
    async def optim_step(self, model_id: str, params: AdamParams) -> OptimStepOutput | Refusal:
        return await self._answer(lambda: self._models[model_id].optim_step(params))

    @concurrent_endpoint
    async def save_state(self, model_id: str, folder: Path) -> Refusal | None:
        return await self._answer(lambda: self._models[model_id].save_state(folder))

    @concurrent_endpoint
    async def save_sampler(self, model_id: str, folder: Path) -> Refusal | None:
        return await self._answer(lambda: self._models[model_id].save_sampler(folder))

    @concurrent_endpoint
    async def load_state(self, model_id: str, folder: Path, optimizer: bool) -> Refusal | None:
        return await self._answer(lambda: self._models[model_id].load_state(folder, optimizer=optimizer))

    @concurrent_endpoint
    async def delete_model(self, model_id: str) -> Refusal | None:
        """Nothing where it could not be made."""

        def delete() -> None:
            model = self._models.pop(model_id, None)
            if model is not None:
                model.close()
            del model
            gc.collect()  # An engine's hooks refer to it: its memory would be freed only some time.

        return await self._answer(delete)

    @concurrent_endpoint
    async def push_model(self, model_id: str, version: int) -> tuple[BoxSum, ...] | Refusal:
        """Put this rank's part of the merged weights into the store, not announced; the sums of its boxes.

        Refused where nothing could be sampled from the weights, or there is no room for them.
        """

        def weights() -> tuple[dict[str, Tensor], set[str]]:
            model = self._models[model_id]
            model.check_finite()
            return model.engine.model_state_dict(), model.engine.buffer_names()

        def push_here() -> Transfer:
            state_dict, buffer_names = weights()
            return asyncio.run(
                self.store.push(version=version, state_dict=state_dict, buffer_names=buffer_names)
            )

        try:
            if self.store.is_collective:
                sent = await self._thread.run(push_here)
            else:
                state_dict, buffer_names = await self._thread.run(weights)
                sent = await self.store.push(
                    version=version, state_dict=state_dict, buffer_names=buffer_names
                )
        except (TinkerError, RunError) as error:
            return error
        return sent.sums

    @concurrent_endpoint
    async def close(self) -> None:
        """Close every model and leave the other ranks."""
        await self._thread.run(self._close)

    async def __cleanup__(self, exc: Exception | None) -> None:
        # A thread that is still computing when the interpreter ends would abort the process.
        if not await asyncio.to_thread(self._thread.stop, timeout_s=STOP_TIMEOUT_S):
            logger.warning("the models' thread was still busy %g s after the end", STOP_TIMEOUT_S)

    async def _answer(self, function: Callable[[], T]) -> T | Refusal:
        """Its result, or what is wrong with the request: the same on every rank."""
        try:
            return await self._thread.run(function)
        except TinkerError as error:
            return error
        except ValueError as error:
            return InvalidRequestError(str(error))

    def _of_first_rank(self, answer: T) -> T | None:
        """Others' answers, which are the same, need not travel."""
        return answer if self._world.rank == 0 or isinstance(answer, Exception) else None

    def _setup(self) -> None:
        use_threads(self.config.num_threads)
        device = self._world.default_device()
        self._base: Base = self._base_config.build(
            training=self.config.training, cache="", device=device, context=self._context
        )
        if self._base.spec.batch_invariant and torch.cuda.is_available():
            from actors.vllm.invariant_gpu import use_vllms_kernels

            use_vllms_kernels()
        config = self.config.engine()
        degrees = config.parallelism.degrees(self._world.size)
        place = Place.take(config, degrees=degrees, world=self._world, device=device, record_in=None)
        self._layout = Layout(config=config, world=self._world, place=place)
        logger.info("ready: %s %s", self._base.spec.name, self._base.spec.flavor)

    def _close(self) -> None:
        for model in self._models.values():
            model.close()
        self._models.clear()
        self._layout.place.leave()
