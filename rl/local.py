"""Trainer, generator and publisher in this process on one device, without actors or vLLM.

The training engine and the model definition are the same; `rl.models.generate` samples. Published
weights are copies, so that the sampler never sees a half-finished step. Of LoRA the adapters alone
are published, and sampled beside their base.

    async with LocalBackend(config, spec=..., hf_assets_path=...) as local:
        await local.pull(await local.push())
        groups = await local.generate(prompts, sampling=...)
        await local.forward_backward(samples)
        await local.optim_step()

docs/scripts.md names the limits.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from rl.distributed.process_group import World
from rl.distributed.sharding import gather_whole
from rl.engine_client import EngineClient, FileUse, bind_method
from rl.models.decoder import find_persistent_buffers
from rl.models.draw_calls import DrawCall, DrawCalls, SharedDrawing
from rl.models.generate import PromptLogprobs, group_by_prompt
from rl.models.local_sampler import LocalSampler, Pushed
from rl.models.lora import LoRA
from rl.models.spec import ModelSpec
from rl.observability.spans import span
from rl.training.engine import TrainingEngine
from rl.training.merge import measure_merge
from rl.training.models_by_id import KEEPER, TrainedModels
from rl.types import BASE, RUN, Completion, PullResult, SamplingParams
from rl.utils.threads import WorkerThread

ResultT = TypeVar("ResultT")

GATHER_S = 0.005
"""Seconds that a call of `generate` waits for others to join it, where calls are gathered."""
SLICE_S = 0.25
"""Seconds that calls are drawn, where several owners share the sampler, before others that wait."""


class LocalBackend(EngineClient):
    """A `Trainer`, a `TokenGenerator` and a `Publisher`.

    The trainer's calls run one after another in one thread and the generator's in another, so that
    a loop can overlap them. A call that is cancelled while it is queued is never made. A call that
    is cancelled later returns at once: `generate` ends at its next token, and a call of the trainer
    runs to its end before the next one.
    """

    def __init__(
        self,
        config: TrainingEngine.Config,
        *,
        spec: ModelSpec,
        hf_assets_path: str | None,
        device: torch.device | str | None = None,
        models: bool = False,
        gathers: bool = False,
    ) -> None:
        """Take the arguments of `TrainingEngine`.

        Args:
            models: have models by id (`rl.training.models_by_id`), none at the start. Each call
                names the version to sample from, and `gathers` is set.
            gathers: answer calls of `generate` together that come within `GATHER_S`.

        Raises:
            ValueError: the engine refuses the config, or this process is one of several.
        """
        world = World.from_env()
        _check_alone(world)
        self._config = config
        self.threads = {"trainer": WorkerThread("trainer"), "generator": WorkerThread("generator")}
        self._closed = threading.Event()
        self._has_models = models
        self._gathers = models or gathers
        self._num_others = 0
        """Calls that wait for the generator's thread, or run there, besides `generate`."""
        self._numbers = itertools.count(1)
        if models:
            assert hf_assets_path is not None, "models by id start from one base"
            self.models = TrainedModels(
                config, spec=spec, hf_assets_path=hf_assets_path, device=device, world=world
            )
            self._spec, self._device = spec, self.models.device
        else:
            self.engine: TrainingEngine = config.build(
                model_spec=spec, hf_assets_path=hf_assets_path, device=device, world=world
            )
            self._spec, self._device = self.engine.policy.spec, self.engine.device
        self._calls = DrawCalls(
            spec=self._spec,
            hf_assets_path=hf_assets_path,
            max_tokens=config.training.max_tokens_per_microbatch,
        )
        self._dtype: torch.dtype = getattr(torch, config.training.param_dtype)
        self._served = PullResult()
        self.sampler = LocalSampler(self._spec, device=self._device, dtype=self._dtype)

    def find_engine(self, model_id: str) -> TrainingEngine:
        return self.engine if model_id == RUN else self.models[model_id]

    async def __aenter__(self) -> LocalBackend:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        self._closed.set()  # In the event loop's thread, so that no call is queued after the end.
        # In another thread, so that callers of running calls get their results meanwhile.
        await asyncio.shield(asyncio.to_thread(self.close))

    def close(self) -> None:
        """End both threads; idempotent.

        The trainer's running call ends first, and the generator's next token. Queued and later
        calls raise RuntimeError.
        """
        self._closed.set()
        for thread in self.threads.values():
            thread.stop(timeout_s=threading.TIMEOUT_MAX)
        (self.models if self._has_models else self.engine).close()

    async def _run_in(
        self, thread: str, name: str, function: Callable[..., ResultT], *args: Any
    ) -> ResultT:
        """Return the result of a function in a thread, unless the call is cancelled before."""
        self._check_open()

        def run() -> ResultT:
            self._check_open()  # The backend may have been closed while this was queued.
            with span(name):
                return function(*args)

        return await self.threads[thread].run(run)

    async def _run_beside_draws(
        self, name: str, function: Callable[..., ResultT], *args: Any
    ) -> ResultT:
        """Return the result of a function in the generator's thread, between two slices."""
        self._num_others += 1
        try:
            return await self._run_in("generator", name, function, *args)
        finally:
            self._num_others -= 1

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise RuntimeError("the local backend is closed")

    # TokenGenerator

    async def generate(
        self,
        prompts: Sequence[np.ndarray],
        *,
        sampling: SamplingParams,
        session: str | None = None,
        version: int | None = None,
    ) -> list[list[Completion]]:
        """See `TokenGenerator.generate`.

        Args:
            version: version to sample from, an adapter or the weights that are served (`switch`);
                None: the one that was pulled.

        Raises:
            ValueError: a prompt is empty or fills the context, a setting is out of range, or there
                are stop texts and no tokenizer.
            RuntimeError: no weights were published yet, or the backend is closed.
        """
        self._check_open()
        adapter = None if version is None else self.sampler.find_adapter(version)
        call = self._calls.create_call(prompts, sampling=sampling, adapter=adapter)
        try:
            if self._gathers:
                self._calls.waiting.append(call)
                # Also where no call can join, so that calls keep their order.
                await asyncio.sleep(GATHER_S)
            while not call.is_done:
                if call.group is None:
                    await self._run_in("generator", "generate", self._draw_first, call)
                else:
                    await self._draw_on(call.group)
        except BaseException:
            call.cancelled.set()
            raise
        finally:
            if self._gathers:
                self._calls.waiting.remove(call)
        if call.error is not None:
            raise call.error
        assert call.completions is not None
        return group_by_prompt(call.completions, sampling=call.sampling)

    async def _draw_on(self, group: SharedDrawing) -> None:
        """Wait for the next slice of a group that has paused; all its calls wait for the same."""
        # One job for all of them: with one each, a group of many calls would come up more often.
        if group.slice is None or group.slice.done():
            drawing = self._run_in("generator", "generate", self._draw, group)
            group.slice = asyncio.create_task(drawing, name="slice of a group of calls")
            # All calls may be cancelled, and then nobody asks for an error.
            group.slice.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(group.slice)

    def _draw_first(self, call: DrawCall) -> None:
        """Draw a call's completions, together with waiting calls that fit."""
        if self.sampler.weights is None:
            raise RuntimeError("no weights to sample from: await pull(await push()) first")
        # Another call of the group may have come before this one.
        if call.group is None and not call.is_done:
            self._draw(self._calls.group(call, newest=self.sampler.newest))

    def _draw(self, group: SharedDrawing) -> None:
        """Draw a group's completions; where several owners share the sampler, for a slice."""
        began_s, tokens = time.monotonic(), itertools.count()

        def pauses() -> bool:
            if self._closed.is_set():
                return True
            # Each slice has a token at least, however long it takes.
            return next(tokens) > 0 and self._must_pause(group, began_s=began_s)

        self.sampler.draw(group, pauses)
        self._check_open()  # `close` may have cut the completions short.

    def _must_pause(self, group: SharedDrawing, *, began_s: float) -> bool:
        # The one model of a run may get other weights in a pause; `switch` is not called then.
        if not self._has_models or time.monotonic() - began_s < SLICE_S:
            return False
        # A copy, because this thread reads what the event loop changes.
        waiting = tuple(self._calls.waiting)
        return self._num_others > 0 or any(call.group is not group for call in waiting)

    async def prompt_logprobs(
        self, prompt: np.ndarray, *, top_k: int = 0, version: int | None = None
    ) -> PromptLogprobs:
        """Return the logprobs of a prompt's tokens, and the most likely tokens in their places.

        `version` is that of `generate`.
        """
        compute = partial(self.sampler.prompt_logprobs, prompt, top_k=top_k, version=version)
        return await self._run_beside_draws("prompt_logprobs", compute)

    # Trainer: the methods of `EngineClient`

    async def call_engine(
        self,
        method: Callable[..., ResultT],
        *args: Any,
        model_id: str,
        files: FileUse | None = None,
        **options: Any,
    ) -> ResultT:
        """Call a method of the engine in the trainer's thread."""

        def call() -> ResultT:
            if files == "load":
                self.sampler.base = {}  # A checkpoint may have other weights beside its adapters.
            # The model is looked up in the thread, after the calls that may delete it.
            return bind_method(self.find_engine(model_id), method, *args, **options)()

        return await self._run_in("trainer", files or method.__name__, call)

    # Models by id

    async def create_model(self, model_id: str, lora: LoRA.Config | None) -> None:
        await self._run_in("trainer", "create_model", self.models.create, model_id, lora)

    async def delete_model(self, model_id: str) -> None:
        await self._run_in("trainer", "delete_model", self.models.delete, model_id)

    async def save_model(self, model_id: str, folder: str, *, optimizer: bool) -> None:
        save = partial(self.models.save, model_id, folder, optimizer=optimizer)
        await self._run_in("trainer", "save", save)

    async def load_model(self, model_id: str, folder: str, *, optimizer: bool) -> None:
        load = partial(self.models.load, model_id, folder, optimizer=optimizer)
        await self._run_in("trainer", "load", load)

    # Publisher

    async def push(self, *, model_id: str = RUN) -> int:
        """Copy the present weights, of LoRA the adapter alone, and return their version.

        The version of a run's weights is its policy version.
        """
        return await self._run_in("trainer", "push", self._push, model_id)

    def _push(self, model_id: str) -> int:
        engine = self.find_engine(model_id)
        version = engine.policy_version if model_id == RUN else next(self._numbers)
        served = engine.policy.served_lora
        lora, merge_lost = None, None
        if served is None:
            weights = engine.model_state_dict()
            merge_lost = measure_merge(engine.policy, state_dict=weights, dtype=self._dtype)
        else:
            lora, weights = served.config, engine.policy.adapter_state_dict()
            # Now, while the model that has it exists.
            self._copy_base(model_id)
        # Copies: the next step changes the weights while the sampler reads these.
        copies = self._cast(weights, engine, copy=True)
        pushed = self.sampler.pushed
        pushed.pop(version, None)  # A version that was loaded again moves to the end.
        num_bytes = sum(tensor.nbytes for tensor in copies.values())
        pushed[version] = Pushed(
            tensors=copies, lora=lora, num_bytes=num_bytes, merge_lost=merge_lost
        )
        return version

    def _copy_base(self, model_id: str) -> None:
        """Cast the weights beside a model's adapters, once."""
        if not self.sampler.base:
            engine = self.find_engine(model_id)
            # Models by id share weights that never change; those of a run may be loaded again.
            weights = engine.model_state_dict(merge=False)
            self.sampler.base = self._cast(weights, engine, copy=model_id == RUN)

    @torch.no_grad()
    def _cast(
        self, weights: Mapping[str, Tensor], engine: TrainingEngine, *, copy: bool
    ) -> dict[str, Tensor]:
        """Return weights in the dtype of forwards."""
        buffers = find_persistent_buffers(engine.policy.model)
        tensors: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            dtype = tensor.dtype if name in buffers else self._dtype
            tensors[name] = gather_whole(tensor).detach().to(self._device, dtype, copy=copy)
        return tensors

    async def forget(self, version: int) -> None:
        """Drop a version that no call names any more."""
        if self.sampler.pushed.pop(version).lora is not None:
            await self._run_beside_draws("forget", self.sampler.drop_adapter, version)

    def get_weights(self, version: int) -> int:
        """Return the weights that a version needs: itself, or of adapters `BASE`."""
        return self.sampler.get_weights(version)

    async def switch(self, weights: int) -> None:
        """Sample from whole weights that were pushed or from `BASE`; nothing is drawn meanwhile."""
        if weights == BASE and not self.sampler.base:
            await self._run_in("trainer", "push", self._copy_base, KEEPER)
        await self._run_beside_draws("pull", self.sampler.serve, weights)

    async def pull(self, policy_version: int) -> PullResult:
        """Sample from a pushed version in later calls of `generate`, and drop earlier ones.

        Raises:
            ValueError: the version was not pushed, or a later one is served.
        """
        pushed = self.sampler.pushed.get(policy_version)
        await self._run_in("generator", "pull", self.sampler.pull, policy_version)
        if pushed is not None:
            self._served = PullResult(num_bytes=pushed.num_bytes, merge_lost=pushed.merge_lost)
        return self._served


def _check_alone(world: World) -> None:
    if world.size > 1:
        raise ValueError(
            f"WORLD_SIZE={world.size}: a local backend is a single process; layouts of several "
            "are for the actors (python -m rl.train)"
        )
