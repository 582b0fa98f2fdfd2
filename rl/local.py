"""Trainer, generator and publisher in this process on one device, without actors or vLLM.

The training engine and the model definition are the same; `rl.models.generate` samples. Published
weights are copies, so that the sampler never sees a half-finished step.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from rl.distributed.mesh import ParallelismConfig
from rl.distributed.process_group import World
from rl.distributed.sharding import gather_whole
from rl.engine_client import EngineClient, FileUse, bind_method
from rl.models.batch_invariant.model import make_batch_invariant
from rl.models.converter import ModelConverters
from rl.models.decoder import Decoder, find_persistent_buffers, reset_buffers
from rl.models.draw_calls import DrawCall, DrawCalls
from rl.models.generate import (
    DivergedWeightsError,
    Interrupted,
    PromptLogprobs,
    group_by_prompt,
    prompt_logprobs,
)
from rl.models.lora import LoRA
from rl.models.spec import ModelSpec
from rl.observability.spans import span
from rl.training.engine import TrainingEngine
from rl.training.merge import measure_merge
from rl.training.models_by_id import TrainedModels
from rl.types import RUN, Completion, PullResult, SamplingParams
from rl.utils.threads import WorkerThread

ResultT = TypeVar("ResultT")

GATHER_S = 0.005
"""Seconds that a call of `generate` waits for others to join it, where calls are gathered."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Pushed:
    """A version of the weights that can be served."""

    lora: LoRA.Config | None
    """Settings of an adapter that is not merged."""
    tensors: dict[str, Tensor]
    """Copies of the weights; of an adapter, whose base is shared, without the base's."""
    merge_lost: float | None
    """As in `PullResult`."""


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
            models: have models by id (`rl.training.models_by_id`), none at the start. Published
                adapters are not merged, and `gathers` is set.
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
        self.num_sequences = 0
        """Sequences that several owners of models draw at once: the sampler draws one group after
        another.
        """
        self._num_interruptions = 0
        self._pushed: dict[int, _Pushed] = {}
        """Versions in the order of the pushes."""
        self._numbers = itertools.count(1)
        self._served_version: int | None = None
        self._served = PullResult()
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
        self._frozen: dict[str, Tensor] = {}
        """The base's weights in the dtype of forwards, shared by all adapters."""
        self._lora: LoRA.Config | None = None
        self._model = self._make_model(None)

    def _make_model(self, lora: LoRA.Config | None) -> Decoder:
        """Return a model to sample from, whose parameters have no memory."""
        spec, converters = self._spec, () if lora is None else (lora,)
        with torch.device("meta"):
            model: Decoder = spec.model.build()
            make_batch_invariant(model, spec=spec, device=self._device)
            model.float32_head = spec.float32_head
            degrees = ParallelismConfig().resolve_degrees(1)
            ModelConverters(converters, spec=spec, degrees=degrees, device=self._device).convert(
                model
            )
        # Parameters come with the first served weights; buffers such as tables of RoPE do not.
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty_like(buffer, device=self._device))
        reset_buffers(model)
        return model.requires_grad_(False)

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

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise RuntimeError("the local backend is closed")

    # TokenGenerator

    async def generate(
        self, prompts: Sequence[np.ndarray], *, sampling: SamplingParams, session: str | None = None
    ) -> list[list[Completion]]:
        """See `TokenGenerator.generate`.

        Raises:
            ValueError: a prompt is empty or fills the context, a setting is out of range, or there
                are stop texts and no tokenizer.
            RuntimeError: no weights were published yet, or the backend is closed.
        """
        done = await self.generate_in_turns(prompts, sampling=sampling)
        # An interruption gives another owner a turn; this call goes on after it.
        while isinstance(done, Interrupted):
            done = await done.resume()
        return done

    async def generate_in_turns(
        self, prompts: Sequence[np.ndarray], *, sampling: SamplingParams
    ) -> list[list[Completion]] | Interrupted[list[list[Completion]]]:
        """Generate like `generate`, or until `interrupt` return what is left to do."""
        self._check_open()
        return await self._go_on(self._calls.create_call(prompts, sampling=sampling))

    async def interrupt(self) -> None:
        """Let the calls of `generate_in_turns` that are under way return at their next token."""
        self._num_interruptions += 1

    async def _go_on(
        self, call: DrawCall
    ) -> list[list[Completion]] | Interrupted[list[list[Completion]]]:
        """Draw a call's completions from where it is."""
        interruption, num_tokens = self._num_interruptions, call.num_drawn
        try:
            if self._gathers:
                self._calls.waiting.append(call)
                # Also where no call can join, so that calls keep their order.
                await asyncio.sleep(GATHER_S)
            await self._run_in("generator", "generate", self._answer, call, interruption)
        except BaseException:
            call.cancelled.set()
            raise
        finally:
            if self._gathers:
                self._calls.waiting.remove(call)
        if call.completions is None:
            return Interrupted(
                resume=partial(self._go_on, call), has_advanced=call.num_drawn > num_tokens
            )
        return group_by_prompt(call.completions, sampling=call.sampling)

    def _answer(self, call: DrawCall, interruption: int) -> None:
        """Draw a call's completions until an interruption.

        Waiting calls that fit are drawn together with it.
        """
        if self._served_version is None:
            raise RuntimeError("no weights to sample from: await pull(await push()) first")
        # It may have been interrupted while it was queued behind others.
        is_interrupted = self._num_interruptions != interruption
        if call.completions is None and call.error is None and not is_interrupted:
            group = call.group or self._calls.group(call)

            def pauses() -> bool:
                is_stopped = self._closed.is_set() or not group.is_wanted
                return is_stopped or self._num_interruptions != interruption

            try:
                if group.drawing.draw(self._model, pauses):
                    group.finish(group.drawing.collect_completions(self._served_version))
            except DivergedWeightsError as error:
                # Each of them gets the error when its own turn comes.
                for member in group.calls:
                    member.error = error
            self._check_open()  # `close` may have cut the completions short.
        if call.error is not None:
            raise call.error

    async def prompt_logprobs(self, prompt: np.ndarray, *, top_k: int = 0) -> PromptLogprobs:
        """Return the logprobs of a prompt's tokens, and the most likely tokens in their places."""

        def compute() -> PromptLogprobs:
            return prompt_logprobs(self._model, prompt, top_k=top_k)

        return await self._run_in("generator", "prompt_logprobs", compute)

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
        """Copy the present weights, and return their version.

        The version of a run's weights, whose adapters are merged, is its policy version.
        """
        return await self._run_in("trainer", "push", self._push, model_id)

    def _push(self, model_id: str) -> int:
        engine = self.find_engine(model_id)
        buffers = find_persistent_buffers(engine.policy.model)
        lora: LoRA.Config | None = None
        merge_lost: float | None = None
        if model_id == RUN:
            version, weights = engine.policy_version, engine.model_state_dict()
            merge_lost = measure_merge(engine.policy, state_dict=weights, dtype=self._dtype)
        else:
            version, weights = next(self._numbers), dict(engine.policy.trained_parameters) | buffers
            lora = self.models.lora(model_id)
        # Copies: the next step changes the weights while the sampler reads these.
        copies: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, tensor in weights.items():
                dtype = tensor.dtype if name in buffers else self._dtype
                copies[name] = gather_whole(tensor).detach().to(self._device, dtype, copy=True)
        self._pushed.pop(version, None)  # A version that was loaded again moves to the end.
        self._pushed[version] = _Pushed(lora=lora, tensors=copies, merge_lost=merge_lost)
        return version

    async def forget(self, version: int) -> None:
        del self._pushed[version]

    async def pull(self, policy_version: int) -> PullResult:
        """Sample from a pushed version in later calls of `generate`; a run drops earlier versions.

        Raises:
            ValueError: the version was not pushed, or a later one is served.
        """
        await self._run_in("generator", "pull", self._pull, policy_version)
        return self._served

    def _pull(self, policy_version: int) -> None:
        versions = list(self._pushed)
        if policy_version not in versions:
            if policy_version == self._served_version:
                return
            raise ValueError(
                f"policy_version={policy_version} was not pushed, or a later push is served: "
                f"served is {self._served_version}, pushed since {versions}"
            )
        pushed = self._pushed[policy_version]
        lora, tensors = pushed.lora, pushed.tensors
        # Without adapters, or with others, the sampled model has other modules.
        if lora != self._lora:
            self._model, self._lora = self._make_model(lora), lora
        if lora is not None:
            # Cast once: all adapters share the base's frozen weights.
            for name, tensor in list(self.models.frozen.items()):
                if name not in self._frozen:
                    self._frozen[name] = tensor.to(self._dtype)
            tensors = self._frozen | tensors
        # The model gets these very tensors, without a copy.
        unknown = self._model.load_state_dict(tensors, strict=False, assign=True).unexpected_keys
        assert not unknown, f"the sampled model has no tensors {unknown}"
        self._served_version = policy_version
        self._served = PullResult(merge_lost=pushed.merge_lost)
        # A run samples from its newest weights; sessions keep their snapshots until `forget`.
        if not self._has_models:
            for version in versions[: versions.index(policy_version) + 1]:
                del self._pushed[version]


def _check_alone(world: World) -> None:
    if world.size > 1:
        raise ValueError(
            f"WORLD_SIZE={world.size}: a local backend is a single process; layouts of several "
            "are for the actors (python -m rl.train)"
        )
