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
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from monarch.actor import Actor, Endpoint, concurrent_endpoint, endpoint
from torch import Tensor

from rl.config.configurable import Configurable, unless
from rl.config.tree import check_bounds
from rl.distributed.process_group import World
from rl.engine_client import EngineClient, FileUse, bind_method
from rl.models.spec import ModelSpec
from rl.observability.machine import MachineLimits, measure_limits
from rl.observability.spans import span
from rl.training.checks import find_thread_check
from rl.training.device_memory import use_growing_segments
from rl.training.engine import TrainingEngine
from rl.training.merge import measure_merge
from rl.training.sleep import TrainerSleep
from rl.types import BASE, RUN
from rl.utils.load import ComputeThreads
from rl.utils.processes import use_threads
from rl.utils.threads import WorkerThread
from rl.weights.checksum import digest_tensors, load_kernel
from rl.weights.store import Shard, WeightStore, get_rank
from rl.weights.types import AdapterInfo

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")

STOP_TIMEOUT_S = 10.0
_CHANGES_WEIGHTS = (TrainingEngine.optim_step, TrainingEngine.load_checkpoint)
"""Methods that wait for a push that is under way."""
_SAME_ON_ONE_THREAD = (
    TrainingEngine.forward_backward,
    TrainingEngine.forward,
    TrainingEngine.compute_logprobs,
    TrainingEngine.compute_reference_logprobs,
)
"""Methods whose number of threads may follow the load. An optimizer's step sums over whole tensors,
whose bits depend on it."""


def serve_method(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], *, span_name: str = ""
) -> Endpoint[P, T]:
    """Return the endpoint of a client's method, which `call_engine` answers in the actor.

    Rank 0 answers, other ranks return None.
    """
    served: Endpoint[P, T] = concurrent_endpoint(span(span_name or method.__name__)(method))
    return served


class PolicyTrainer(Actor, Configurable):
    """Actor of one trainer rank.

    Every endpoint is called on all ranks with the same arguments; rank 0 answers.

    Example:
        >>> arguments = {"config": config, "model_spec": spec, "store": store}
        >>> trainer = mesh.spawn("trainer", PolicyTrainer, **arguments)
        >>> await trainer.setup.call("outputs/starting_points/qwen3-tiny")
        >>> await trainer.forward_backward.call(samples, loss=GRPOLoss())
        >>> await trainer.optim_step.call()
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TrainingEngine.Config):
        """Settings of the engine, and of the processes that it runs in."""

        num_procs: int = 1
        """Ranks; the degrees of `parallelism` multiply to it."""
        num_threads: int = 1
        """CPU threads of each rank."""
        follow_load: bool = field(default=True, metadata=unless("num_threads", 1))
        """Compute gradients with one thread while other processes take the cores of a CPU; in the
        batch-invariant mode alone, after a test that results are the same."""

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
        self._base_part: int | None = None
        """This rank's part of the checksum of the weights beside adapters, once it is known."""
        self._rank: int | None = None
        """Known from `setup` on."""
        self._sleep: TrainerSleep | None = None
        """The engine and its sleep, from `setup` on."""
        self._threads: ComputeThreads | None = None
        """Made by `setup`, which knows the number of ranks."""

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
        if self._require_engine().asleep:
            raise RuntimeError("the trainer is asleep: call wake first")
        return self._require_engine().engine

    def find_engine(self, model_id: str) -> TrainingEngine:
        assert model_id == RUN, "a run's trainer has no models by id"
        return self.engine

    @property
    def policy_version(self) -> int | None:
        """Policy version of the weights, which spans record; None before `setup`."""
        return None if self._sleep is None else self._sleep.engine.policy_version

    @endpoint
    @span("setup")
    async def setup(self, hf_assets_path: str) -> None:
        """Make the engine from a Hugging Face folder."""
        await self._compute(self._setup, hf_assets_path)

    # Methods of the engine. A subclass changes them in an engine of its own (`make_engine`).
    forward_backward = serve_method(EngineClient.forward_backward)
    forward = serve_method(EngineClient.forward)
    drop_gradient = serve_method(EngineClient.drop_gradient)
    optim_step = serve_method(EngineClient.optim_step)
    compute_logprobs = serve_method(EngineClient.compute_logprobs)
    compute_reference_logprobs = serve_method(EngineClient.compute_reference_logprobs)
    save_checkpoint = serve_method(EngineClient.save_checkpoint, span_name="save")
    load_checkpoint = serve_method(EngineClient.load_checkpoint, span_name="load")
    export_hf = serve_method(EngineClient.export_hf, span_name="export")
    save_adapter = serve_method(EngineClient.save_adapter, span_name="export")

    async def call_engine(
        self,
        method: Callable[..., T],
        *args: Any,
        model_id: str,
        files: FileUse | None = None,
        **options: Any,
    ) -> T | None:
        """Call a method of the engine in its thread; see `EngineClient.call_engine`."""
        call = bind_method(self.find_engine(model_id), method, *args, **options)
        steps_early = (
            method == TrainingEngine.forward_backward
            and self.config.optimizer.early_step_in_backward
        )
        if method in _SAME_ON_ONE_THREAD and not steps_early:
            num_tokens = 0
            # Other calls take other times for a token, and a rank beside others takes theirs.
            if method == TrainingEngine.forward_backward and self.config.num_procs == 1:
                num_tokens = sum(len(sample.token_ids) for sample in args[0])
            call = partial(self._follow_load, call, num_tokens)
        if method == TrainingEngine.load_checkpoint:
            call = partial(self._load_other_base, call)
        # A push copies the weights while the engine computes on: they must stay as they are.
        if steps_early or method in _CHANGES_WEIGHTS:
            answer = await self._change_weights(call)
        else:
            answer = await self._compute(call)
        # All ranks have the same results, and each answer is copied between processes.
        return answer if self._rank == 0 else None

    @concurrent_endpoint
    @span("finish_saving")
    async def finish_saving(self) -> None:
        """Wait for a checkpoint that is being written in the background."""
        await self._compute(self.engine.checkpointer.wait)

    @concurrent_endpoint
    @span("push")
    async def push_model_state_dict(self, model_id: str = RUN, version: int | None = None) -> Shard:
        """Put this rank's shards into the store under the current or the given version.

        The tensors are those between two calls of the engine, which computes on while they are
        copied. Calls that change weights, made later, wait. The version is not announced yet. Of a
        model with adapters that generators serve beside its base, only they are pushed; `BASE` as
        the version pushes the base.
        """
        engine = self.find_engine(model_id)
        pushed: concurrent.futures.Future[None] = concurrent.futures.Future()

        def begin() -> tuple[int, dict[str, Tensor], AdapterInfo | None, float | None]:
            # The weights as they are between two calls of the engine; collective where adapters are
            # merged.
            merge_lost: float | None = None
            adapter: AdapterInfo | None = None
            lora = engine.policy.served_lora
            if version == BASE:
                state_dict = engine.model_state_dict(merge=False)
            elif lora is not None:
                state_dict = engine.policy.adapter_state_dict()
                adapter = AdapterInfo(lora=lora.config, base_id=self._find_base_part(engine))
            else:
                state_dict = engine.model_state_dict()
                dtype = getattr(torch, self.store.dtype)
                merge_lost = measure_merge(engine.policy, state_dict=state_dict, dtype=dtype)
            self._pushes.add(pushed)
            number = engine.policy_version if version is None else version
            return number, state_dict, adapter, merge_lost

        number, state_dict, adapter, merge_lost = await self._compute(begin)
        try:
            shard = await self.store.push(
                version=number,
                state_dict=state_dict,
                buffer_names=engine.buffer_names(),
                adapter=adapter,
            )
            return replace(shard, merge_lost=merge_lost)
        finally:
            # Also after an error: the next change of the weights would wait forever.
            self._pushes.discard(pushed)
            pushed.set_result(None)

    def _load_other_base(self, load: Callable[[], T]) -> T:
        # In the engine's thread, where pushes before and after the load look at it.
        self._base_part = None
        return load()

    def _find_base_part(self, engine: TrainingEngine) -> int:
        # Nothing but a checkpoint changes frozen weights.
        if self._base_part is None:
            self._base_part = digest_tensors(
                engine.model_state_dict(merge=False),
                dtype=getattr(torch, self.store.dtype),
                buffer_names=engine.buffer_names(),
                rank=get_rank(),
            )
        return self._base_part

    @concurrent_endpoint
    @span("measure")
    async def measure_machine(self, dtype: str, num_bytes: int) -> MachineLimits | None:
        """Measure the device of rank 0; other ranks return None, since they may share its cores."""
        if self._rank != 0:
            return None
        device = World.from_env().default_device()
        measure = partial(measure_limits, dtype=dtype, num_bytes=num_bytes, device=device)
        return await self._compute(measure)

    @concurrent_endpoint
    @span("sleep")
    async def sleep(self) -> int:
        """Leave the device to another role; return the freed bytes.

        Raises ValueError if a gradient is accumulated. Until `wake`, every other endpoint but
        `close` raises.
        """
        return await self._change_weights(self._require_engine().sleep)

    @concurrent_endpoint
    @span("wake")
    async def wake(self) -> int:
        """Return to the device, bit for bit; return the moved bytes."""
        return await self._compute(self._require_engine().wake)

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
            pushes = list(self._pushes)
            if pushes:
                with span("waits for a push"):
                    concurrent.futures.wait(pushes)  # each has a deadline
            return function(*args)

        return await self._compute(change)

    def _follow_load(self, call: Callable[[], T], num_tokens: int) -> T:
        assert self._threads is not None, "made by setup"
        with self._threads.work(num_tokens):
            return call()

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
        self._threads = self._make_threads(world)
        # Only a trainer that computes with vLLM's kernels imports vLLM.
        if self.model_spec.batch_invariant and torch.cuda.is_available():
            from actors.vllm.compat import use_vllms_kernels

            use_vllms_kernels()
        self._open(hf_assets_path)
        # Now, while generators still start, and not in the first push and the first step.
        self._load_kernels()

    def _make_threads(self, world: World) -> ComputeThreads:
        is_safe = None
        if self.config.follow_load:
            is_safe = find_thread_check(
                self.config,
                spec=self.model_spec,
                world=world,
                num_threads=self.config.num_threads,
            )
        return ComputeThreads(self.config.num_threads, is_safe=is_safe)

    def _open(self, hf_assets_path: str) -> None:
        self._sleep = TrainerSleep(self.make_engine(hf_assets_path))
        num_bytes = sum(t.nbytes for t in self.engine.model_state_dict().values())
        logger.info(
            "ready: %s %s, %.3g GB", self.model_spec.name, self.model_spec.flavor, num_bytes / 1e9
        )

    def _load_kernels(self) -> None:
        if torch.cuda.is_available():
            return
        load_kernel()
        if self.model_spec.batch_invariant:
            # Imported here, because only this mode needs them.
            from rl.models.batch_invariant.functions import load_kernels

            load_kernels()

    def _close(self) -> None:
        self._require_engine().engine.close()

    def _require_engine(self) -> TrainerSleep:
        if self._sleep is None:
            raise RuntimeError("the trainer is not set up: call setup first")
        return self._sleep
