"""The Tinker backend: models in training and samplers, over the core calls of a trainer and
generators.

The service checks names, owners, order and values; it never overlaps two calls about one model. The
workers are this process (`rl.local.LocalBackend`) or actors (actors/tinker.py).
"""

from __future__ import annotations

import asyncio
import secrets
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from tinker import types as wire

from losses.types import Loss
from rl.config.configurable import Configurable
from rl.config.tree import check_bounds
from rl.distributed.mesh import ParallelismConfig
from rl.models.converter import ModelConverters
from rl.models.files.assets import resolve_assets
from rl.models.generate import DivergedWeightsError, Interrupted, PromptLogprobs
from rl.models.lora import LoRA
from rl.models.spec import ModelSpec, model_spec
from rl.rollouts.samples import make_demonstration_sample
from rl.starting_point import describe_random_model, open_model_folder
from rl.tinker.turns import FairLock, Turns
from rl.tinker.types import (
    MAX_SEQ_ID,
    BaseModel,
    InvalidRequestError,
    SampleOutput,
    SampleRequest,
    UnsavedError,
    check_range,
)
from rl.trainer_types import ForwardBackwardResult, OptimParams, OptimStepResult
from rl.training.config import TrainingConfig
from rl.training.failures import NonFiniteLossError
from rl.training.models_by_id import ModelError, UnsavedModelError, add_adapters
from rl.types import Completion, SamplingParams, TrainingSample
from rl.utils.errors import RunError

ALPHA = 32.0
"""Numerator of the products' scale, as in the official service: one learning rate fits all ranks.
"""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
PROBED_TOKENS = 16
"""Tokens that a model is probed with before its weights are published."""


class Base(Configurable):
    """Base model that a backend offers: its folder, its layout, and what clients are told of it."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Source of the model, its name, and the adapters that clients may ask for."""

        name: str | None = None
        """Name that clients ask for and open the tokenizer by, such as "Qwen/Qwen3-0.6B"; None: the
        path of its folder, which needs no hub."""
        folder: str | None = None
        """Hugging Face folder with its tokenizer, GGUF file, package or name on the hub, as
        `hf_assets_path` of a run; None draws a model of `flavor` from `seed`, with a byte
        tokenizer."""
        hf_revision: str | None = None
        """Branch, tag or commit of a model on the hub; None takes its main branch."""
        flavor: str = "tiny"
        """Size of a drawn model; without effect with a folder."""
        seed: int = 0
        """Seed of a drawn model."""
        batch_invariant: bool = False
        """Use kernels whose results do not depend on the rest of the batch, so that a sampler's
        logprobs have the bits that training computes for the same weights (docs/training.md)."""
        float32_head: bool = False
        """Compute logits in float32 whatever the dtype of the other products."""
        min_lora_rank: int = 0
        """Lowest rank that clients may ask for; 0 lets them train all parameters, with whole copies
        of the model.
        """
        max_lora_rank: int = 128

        def __post_init__(self) -> None:
            check_bounds(self, "min_lora_rank", at_least=0)
            check_bounds(self, "max_lora_rank", at_least=max(1, self.min_lora_rank))

    def __init__(
        self,
        *,
        config: Config,
        training: TrainingConfig,
        cache: str | Path,
        context: int | None = None,
    ) -> None:
        """Open the model; a drawn one is written into `cache` first.

        Args:
            context: most tokens of a prompt with its completion; None: the model's positions.

        Raises:
            ValueError: the folder is incomplete or of an unsupported architecture, or a micro-batch
                cannot hold the context.
        """
        # A drawn model is written to a folder like any other: training and samplers read it there.
        cache = Path(cache).expanduser().absolute()
        if config.folder is None:
            spec = replace(
                model_spec("qwen3", config.flavor), batch_invariant=config.batch_invariant
            )
            start = describe_random_model(cache, spec=spec, seed=config.seed)
        else:
            folder = resolve_assets(config.folder, cache=cache, revision=config.hf_revision)
            start = open_model_folder(folder, spec=None, batch_invariant=config.batch_invariant)
            if start.spec.model.has_experts:
                raise ValueError(
                    f"folder={config.folder!r}: must be a dense model, not a mixture of experts"
                )
        start.make()
        self.folder = start.folder.expanduser().absolute()
        self.spec: ModelSpec = replace(start.spec, float32_head=config.float32_head)
        _, stop_token_ids = start.tokenizer()
        context = self.spec.model.rope.max_positions if context is None else context
        name = config.name or str(self.folder)
        _check_room(name, context, training)
        # A head that is tied to the embedding has no adapter of its own.
        has_head = not self.spec.model.tie_embeddings
        self.model = BaseModel(
            name=name,
            architecture=self.spec.name,
            max_context_length=context,
            vocab_size=self.spec.model.vocab_size,
            tokenizer_folder=str(self.folder),
            stop_token_ids=tuple(stop_token_ids),
            tie_embeddings=self.spec.model.tie_embeddings,
            min_lora_rank=config.min_lora_rank,
            max_lora_rank=config.max_lora_rank,
            num_parameters=_count_trained(self.spec, None),
            num_parameters_per_rank=_count_trained(
                self.spec, LoRA.Config(rank=1, unembedding=has_head)
            ),
        )


def _count_trained(spec: ModelSpec, lora: LoRA.Config | None) -> int:
    """Return the number of parameters that a model trains."""
    spec, converters = add_adapters(replace(spec, batch_invariant=False), lora)
    # On the meta device, which has shapes without memory.
    with torch.device("meta"):
        model = spec.model.build()
        ModelConverters(
            converters,
            spec=spec,
            degrees=ParallelismConfig().resolve_degrees(1),
            device=torch.device("meta"),
        ).convert(model)
    return sum(one.numel() for one in model.parameters() if one.requires_grad)


def _check_room(name: str, context: int, training: TrainingConfig) -> None:
    longest = training.max_sequence_length
    if longest is not None and longest != context:
        raise ValueError(
            f"training.max_sequence_length={longest}: must be None, base {name!r} sets it"
        )
    if training.max_tokens_per_microbatch < context - 1:
        raise ValueError(
            f"training.max_tokens_per_microbatch={training.max_tokens_per_microbatch}: must be at "
            f"least {context - 1}, so that a sequence as long as the context of base {name!r} fits"
        )


def make_lora_config(lora: wire.LoraConfig, base: BaseModel) -> LoRA.Config:
    """Return the adapters of a model; raise InvalidRequestError if they cannot be created."""
    or_all = "" if base.min_lora_rank else ", unless it is 0 to train all parameters"
    check_range(
        f"lora_config.rank{or_all}", lora.rank, max(1, base.min_lora_rank), base.max_lora_rank
    )
    check_range("lora_config.seed", lora.seed, 0, MAX_SEQ_ID)
    targets = (*(ATTENTION if lora.train_attn else ()), *(FEED_FORWARD if lora.train_mlp else ()))
    unembedding = lora.train_unembed and not base.tie_embeddings
    if not (targets or unembedding):
        raise InvalidRequestError(
            f"lora_config: train_attn=False, train_mlp=False, train_unembed={lora.train_unembed}: "
            "nothing would have an adapter; a head that is tied to the embedding never has one"
        )
    # Drawn here, so that it is the same on all ranks.
    seed = secrets.randbits(62) if lora.seed is None else lora.seed
    return LoRA.Config(
        rank=lora.rank, alpha=ALPHA, target_modules=targets, unembedding=unembedding, seed=seed
    )


class BackendLostError(RunError):
    """Processes of the backend are gone, or in an unknown state."""


class Workers(Protocol):
    """Trainer, publisher and generators of models by id; a `RunError` other than `ModelError` ends
    them.
    """

    num_sequences: int
    """Sequences that several owners draw at once; 0: the owners draw one after another."""

    # Calls about models, with the names and meanings of the training engine
    # (rl/training/models_by_id.py, rl/training/engine.py). Never two at once.

    async def create_model(self, model_id: str, lora: LoRA.Config | None) -> None: ...

    async def delete_model(self, model_id: str) -> None: ...

    async def forward_backward(
        self, samples: Sequence[TrainingSample], *, loss: Loss, return_logprobs: bool, model_id: str
    ) -> ForwardBackwardResult: ...

    async def forward(
        self, samples: Sequence[TrainingSample], *, loss: Loss, model_id: str
    ) -> ForwardBackwardResult: ...

    async def drop_gradient(self, *, model_id: str) -> None: ...

    async def optim_step(
        self, params: OptimParams, *, allow_empty: bool, model_id: str
    ) -> OptimStepResult: ...

    async def compute_logprobs(
        self, samples: Sequence[TrainingSample], *, model_id: str
    ) -> list[np.ndarray]: ...

    async def save_model(self, model_id: str, folder: str, *, optimizer: bool) -> None: ...

    async def load_model(self, model_id: str, folder: str, *, optimizer: bool) -> None: ...

    async def push(self, *, model_id: str) -> int:
        """Return the version of the published weights; raise LimitReachedError if there is no
        room.
        """
        ...

    async def pull(self, version: int) -> object:
        """Let all generators pull a version; no request runs meanwhile."""
        ...

    async def forget(self, version: int) -> None:
        """Drop a version that nothing samples from any more."""
        ...

    async def generate_in_turns(
        self, prompts: Sequence[np.ndarray], *, sampling: SamplingParams
    ) -> list[list[Completion]] | Interrupted[list[list[Completion]]]:
        """Return the completions, or after `interrupt` what is left to do."""
        ...

    async def interrupt(self) -> None:
        """End the calls of `generate_in_turns` under way soon; one may be missed."""
        ...

    async def prompt_logprobs(self, prompt: np.ndarray, *, top_k: int) -> PromptLogprobs:
        """Return the logprobs of a prompt's tokens, and the `top_k` likeliest at each position."""
        ...

    async def aclose(self) -> None:
        """End all workers; their calls fail."""
        ...


class TinkerBackend(Configurable):
    """Calls about models run one after another; a call that is cancelled before its turn is never
    made.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        base: Base.Config = field(default_factory=lambda: Base.Config(name="tiny"))
        """The model that is offered."""
        cache: str = "~/.cache/relay"
        """Folder of a base model that is drawn from a seed."""

    def __init__(self, *, config: Config) -> None:
        self._workers: Workers | None = None
        self.base_model: BaseModel
        self._turns: Turns
        self._num_interruptions = 0
        self._reading: asyncio.Semaphore
        """Prompts whose logprobs are computed at once, which cannot be interrupted."""
        self._order = FairLock()
        self._base_version: int | None = None
        self._failure: Exception | None = None

    @abstractmethod
    def _open_base(self) -> Base:
        """Open the base model; called in a thread."""

    @abstractmethod
    async def _start_workers(self, base: Base) -> Workers: ...

    async def start(self) -> None:
        """Load everything that the first call needs; raise ValueError as `Base` does, or if a field
        does not fit.
        """
        base = await asyncio.to_thread(self._open_base)
        self._workers = await self._start_workers(base)
        capacity = self._workers.num_sequences
        self._turns = Turns(self._workers.pull, interrupt=self._interrupt, capacity=capacity)
        self._reading = asyncio.Semaphore(max(1, capacity // 8))
        self.base_model = base.model

    async def close(self) -> None:
        """End everything; calls in progress fail. Idempotent."""
        # First, so that calls that wait for their turn fail in place of using closed workers.
        self._failure = RuntimeError("the backend is closed")
        workers, self._workers = self._workers, None
        if workers is not None:
            await workers.aclose()

    @asynccontextmanager
    async def trainer(self, owner: str = "") -> AsyncIterator[Workers]:
        """Lock calls about models, which never overlap; turn refusals into InvalidRequestError."""
        async with self._order.lock_for(owner), self._translate_errors() as workers:
            yield workers

    # Weights to sample from, which never change: versions

    async def publish(self, model_id: str, owner: str = "") -> int:
        """Return the version of a copy of the model's weights as they are now.

        Raises:
            LimitReachedError: there is no room for another one.
            InvalidRequestError: nothing could be sampled from the weights.
        """
        async with self.trainer(owner) as workers:
            return await self._push(workers, model_id)

    async def open(self, lora: LoRA.Config | None, folder: Path | None, owner: str = "") -> int:
        """Return the version of a folder of `save_model`, or with None that of the base model."""
        async with self.trainer(owner) as workers:
            if folder is not None:
                return await self._load(workers, lora, folder)
            if self._base_version is None:
                # Fresh adapters change nothing, and need no copy of the base.
                fresh = wire.LoraConfig(rank=1, seed=0, train_unembed=False)
                lora = make_lora_config(fresh, self.base_model)
                self._base_version = await self._load(workers, lora, None)
            return self._base_version

    async def forget(self, version: int) -> None:
        """Drop a version that has no requests any more; the base stays."""
        # Every session without saved weights samples from the base, which is loaded once.
        if version != self._base_version and self._workers is not None:
            await self._workers.forget(version)

    async def sample(self, version: int, request: SampleRequest, owner: str = "") -> SampleOutput:
        """Answer a request; a cancelled one ends its work at the next token."""
        sampling, top_k = request.sampling, request.topk_prompt_logprobs
        # A prompt that fills the context has no completion, but its logprobs.
        completions, of_prompt = [_EMPTY] * sampling.num_samples, None
        async with self._translate_errors() as workers:
            in_turn = partial(self._turns.run, version=version, owner=owner)
            if sampling.max_tokens:
                generate = partial(workers.generate_in_turns, [request.prompt], sampling=sampling)
                (completions,) = await in_turn(generate, num_sequences=sampling.num_samples)
            if request.prompt_logprobs or top_k:
                of_prompt = await in_turn(partial(self._compute_prompt_logprobs, workers, request))
        return SampleOutput(completions=completions, of_prompt=of_prompt)

    async def _compute_prompt_logprobs(
        self, workers: Workers, request: SampleRequest
    ) -> PromptLogprobs | Interrupted[PromptLogprobs]:
        """Return a prompt's logprobs, unless the turn is interrupted before they are begun."""
        # Reading a prompt is one call that cannot be interrupted: those that have not begun by then
        # leave the turn.
        interruption = self._num_interruptions
        async with self._reading:
            if self._num_interruptions != interruption:
                again = partial(self._compute_prompt_logprobs, workers, request)
                return Interrupted(resume=again, has_advanced=False)
            return await workers.prompt_logprobs(request.prompt, top_k=request.topk_prompt_logprobs)

    async def _interrupt(self) -> None:
        self._num_interruptions += 1
        if self._workers is not None:
            await self._workers.interrupt()

    # Within the trainer's turns

    async def _push(self, workers: Workers, model_id: str) -> int:
        num_tokens = min(PROBED_TOKENS, self.base_model.max_context_length)
        tokens = np.arange(num_tokens, dtype=np.int32)
        probe = make_demonstration_sample(tokens[:1], tokens[1:])
        (logprobs,) = await workers.compute_logprobs([probe], model_id=model_id)
        if not np.isfinite(logprobs).all():
            raise InvalidRequestError(
                "the model's logprobs are not finite: its weights have diverged and cannot be "
                "sampled from"
            )
        return await workers.push(model_id=model_id)

    async def _load(self, workers: Workers, lora: LoRA.Config | None, folder: Path | None) -> int:
        """Publish saved weights, or with None fresh ones, by a model that exists only meanwhile."""
        model_id = f"loader {secrets.token_hex(4)}"
        await workers.create_model(model_id, lora)
        try:
            if folder is not None:
                await workers.load_model(model_id, str(folder.absolute()), optimizer=False)
            return await self._push(workers, model_id)
        finally:
            # The published version is a copy, and stays.
            await workers.delete_model(model_id)

    @asynccontextmanager
    async def _translate_errors(self) -> AsyncIterator[Workers]:
        """Turn refusals into InvalidRequestError; after any other RunError nothing works any
        more.
        """
        if self._failure is not None:
            raise self._failure
        if self._workers is None:
            raise RuntimeError("the backend was not started")
        try:
            yield self._workers
        except NonFiniteLossError as error:
            raise InvalidRequestError(
                f"the loss or the gradient is not a finite number ({error.what}). The accumulated "
                "gradient of this model is dropped, also that of earlier calls, unless this was a "
                "forward; its weights stay as they were"
            ) from error
        except DivergedWeightsError as error:
            raise InvalidRequestError(f"the sampler's weights have diverged: {error}") from error
        except UnsavedModelError as error:
            raise UnsavedError(str(error)) from error
        except ModelError as error:
            raise InvalidRequestError(str(error)) from error
        except RunError as error:
            # The first error is the cause; those that follow come from processes that are gone.
            if self._failure is None:
                self._failure = BackendLostError(
                    f"the backend is lost, and with it all models in training: {error}. Close this "
                    "backend and start another; what was saved can be loaded there"
                )
            raise self._failure from error


_EMPTY = Completion(
    token_ids=np.empty(0, np.int32),
    logprobs=np.empty(0, np.float32),
    policy_versions=np.empty(0, np.int32),
    finish_reason="length",
)
"""Completion of a prompt that leaves no room."""
