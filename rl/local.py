"""Trainer, generator and publisher in this process on one device, without actors or vLLM.

For notebooks, examples and tests. It has the same training engine, and the same model definition sampled by
`rl.models.generate`. Published weights are copies, so that the sampler never sees a half-finished step.

    async with LocalBackend(config, spec=..., hf_assets_path=...) as local:
        await local.serve(await local.push())
        groups = await local.generate(prompts, sampling=...)
        await local.forward_backward(samples)
        await local.optim_step()

docs/scripts.md names the limits. With `models` it has several models by id, as the Tinker API needs them
(`rl.training.models`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from losses.types import Loss
from rl.distributed.mesh import ParallelismConfig
from rl.distributed.process_group import World
from rl.distributed.sharding import whole_tensor
from rl.models.batch_invariant.model import make_batch_invariant
from rl.models.converter import ModelConverters
from rl.models.decoder import Decoder, persistent_buffers, reset_buffers
from rl.models.generate import PromptLogprobs, generate, prompt_logprobs
from rl.models.lora import LoRA
from rl.models.sampling import spells_any
from rl.models.spec import ModelSpec
from rl.models.tokenizer import open_tokenizer
from rl.observability.spans import span
from rl.protocols import Rewarder
from rl.rollouts.rubric import Rubric
from rl.training.config import Dtype
from rl.training.engine import TrainingEngine
from rl.training.models import RUN, TrainedModels, adapted
from rl.types import (
    Completion,
    ForwardBackwardResult,
    LoopPosition,
    OptimParams,
    OptimStepResult,
    Rollout,
    SamplingParams,
    Score,
    ServeResult,
    TrainingSample,
)
from rl.utils.threads import WorkerThread

ResultT = TypeVar("ResultT")


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    """A call of `generate`."""

    prompts: list[np.ndarray]
    sampling: SamplingParams
    groups: list[list[Completion]] | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def drawn_alike(self) -> tuple[object, ...]:
        """Settings that calls have in common if they are answered together."""
        sampling = self.sampling
        return sampling.temperature, sampling.top_k, sampling.top_p, sampling.num_samples


class LocalBackend:
    """A `Trainer`, a `TokenGenerator` and a `Publisher`.

    The trainer's calls run one after another in one thread and the generator's in another, so that a loop can
    overlap them. A call that is cancelled while it is queued is never made. A call that is cancelled later returns
    at once: `generate` ends at its next token, and a call of the trainer runs to its end before the next one.
    """

    def __init__(
        self,
        config: TrainingEngine.Config,
        *,
        spec: ModelSpec,
        hf_assets_path: str | None,
        device: torch.device | str | None = None,
        failure_folder: str | None = None,
        models: bool = False,
        max_sequences: int = 256,
        gather_s: float = 0.005,
    ) -> None:
        """Take the arguments of `TrainingEngine`.

        Args:
            models: have models by id, none at the start. Published adapters are not merged, and calls of `generate`
                are answered together: at most `max_sequences` completions of those that come within `gather_s`.

        Raises:
            ValueError: the engine refuses the config, or this process is one of several.
        """
        world = World.from_env()
        if world.size > 1:
            raise ValueError(
                f"WORLD_SIZE={world.size}: a local backend is a single process; layouts of several are for "
                "the actors (python -m rl.train)"
            )
        self._config = config
        self._folder = hf_assets_path
        self.threads = self._trainer, self._generator = WorkerThread("trainer"), WorkerThread("generator")
        self._closed = threading.Event()
        self._gathers, self._max_sequences, self._gather_s = models, max_sequences, gather_s
        self._waiting: list[_Call] = []
        """Calls of `generate` that can still be answered with others."""
        self._pushed: dict[int, tuple[LoRA.Config | None, Mapping[str, Tensor]]] = {}
        """Unmerged adapters and copies of the weights by version, in the order of the pushes; the base of adapters
        is shared."""
        self._numbers = itertools.count(1)
        self._served_version: int | None = None
        if models:
            assert hf_assets_path is not None, "models by id start from one base"
            self.models = TrainedModels(
                config, spec=spec, hf_assets_path=hf_assets_path, device=device, world=world
            )
            self._spec, self._device = spec, self.models.device
        else:
            self.engine: TrainingEngine = config.build(
                model_spec=spec,
                hf_assets_path=hf_assets_path,
                device=device,
                world=world,
                failure_folder=failure_folder,
            )
            self._spec, self._device = self.engine.policy.spec, self.engine.device
        self._dtype: torch.dtype = getattr(torch, config.training.param_dtype)
        self._frozen: dict[str, Tensor] = {}
        """The base's weights in the dtype of forwards, shared by all adapters."""
        self._lora: LoRA.Config | None = None
        self._model = self._make_model(None)

    def _make_model(self, lora: LoRA.Config | None) -> Decoder:
        """Return a model to sample from, whose parameters have no memory."""
        spec, converters = adapted(self._spec, lora)
        with torch.device("meta"):
            model: Decoder = spec.model.build()
            make_batch_invariant(model, spec=spec, device=self._device)
            degrees = ParallelismConfig().degrees(1)
            ModelConverters(converters, spec=spec, degrees=degrees, device=self._device).convert(model)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty_like(buffer, device=self._device))
        reset_buffers(model)
        return model.requires_grad_(False)

    def _engine(self, model_id: str) -> TrainingEngine:
        return self.engine if model_id == RUN else self.models[model_id]

    async def __aenter__(self) -> LocalBackend:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close without blocking the event loop."""
        self._closed.set()  # In the event loop's thread, so that no call is queued after the end.
        # In another thread, so that callers of running calls get their results meanwhile.
        await asyncio.shield(asyncio.to_thread(self.close))

    def close(self) -> None:
        """End both threads after the trainer's running call and the generator's next token; idempotent.

        Queued and later calls raise RuntimeError.
        """
        self._closed.set()
        for thread in (self._generator, self._trainer):
            thread.stop(timeout_s=threading.TIMEOUT_MAX)
        (self.models if self._gathers else self.engine).close()

    async def _call(self, thread: WorkerThread, name: str, function: Callable[[], ResultT]) -> ResultT:
        """Return the result of a function in a thread, unless the call is cancelled before it starts."""
        self._check_open()
        cancelled = threading.Event()

        def call() -> ResultT:
            self._check_open()
            if cancelled.is_set():
                raise asyncio.CancelledError
            with span(name):
                return function()

        try:
            return await thread.run(call)
        finally:
            cancelled.set()

    async def _train(self, name: str, function: Callable[[], ResultT]) -> ResultT:
        return await self._call(self._trainer, name, function)

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise RuntimeError("the local backend is closed")

    # TokenGenerator

    async def generate(
        self, prompts: Sequence[np.ndarray], *, sampling: SamplingParams, session: str | None = None
    ) -> list[list[Completion]]:
        """Return the completions of each prompt (`TokenGenerator.generate`).

        Raises:
            ValueError: a prompt is empty or fills the context, or a setting is out of range.
            RuntimeError: no weights were published yet, or the backend is closed.
        """
        call = _Call(prompts=list(prompts), sampling=sampling)
        self._check_open()
        try:
            if self._gathers:
                self._waiting.append(call)
                await asyncio.sleep(self._gather_s)
            return await self._call(self._generator, "generate", lambda: self._answered(call))
        finally:
            call.cancelled.set()
            self._take(call)

    def _answered(self, call: _Call) -> list[list[Completion]]:
        if call.groups is None:
            self._answer(self._group(call))
            self._check_open()  # `close` may have cut the completions short.
        assert call.groups is not None
        return call.groups

    def _group(self, first: _Call) -> list[_Call]:
        """Return a call and those waiting that can be answered with it; a single call may exceed the limits."""
        group: list[_Call] = []
        sequences = tokens = 0
        for call in (first, *(one for one in list(self._waiting) if one is not first)):
            sequences += len(call.prompts) * call.sampling.num_samples
            tokens += sum(map(len, call.prompts))
            fits = (
                sequences <= self._max_sequences and tokens <= self._config.training.max_tokens_per_microbatch
            )
            if call is first or (fits and call.drawn_alike == first.drawn_alike):
                group.append(call)
        for call in group:
            self._take(call)
        return group

    def _take(self, call: _Call) -> None:
        with contextlib.suppress(ValueError):  # another thread was faster
            self._waiting.remove(call)

    def _answer(self, group: Sequence[_Call]) -> None:
        if self._served_version is None:
            raise RuntimeError("no weights to sample from: await serve(await push()) first")
        own = [call for call in group for _ in call.prompts]
        longest = max(call.sampling.max_tokens for call in group)
        completions = iter(
            generate(
                self._model,
                [prompt for call in group for prompt in call.prompts],
                sampling=replace(group[0].sampling, max_tokens=longest, stop_token_ids=(), stop_texts=()),
                policy_version=self._served_version,
                max_sequences=self._max_sequences,
                is_cancelled=lambda: self._closed.is_set() or all(call.cancelled.is_set() for call in group),
                limits=[call.sampling.max_tokens for call in own],
                # A prompt that occurs twice in one call draws different samples.
                seeds=[call.sampling.seed for call in own] if self._gathers else None,
                ends=[self._end_of(call) for call in own],
            )
        )
        for call in group:
            call.groups = list(itertools.islice(completions, len(call.prompts)))

    def _end_of(self, call: _Call) -> Callable[[Sequence[int]], bool]:
        """Return the condition on which a completion of the call ends."""
        sampling = call.sampling
        tokenizer = None
        if sampling.stop_texts:
            assert self._folder is not None, "stop texts need a tokenizer"
            tokenizer, _ = open_tokenizer(Path(self._folder), vocab_size=self._spec.model.vocab_size)

        def ends(tokens: Sequence[int]) -> bool:
            return (
                call.cancelled.is_set()
                or tokens[-1] in sampling.stop_token_ids
                or spells_any(sampling.stop_texts, tokens, tokenizer=tokenizer)
            )

        return ends

    async def prompt_logprobs(self, prompt: np.ndarray, *, top_k: int = 0) -> PromptLogprobs:
        """Return the logprobs of a prompt's tokens, and the most likely tokens in their places."""

        return await self._call(
            self._generator, "prompt_logprobs", lambda: prompt_logprobs(self._model, prompt, top_k=top_k)
        )

    # Trainer

    async def forward_backward(
        self,
        samples: Sequence[TrainingSample],
        *,
        loss: Loss | None = None,
        return_logprobs: bool | Sequence[int] = False,
        model_id: str = RUN,
    ) -> ForwardBackwardResult:
        return await self._train(
            "forward_backward",
            lambda: self._engine(model_id).forward_backward(
                samples, loss=loss, return_logprobs=return_logprobs
            ),
        )

    async def forward(
        self, samples: Sequence[TrainingSample], *, loss: Loss | None = None, model_id: str = RUN
    ) -> ForwardBackwardResult:
        return await self._train("forward", lambda: self._engine(model_id).forward(samples, loss=loss))

    async def drop_gradient(self, *, model_id: str = RUN) -> None:
        await self._train("drop_gradient", lambda: self._engine(model_id).drop_gradient())

    async def optim_step(
        self, params: OptimParams | None = None, *, allow_empty: bool = False, model_id: str = RUN
    ) -> OptimStepResult:
        return await self._train(
            "optim_step", lambda: self._engine(model_id).optim_step(params, allow_empty=allow_empty)
        )

    async def compute_logprobs(
        self, samples: Sequence[TrainingSample], *, model_id: str = RUN
    ) -> list[np.ndarray]:
        return await self._train("compute_logprobs", lambda: self._engine(model_id).compute_logprobs(samples))

    async def compute_reference_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        return await self._train(
            "compute_reference_logprobs", lambda: self.engine.compute_reference_logprobs(samples)
        )

    async def save_checkpoint(
        self,
        folder: str,
        *,
        position: LoopPosition | None = None,
        model_only: bool = False,
        wait: bool = True,
        attachments: Mapping[str, bytes] | None = None,
    ) -> None:
        await self._train(
            "save",
            lambda: self.engine.save_checkpoint(
                folder, position=position, model_only=model_only, wait=wait, attachments=attachments
            ),
        )

    async def load_checkpoint(self, folder: str, *, model_only: bool = False) -> int:
        return await self._train("load", lambda: self.engine.load_checkpoint(folder, model_only=model_only))

    async def export_hf(self, folder: str, *, dtype: Dtype | None = None) -> None:
        await self._train("export", lambda: self.engine.export_hf(folder, dtype=dtype))

    async def save_adapter(self, folder: str) -> None:
        await self._train("export", lambda: self.engine.save_adapter(folder))

    # Models by id

    async def create_model(self, model_id: str, lora: LoRA.Config | None) -> None:
        await self._train("create_model", lambda: self.models.create(model_id, lora))

    async def delete_model(self, model_id: str) -> None:
        await self._train("delete_model", lambda: self.models.delete(model_id))

    async def save_model(self, model_id: str, folder: str, *, optimizer: bool) -> None:
        await self._train("save", lambda: self.models.save(model_id, folder, optimizer=optimizer))

    async def load_model(self, model_id: str, folder: str, *, optimizer: bool) -> None:
        await self._train("load", lambda: self.models.load(model_id, folder, optimizer=optimizer))

    # Publisher

    async def push(self, *, model_id: str = RUN) -> int:
        """Copy the present weights, and return their version: the policy version of a run, with adapters merged."""
        return await self._train("push", lambda: self._push(model_id))

    def _push(self, model_id: str) -> int:
        engine = self._engine(model_id)
        buffers = persistent_buffers(engine.policy.model)
        lora: LoRA.Config | None = None
        if model_id == RUN:
            version, weights = engine.policy_version, engine.model_state_dict()
        else:
            version, weights = next(self._numbers), dict(engine.policy.trained_parameters) | buffers
            lora = self.models.lora(model_id)
        with torch.no_grad():
            copies = {
                name: whole_tensor(tensor)
                .detach()
                .to(self._device, tensor.dtype if name in buffers else self._dtype, copy=True)
                for name, tensor in weights.items()
            }
        self._pushed.pop(version, None)  # A version that was loaded again moves to the end.
        self._pushed[version] = lora, copies
        return version

    async def forget(self, version: int) -> None:
        """Drop a version of a model by id."""
        del self._pushed[version]

    async def serve(self, policy_version: int) -> ServeResult:
        """Sample from a pushed version in later calls of `generate`; a run drops earlier versions.

        Raises:
            ValueError: the version was not pushed, or a later one is served.
        """
        await self._call(self._generator, "pull", lambda: self._serve(policy_version))
        return ServeResult()

    def _serve(self, policy_version: int) -> None:
        kept = list(self._pushed)
        if policy_version not in kept:
            if policy_version == self._served_version:
                return
            raise ValueError(
                f"policy_version={policy_version} was not pushed, or a later push is served: "
                f"served is {self._served_version}, pushed since {kept}"
            )
        lora, tensors = self._pushed[policy_version]
        if lora != self._lora:
            self._model, self._lora = self._make_model(lora), lora
        put_tensors(self._model, tensors)
        if lora is not None:
            for name, tensor in list(self.models.frozen.items()):
                if name not in self._frozen:
                    self._frozen[name] = tensor.to(self._dtype)
            put_tensors(self._model, self._frozen)
        self._served_version = policy_version
        if not self._gathers:
            for version in kept[: kept.index(policy_version) + 1]:
                del self._pushed[version]


def put_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Make these very tensors the parameters, frozen, and the buffers of their names."""
    parameters = dict(module.named_parameters())
    for name, tensor in tensors.items():
        parent, _, leaf = name.rpartition(".")
        value = nn.Parameter(tensor, requires_grad=False) if name in parameters else tensor
        setattr(module.get_submodule(parent), leaf, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalRewarder(Rewarder):
    """Scores rollouts in this process, without a time limit."""

    rubric: Rubric

    async def score(self, groups: Sequence[Sequence[Rollout]], *, alone: bool = False) -> list[list[Score]]:
        with span("score"):
            return list(await asyncio.gather(*(self.rubric.score_group(g, alone=alone) for g in groups)))
