"""The policy trainer: endpoints over the training engine, one actor a rank.

The engine computes in a thread of its own, call after call in the order in which the controller
made them, which collectives need to be the same on every rank. Meanwhile the actor answers, and
pushes weights. Only a call that changes weights waits for a running push.

Extend it by subclassing: a run spawns the class whose `Config(PolicyTrainer.Config)` its root
config holds.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from monarch.actor import Actor, concurrent_endpoint, endpoint
from torch import Tensor

from rl.config.configurable import Configurable
from rl.config.tree import check_bounds
from rl.distributed.process_group import World
from rl.models.spec import ModelSpec
from rl.observability.machine import MachineLimits, machine_limits
from rl.observability.spans import span
from rl.training.device_memory import use_growing_segments
from rl.training.engine import TrainingEngine
from rl.training.sleep import TrainerSleep
from rl.utils.processes import use_threads
from rl.utils.threads import WorkerThread
from rl.weights.store import Shard, WeightStore

logger = logging.getLogger(__name__)

T = TypeVar("T")

STOP_TIMEOUT_S = 10.0


def _on_engine(
    method: Callable[..., Any], *, span_name: str | None = None, changes_weights: bool = False
) -> Any:
    """Return the endpoint of an engine's method, with the same arguments; rank 0 answers, other
    ranks return None.
    """
    name = method.__name__

    @concurrent_endpoint
    @span(span_name or name)
    async def on_engine(
        self: PolicyTrainer, *args: Any, model_id: str | None = None, **options: Any
    ) -> Any:
        call = partial(getattr(self.engine_of(model_id), name), *args, **options)
        steps_early = name == "forward_backward" and self.config.optimizer.early_step_in_backward
        changes = changes_weights or steps_early
        answer = await (self._change_weights(call) if changes else self._compute(call))
        return answer if self._rank == 0 else None

    return on_engine


class PolicyTrainer(Actor, Configurable):
    """Every endpoint is called on all ranks with the same arguments."""

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
    ) -> None:
        """`failure_folder` receives the batch on which a loss was not finite."""
        use_threads(1)  # This is not the thread that computes.
        use_growing_segments()
        self.config = config
        self.model_spec = model_spec
        self.store = store
        self.failure_folder = failure_folder
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
        """The engine; raises RuntimeError while the trainer sleeps."""
        if self._turns.asleep:
            raise RuntimeError("the trainer is asleep: call wake first")
        return self._turns.engine

    def engine_of(self, model_id: str | None) -> TrainingEngine:
        assert model_id is None, "a run's trainer has no models by id"
        return self.engine

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

    forward_backward = _on_engine(TrainingEngine.forward_backward)
    forward = _on_engine(TrainingEngine.forward)
    drop_gradient = _on_engine(TrainingEngine.drop_gradient)
    optim_step = _on_engine(TrainingEngine.optim_step, changes_weights=True)
    compute_logprobs = _on_engine(TrainingEngine.compute_logprobs)
    compute_reference_logprobs = _on_engine(TrainingEngine.compute_reference_logprobs)
    save_checkpoint = _on_engine(TrainingEngine.save_checkpoint, span_name="save")
    load_checkpoint = _on_engine(
        TrainingEngine.load_checkpoint, span_name="load", changes_weights=True
    )
    export_hf = _on_engine(TrainingEngine.export_hf, span_name="export")
    save_adapter = _on_engine(TrainingEngine.save_adapter, span_name="export")

    @concurrent_endpoint
    @span("finish_saving")
    async def finish_saving(self) -> None:
        """Wait for a checkpoint that is being written in the background."""
        await self._compute(self.engine.checkpointer.wait)

    @concurrent_endpoint
    @span("push")
    async def push_model_state_dict(
        self, model_id: str | None = None, version: int | None = None
    ) -> Shard:
        """Put this rank's shards into the store under the current or the given version; not yet
        announced.

        The engine computes on meanwhile. Calls that change weights, made later, wait.
        """
        engine = self.engine_of(model_id)
        pushed: concurrent.futures.Future[None] = concurrent.futures.Future()

        def begin() -> tuple[int, dict[str, Tensor]]:
            # The weights as they are between two calls of the engine; collective where adapters are
            # merged.
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

    @concurrent_endpoint
    @span("measure")
    async def measure_machine(self, dtype: str, num_bytes: int) -> MachineLimits | None:
        """Measure the device of rank 0; other ranks return None, since they may share its cores."""
        if self._rank != 0:
            return None
        device = World.from_env().default_device()
        measure = partial(machine_limits, dtype=dtype, num_bytes=num_bytes, device=device)
        return await self._compute(measure)

    @concurrent_endpoint
    @span("sleep")
    async def sleep(self) -> int:
        """Leave the device to another role and return the freed bytes; raise ValueError with an
        accumulated gradient.

        Until `wake`, every other endpoint but `close` raises.
        """
        return await self._change_weights(self._turns.sleep)

    @concurrent_endpoint
    @span("wake")
    async def wake(self) -> int:
        """Return to the device, bit for bit; return the moved bytes."""
        return await self._compute(self._turns.wake)

    @concurrent_endpoint
    @span("close")
    async def close(self) -> None:
        await self._compute(self._close)

    async def __cleanup__(self, exc: Exception | None) -> None:
        # A thread that is still computing when the interpreter ends would abort the process.
        if not await asyncio.to_thread(self._thread.stop, timeout_s=STOP_TIMEOUT_S):
            logger.warning("the engine's thread was still busy %g s after the end", STOP_TIMEOUT_S)

    async def _compute(self, function: Callable[..., T], *args: object) -> T:
        return await self._thread.run(function, *args)

    async def _change_weights(self, function: Callable[..., T], *args: object) -> T:
        # The engine's thread waits, not this one: what is asked for next stays behind it.
        def change() -> T:
            if pushes := list(self._pushes):
                with span("waits for a push"):
                    concurrent.futures.wait(pushes)  # each has a deadline
            return function(*args)

        return await self._compute(change)

    def _setup(self, hf_assets_path: str) -> None:
        world = World.from_env()
        self._rank = world.rank
        if world.size != self.config.num_procs:
            raise ValueError(
                f"trainer.num_procs={self.config.num_procs}, but this actor runs on {world.size} "
                "processes: spawn it on a mesh of num_procs processes after "
                "setup_process_group_env, or change num_procs"
            )
        use_threads(self.config.num_threads)
        if self.model_spec.batch_invariant and torch.cuda.is_available():
            from actors.vllm.compat import use_vllms_kernels

            use_vllms_kernels()
        self._open(hf_assets_path)

    def _open(self, hf_assets_path: str) -> None:
        self._turns = TrainerSleep(self.make_engine(hf_assets_path))
        num_bytes = sum(t.nbytes for t in self.engine.model_state_dict().values())
        logger.info(
            "ready: %s %s, %.3g GB", self.model_spec.name, self.model_spec.flavor, num_bytes / 1e9
        )

    def _close(self) -> None:
        self._turns.engine.close()
