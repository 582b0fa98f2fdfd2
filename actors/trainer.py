"""The policy trainer: endpoints over the training engine, one actor a rank.

The engine computes in a thread of its own, call after call in the order in which the controller
made them: so the same on every rank, as their collectives need it. Meanwhile the actor answers,
and pushes weights. Only what changes weights waits for a push that is going on.

Extend it by subclassing: a subclass with its own `Config(PolicyTrainer.Config)` is what a
run spawns when its root config holds one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from monarch.actor import Actor, concurrent_endpoint, endpoint
from torch import Tensor

from losses.types import Loss
from rl.config.configurable import Configurable
from rl.config.tree import check_bounds
from rl.distributed.process_group import World
from rl.distributed.runtime import use_threads
from rl.models.converter import ModelConverter
from rl.models.spec import ModelSpec
from rl.observability.machine_limits import MachineLimits, machine_limits
from rl.observability.spans import span
from rl.training.config import Dtype
from rl.training.engine import TrainingEngine
from rl.training.sleep import TrainerSleep
from rl.types import (
    RUN,
    ForwardBackwardResult,
    LoopPosition,
    OptimParams,
    OptimStepResult,
    TrainingSample,
)
from rl.utils.threads import WorkerThread
from rl.weights.store import Shard, WeightStore
from rl.weights.types import WeightTimeoutError

logger = logging.getLogger(__name__)

T = TypeVar("T")

STOP_TIMEOUT_S = 10.0
PUSH_MARGIN_S = 10.0
"""Time for a push that has reached its deadline to end."""


class PolicyTrainer(Actor, Configurable):
    """Every endpoint is called on all ranks with the same arguments; results are the same too."""

    @dataclass(kw_only=True, slots=True)
    class Config(TrainingEngine.Config):
        num_procs: int = 1
        """Ranks; the degrees of `parallelism` multiply to it."""
        num_threads: int = 1
        """CPU threads of each rank."""

        def __post_init__(self) -> None:
            check_bounds(self, "num_procs", "num_threads", at_least=1)

    def __init__(
        self,
        *,
        config: Config,
        model_spec: ModelSpec,
        store: WeightStore,
        failure_folder: str | None = None,
        models: Callable[..., Any] | None = None,
    ) -> None:
        """
        Args:
            failure_folder: receives the batch on which a loss was not finite.
            models: `rl.training.models.TrainedModels`, for models by id; None for the one model of a run.
        """
        use_threads(1)  # This is not the thread that computes.
        self.config = config
        self.model_spec = model_spec
        self.store = store
        self.failure_folder = failure_folder
        self._make_models = models
        self._thread = WorkerThread("training-engine")
        self._pushes: set[concurrent.futures.Future[None]] = set()
        """Pushes that are going on: the weights must not change until they are done."""

    def make_engine(self, hf_assets_path: str) -> TrainingEngine:
        """Join the process group, build the model in its layout and load the folder's weights."""
        return TrainingEngine(
            config=self.config,
            model_spec=self.model_spec,
            hf_assets_path=hf_assets_path,
            failure_folder=self.failure_folder,
        )

    @property
    def engine(self) -> TrainingEngine:
        """Raises RuntimeError while the trainer sleeps: its tensors have no memory then."""
        if self._turns.asleep:
            raise RuntimeError("the trainer is asleep: call wake first")
        return self._turns.engine

    def _engine(self, model_id: str) -> TrainingEngine:
        return self.engine if model_id == RUN else self._models[model_id]

    @property
    def policy_version(self) -> int | None:
        """Policy version of the weights, which spans record; None before `setup`."""
        turns: TrainerSleep | None = getattr(self, "_turns", None)
        return None if turns is None else turns.engine.policy_version

    @endpoint
    @span("setup")
    async def setup(self, hf_assets_path: str) -> None:
        """Make the engine from a Hugging Face folder."""
        await self._compute(self._setup, hf_assets_path)

    @concurrent_endpoint
    @span("forward_backward")
    async def forward_backward(
        self,
        samples: Sequence[TrainingSample],
        loss: Loss | None = None,
        return_logprobs: bool | Sequence[int] = False,
        model_id: str = RUN,
    ) -> ForwardBackwardResult:
        """Logprobs are in the answer of rank 0."""
        add = partial(self._engine(model_id).forward_backward, loss=loss, return_logprobs=return_logprobs)
        result = await self._compute(add, samples)
        return result if self._rank == 0 else replace(result, logprobs=None)

    @concurrent_endpoint
    @span("forward")
    async def forward(
        self, samples: Sequence[TrainingSample], loss: Loss | None = None, model_id: str = RUN
    ) -> ForwardBackwardResult:
        """Return what `forward_backward` with logprobs would return, without changing the gradient."""
        result = await self._compute(partial(self._engine(model_id).forward, loss=loss), samples)
        return result if self._rank == 0 else replace(result, logprobs=None)

    @concurrent_endpoint
    @span("drop_gradient")
    async def drop_gradient(self, model_id: str = RUN) -> None:
        """Forget what was accumulated since the last step."""
        await self._compute(self._engine(model_id).drop_gradient)

    @concurrent_endpoint
    @span("optim_step")
    async def optim_step(
        self, params: OptimParams | None = None, allow_empty: bool = False, model_id: str = RUN
    ) -> OptimStepResult:
        step = partial(self._engine(model_id).optim_step, allow_empty=allow_empty)
        return await self._change_weights(step, params)

    @concurrent_endpoint
    @span("compute_logprobs")
    async def compute_logprobs(
        self, samples: Sequence[TrainingSample], model_id: str = RUN
    ) -> list[np.ndarray]:
        """Rank 0 answers; the others take part and answer nothing."""
        logprobs = await self._compute(self._engine(model_id).compute_logprobs, samples)
        return logprobs if self._rank == 0 else []

    @concurrent_endpoint
    @span("compute_reference_logprobs")
    async def compute_reference_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Return logprobs as `compute_logprobs` does, under the frozen reference policy."""
        logprobs = await self._compute(self.engine.compute_reference_logprobs, samples)
        return logprobs if self._rank == 0 else []

    @concurrent_endpoint
    @span("save")
    async def save_checkpoint(
        self,
        folder: str,
        position: LoopPosition | None = None,
        model_only: bool = False,
        wait: bool = True,
    ) -> None:
        save = partial(
            self.engine.save_checkpoint,
            position=position,
            model_only=model_only,
            wait=wait,
        )
        await self._compute(save, folder)

    @concurrent_endpoint
    @span("finish_saving")
    async def finish_saving(self) -> None:
        """Wait for a checkpoint that is being written in the background."""
        await self._compute(self.engine.checkpointer.wait)

    @concurrent_endpoint
    @span("load")
    async def load_checkpoint(
        self, folder: str, model_only: bool = False, exclude: Sequence[str] | None = None
    ) -> int:
        load = partial(self.engine.load_checkpoint, model_only=model_only, exclude=exclude)
        return await self._change_weights(load, folder)

    @concurrent_endpoint
    @span("export")
    async def export_hf(self, folder: str, dtype: Dtype | None = None) -> None:
        await self._compute(partial(self.engine.export_hf, dtype=dtype), folder)

    @concurrent_endpoint
    @span("export")
    async def save_adapter(self, folder: str) -> None:
        await self._compute(self.engine.save_adapter, folder)

    @concurrent_endpoint
    @span("push")
    async def push_model_state_dict(self, model_id: str = RUN, version: int | None = None) -> Shard:
        """Put this rank's shards into the store under the current or the given version; not yet announced.

        The engine computes on meanwhile. Calls that change weights, made later, wait.
        """
        engine = self._engine(model_id)
        pushed: concurrent.futures.Future[None] = concurrent.futures.Future()

        def begin() -> tuple[int, dict[str, Tensor]]:
            # The weights as they are between two calls of the engine; collective where adapters are merged.
            state_dict = engine.model_state_dict()
            self._pushes.add(pushed)
            return engine.policy_version if version is None else version, state_dict

        number, state_dict = await self._compute(begin)
        try:
            return await self.store.push(
                version=number, state_dict=state_dict, buffer_names=engine.buffer_names()
            )
        finally:
            self._pushes.discard(pushed)
            pushed.set_result(None)

    # Models by id

    @concurrent_endpoint
    @span("create_model")
    async def create_model(self, model_id: str, lora: ModelConverter.Config | None) -> None:
        await self._compute(self._models.create, model_id, lora)

    @concurrent_endpoint
    @span("delete_model")
    async def delete_model(self, model_id: str) -> None:
        await self._change_weights(self._models.delete, model_id)

    @concurrent_endpoint
    @span("save")
    async def save_model(self, model_id: str, folder: str, optimizer: bool) -> None:
        await self._compute(partial(self._models.save, optimizer=optimizer), model_id, folder)

    @concurrent_endpoint
    @span("load")
    async def load_model(self, model_id: str, folder: str, optimizer: bool) -> None:
        await self._change_weights(partial(self._models.load, optimizer=optimizer), model_id, folder)

    @concurrent_endpoint
    @span("measure")
    async def measure_machine(self, dtype: str, num_bytes: int) -> MachineLimits | None:
        """Measure the device of rank 0; other ranks return None, since they may share its cores."""
        if self._rank != 0:
            return None
        device = World.from_env().default_device()
        measure = partial(machine_limits, dtype=dtype, num_bytes=num_bytes, device=device)
        return await self._compute(measure)

    # Devices that several roles share

    @concurrent_endpoint
    @span("sleep")
    async def sleep(self) -> int:
        """Leave the device to somebody else; until `wake`, every other endpoint but `close` raises.

        Returns:
            Bytes that this rank freed there.

        Raises:
            ValueError: a gradient is accumulated.
        """
        return await self._change_weights(self._turns.sleep)

    @concurrent_endpoint
    @span("wake")
    async def wake(self) -> int:
        """Come back, bit for bit; returns the bytes that this rank moved."""
        return await self._compute(self._turns.wake)

    @concurrent_endpoint
    @span("close")
    async def close(self) -> None:
        await self._compute(self._models.close if self._make_models else self._turns.engine.close)

    async def __cleanup__(self, exc: Exception | None) -> None:
        # A thread that is still computing when the interpreter ends would abort the process.
        if not await asyncio.to_thread(self._thread.stop, timeout_s=STOP_TIMEOUT_S):
            logger.warning("the engine's thread was still busy %g s after the end", STOP_TIMEOUT_S)

    async def _compute(self, function: Callable[..., T], *args: object) -> T:
        """Run a function in the engine's thread, after all earlier calls."""
        return await self._thread.run(function, *args)

    async def _change_weights(self, function: Callable[..., T], *args: object) -> T:
        # The engine's thread waits, not this one: what is asked for next stays behind it.
        def change() -> T:
            wait_for_pushes(self._pushes, limit_s=self.store.config.timeout_s)
            return function(*args)

        return await self._compute(change)

    def _setup(self, hf_assets_path: str) -> None:
        world = World.from_env()
        self._rank = world.rank
        if world.size != self.config.num_procs:
            raise ValueError(
                f"trainer.num_procs={self.config.num_procs}, but this actor runs on {world.size} processes: spawn "
                "it on a mesh of num_procs processes after setup_process_group_env, or change num_procs"
            )
        use_threads(self.config.num_threads)
        if self.model_spec.batch_invariant and torch.cuda.is_available():
            from actors.vllm.compat import use_vllms_kernels

            use_vllms_kernels()
        if self._make_models is not None:
            self._models = self._make_models(self.config, spec=self.model_spec, hf_assets_path=hf_assets_path)
            return
        self._turns = TrainerSleep(self.make_engine(hf_assets_path))
        num_bytes = sum(t.nbytes for t in self.engine.model_state_dict().values())
        logger.info("ready: %s %s, %.3g GB", self.model_spec.name, self.model_spec.flavor, num_bytes / 1e9)


def wait_for_pushes(pushes: Collection[concurrent.futures.Future[None]], *, limit_s: float) -> None:
    """Wait until the pushes are done, each of which has a deadline of `limit_s`.

    Raises:
        WeightTimeoutError: a push takes longer.
    """
    if pushes:
        with span("waits for a push"):
            late = concurrent.futures.wait(list(pushes), timeout=limit_s + PUSH_MARGIN_S).not_done
        if late:
            raise WeightTimeoutError(
                f"the weights cannot change: a push of them did not end within {limit_s:g} s"
            )
