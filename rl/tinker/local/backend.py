"""The Tinker calls computed in this process, on one device: no actors, no engine but PyTorch's.

    backend = LocalBackend.Config(bases=(Base.Config(name="tiny"),)).build()
    await backend.start()
    await backend.create_model("m", ModelSettings(base_model="tiny", lora=LoRASettings(rank=8)))

Each model in training is a training engine of its own. LoRA models on one base have its frozen weights in
common; a model of which all parameters are trained has its own. Samplers have copies of what is trained, and
no copy of the base.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from rl.config.configurable import Configurable
from rl.distributed.process_group import World
from rl.distributed.threads import use_threads
from rl.tinker.adam import check_adam
from rl.tinker.errors import InvalidRequestError, NotFoundError
from rl.tinker.local.base import Base
from rl.tinker.local.data import check_data
from rl.tinker.local.models import LocalModel, SamplerWeights, open_saved
from rl.tinker.local.requests import Ask, answer, check_request
from rl.tinker.local.sampling import GroupLimits, SampleQueue
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
from rl.training.config import TrainingConfig
from rl.worker_thread import WorkerThread

ResultT = TypeVar("ResultT")


class LocalBackend(Configurable):
    """A `rl.tinker.backend.Backend`.

    Calls about models run one after another in a thread, answers of samplers in another. A call about a model
    that is cancelled before its turn is never made; one that has begun does what it was to do.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        bases: tuple[Base.Config, ...] = field(
            default_factory=lambda: (Base.Config(name="tiny", batch_invariant=True),)
        )
        """The models that are offered."""
        training: TrainingConfig = field(default_factory=TrainingConfig)
        """Of every model in training: dtypes and sizes of micro-batches. Clipping is the caller's."""
        cache: str = "~/.cache/relay"
        """Folder of the base models that are drawn from a seed."""
        device: str | None = None
        """Such as "cpu" or "cuda:0"; None: the GPU where there is one."""
        num_threads: int = 1
        """Of PyTorch's kernels on a CPU, for training and for sampling each."""
        max_lora_rank: int = 128
        max_sequences: int = 256
        """Most completions that are drawn at once."""
        gather_s: float = 0.005
        """How long the first request to a sampler waits for others to be answered with it."""
        close_timeout_s: float = 60.0
        """Most that is waited at the end for what is under way."""

        def __post_init__(self) -> None:
            names = [base.name for base in self.bases]
            if not names or len(set(names)) < len(names):
                raise ValueError(f"bases: has the names {names}: must be at least one, each once")
            for name, at_least in (("num_threads", 1), ("max_lora_rank", 1), ("max_sequences", 1)):
                if getattr(self, name) < at_least:
                    raise ValueError(f"{name}={getattr(self, name)}: must be at least {at_least}")
            for name in ("gather_s", "close_timeout_s"):
                if not 0.0 <= getattr(self, name) < float("inf"):
                    raise ValueError(f"{name}={getattr(self, name)}: must be a finite number of at least 0")
            if self.training.cpu_offload:
                raise ValueError("training.cpu_offload=True: must be False, models share their base's memory")

    def __init__(self, *, config: Config) -> None:
        """Raises ValueError for fields out of range, or where this process is one of several."""
        config.__post_init__()  # A field may have been edited since.
        world = World.from_env()
        if world.size > 1:
            raise ValueError(f"WORLD_SIZE={world.size}: a local backend is one process alone")
        self.config = config
        self._device = world.default_device() if config.device is None else torch.device(config.device)
        self._bases: dict[str, Base] = {}
        self._models: dict[str, LocalModel] = {}
        self._samplers: dict[str, SamplerWeights] = {}
        self._plain: dict[str, SamplerWeights] = {}
        """Of each base itself, by name: the same for all its samplers, which are so answered together."""
        self._learner: WorkerThread | None = None
        self._sampler: WorkerThread | None = None
        self._queue: SampleQueue | None = None
        self._closed = threading.Event()

    @property
    def base_models(self) -> Sequence[BaseModel]:
        return [base.describe() for base in self._bases.values()]

    async def start(self) -> None:
        """Load the base models.

        Raises:
            ValueError: a base's folder is incomplete or of another architecture.
        """
        assert self._learner is None, "a backend is started once"
        config = self.config
        self._learner, self._sampler = WorkerThread("tinker learner"), WorkerThread("tinker sampler")
        self._queue = SampleQueue(
            answer=lambda group: answer(
                group, max_sequences=config.max_sequences, is_closed=self._closed.is_set
            ),
            thread=self._sampler,
            limits=GroupLimits(
                max_sequences=config.max_sequences,
                max_prompt_tokens=config.training.max_tokens_per_microbatch,
            ),
            gather_s=config.gather_s,
        )
        for thread in (self._learner, self._sampler):
            await thread.run(use_threads, config.num_threads)
        for base in config.bases:
            build = lambda base=base: base.build(  # noqa: E731
                training=config.training, cache=config.cache, device=self._device
            )
            opened = await self._learn(build)
            await self._learn(opened.load)
            self._bases[base.name] = opened
            self._plain[base.name] = SamplerWeights(base=opened, lora=None, trained={})

    async def close(self) -> None:
        """End both threads, after the call about a model that is under way and the samplers' next token."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._queue is not None:
            self._queue.close()
        for thread in (self._sampler, self._learner):
            if thread is not None:
                await asyncio.to_thread(thread.stop, timeout_s=self.config.close_timeout_s)
        for model in self._models.values():
            model.close()
        for held in (self._models, self._samplers, self._plain, self._bases):
            held.clear()

    # Checks

    def check_settings(self, settings: ModelSettings) -> None:
        base = self._base(settings.base_model)
        base.check_settings(settings, max_lora_rank=self.config.max_lora_rank)

    def check_data(self, settings: ModelSettings, data: Sequence[Datum], loss: LossCall) -> None:
        check_data(data, loss, self._base(settings.base_model).data_rules)

    def check_request(self, base_model: str, request: SampleRequest) -> None:
        check_request(self._base(base_model), request)

    # Models in training

    async def create_model(self, model_id: str, settings: ModelSettings) -> None:
        self.check_settings(settings)
        base = self._base(settings.base_model)

        def create() -> None:
            self._models[model_id] = LocalModel(base, settings, training=self.config.training)

        await self._learn(create)

    async def forward_backward(
        self, model_id: str, data: Sequence[Datum], loss: LossCall, *, backward: bool
    ) -> ForwardBackwardOutput:
        """Where the loss of a call with `backward` is not finite, it drops what earlier ones accumulated too,
        and the error says so."""
        return await self._learn(
            lambda: self._model(model_id).forward_backward(data, loss, backward=backward)
        )

    async def optim_step(self, model_id: str, params: AdamParams) -> OptimStepOutput:
        check_adam(params)
        return await self._learn(lambda: self._model(model_id).optim_step(params))

    async def drop_gradient(self, model_id: str) -> None:
        await self._learn(lambda: self._model(model_id).engine.drop_gradient())

    async def save_state(self, model_id: str, folder: Path) -> None:
        await self._learn(lambda: self._model(model_id).save_state(folder))

    async def load_state(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        await self._learn(lambda: self._model(model_id).load_state(folder, optimizer=optimizer))

    async def delete_model(self, model_id: str) -> None:
        def delete() -> None:
            self._model(model_id).close()
            del self._models[model_id]

        await self._learn(delete)

    # Samplers

    async def save_sampler(self, model_id: str, folder: Path) -> None:
        await self._learn(lambda: self._model(model_id).save_sampler(folder))

    async def take_snapshot(self, model_id: str, sampler_id: str) -> None:
        self._samplers[sampler_id] = await self._learn(lambda: self._model(model_id).snapshot())

    async def open_sampler(self, sampler_id: str, settings: ModelSettings, folder: Path | None) -> None:
        base = self._base(settings.base_model)
        if folder is None:
            self._samplers[sampler_id] = self._plain[settings.base_model]
        else:
            # Beside training, which it need not wait for.
            self._samplers[sampler_id] = await asyncio.to_thread(open_saved, base, settings, folder)

    async def close_sampler(self, sampler_id: str) -> None:
        """Requests that have been made hold its weights until they are answered."""
        if self._samplers.pop(sampler_id, None) is None:
            raise NotFoundError(f"there is no sampler {sampler_id!r}")

    async def sample(self, sampler_id: str, request: SampleRequest) -> SampleOutput:
        weights = self._samplers.get(sampler_id)
        if weights is None:
            raise NotFoundError(f"there is no sampler {sampler_id!r}")
        check_request(weights.base, request)
        assert self._queue is not None, "there is a sampler"
        return await self._queue.sample(Ask(weights=weights, request=request))

    # Turns

    async def _learn(self, function: Callable[[], ResultT]) -> ResultT:
        """In the learner's thread; not at all if nobody waits any more when its turn has come."""
        if self._learner is None:
            raise RuntimeError("the local backend was not started")
        cancelled = threading.Event()

        def turn() -> ResultT:
            if cancelled.is_set() or self._closed.is_set():
                raise RuntimeError("the local backend is closed, or nobody waits for this call")
            return function()

        if self._closed.is_set():
            raise RuntimeError("the local backend is closed")
        try:
            return await self._learner.run(turn)
        finally:
            cancelled.set()

    def _base(self, name: str) -> Base:
        found = self._bases.get(name)
        if found is None:
            raise InvalidRequestError(
                f"base_model={name!r}: must be one of {', '.join(self._bases) or 'none: it is not open'}"
            )
        return found

    def _model(self, model_id: str) -> LocalModel:
        found = self._models.get(model_id)
        if found is None:
            raise NotFoundError(f"there is no model {model_id!r}")
        return found
