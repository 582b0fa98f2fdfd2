"""The Tinker backend: models in training and samplers, over the core calls of a trainer and generators.

The service above checks names, owners, order and values; it never overlaps two calls about one model. The workers
below are this process (`rl.local.LocalBackend`) or actors (actors/tinker.py).
"""

from __future__ import annotations

import asyncio
import secrets
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from losses.types import Loss
from rl.config.configurable import Configurable
from rl.models.generate import PromptLogprobs
from rl.models.lora import LoRA
from rl.models.spec import ModelSpec
from rl.rollouts.samples import demonstration_sample
from rl.tinker.base import Base
from rl.tinker.turns import Turns
from rl.tinker.types import (
    BaseModel,
    InvalidRequestError,
    LoRASettings,
    ModelSettings,
    NotFoundError,
    SampleOutput,
    SampleRequest,
    TopLogprobs,
)
from rl.training.failures import NonFiniteLossError
from rl.training.models import ModelError
from rl.types import (
    Completion,
    ForwardBackwardResult,
    OptimParams,
    OptimStepResult,
    SamplingParams,
    TrainingSample,
)
from rl.utils.errors import RunError

ALPHA = 32.0
"""Numerator of the products' scale, as in PEFT and the official service: one learning rate fits all ranks."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
PROBED_TOKENS = 16
"""Tokens that a model is probed with before its weights are published."""


class BackendLostError(RunError):
    """Processes of the backend are gone, or in an unknown state."""


class Workers(Protocol):
    """Trainer, publisher and generators of models by id. A `ModelError` is a refusal; another `RunError` means that
    they cannot go on."""

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
        """Publish a model's weights and return their version; raise LimitReachedError if there is no room."""
        ...

    async def serve(self, version: int) -> object: ...

    async def forget(self, version: int) -> None: ...

    async def generate(
        self, prompts: Sequence[np.ndarray], *, sampling: SamplingParams
    ) -> list[list[Completion]]: ...

    async def prompt_logprobs(self, prompt: np.ndarray, *, top_k: int) -> PromptLogprobs: ...

    async def aclose(self) -> None: ...


class TinkerBackend(Configurable):
    """Calls about models run one after another; a call that is cancelled before its turn is never made."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        base: Base.Config = field(default_factory=lambda: Base.Config(name="tiny"))
        """The model that is offered."""
        cache: str = "~/.cache/relay"
        """Folder of a base model that is drawn from a seed."""

    def __init__(self, *, config: Config) -> None:
        self._base_config = config.base
        self._workers: Workers | None = None
        self._base: BaseModel | None = None
        self._spec: ModelSpec
        self._turns: Turns
        self._order = asyncio.Lock()
        self._models: set[str] = set()
        self._samplers: dict[str, int] = {}
        """Version of the weights of each sampler."""
        self._base_version: int | None = None
        self._loader: tuple[ModelSettings, str] | None = None
        """Model that saved weights of such settings are loaded into, to be published."""
        self._failure: Exception | None = None

    @abstractmethod
    def _open_base(self) -> Base:
        """Open the base model; called in a thread."""

    @abstractmethod
    async def _start_workers(self, base: Base) -> Workers: ...

    def _described(self, base: Base) -> BaseModel:
        return base.describe()

    @property
    def base_models(self) -> Sequence[BaseModel]:
        """The model on offer; empty until `start`."""
        return [] if self._base is None else [self._base]

    async def start(self) -> None:
        """Load everything that the first call needs.

        Raises:
            ValueError: the base's folder is incomplete or of an unsupported architecture, or a field does not fit.
        """
        base = await asyncio.to_thread(self._open_base)
        self._workers = await self._start_workers(base)
        self._turns = Turns(self._workers.serve)
        self._base, self._spec = self._described(base), base.spec

    async def close(self) -> None:
        """End everything; calls in progress fail. Idempotent."""
        self._failure = RuntimeError("the backend is closed")
        workers, self._workers = self._workers, None
        if workers is not None:
            await workers.aclose()

    # Models in training

    async def create_model(self, model_id: str, settings: ModelSettings) -> None:
        """Create a fresh model: adapters whose products are zero, or a copy of the base's parameters."""
        async with self._trainer() as workers:
            await workers.create_model(model_id, self._lora(settings.lora))
            self._models.add(model_id)

    async def forward_backward(
        self, model_id: str, samples: Sequence[TrainingSample], *, loss: Loss, backward: bool
    ) -> ForwardBackwardResult:
        """Add the gradient of the loss sum to the accumulated one, and return the logprobs of all targets.

        Without `backward` the gradient stays as it is. A call that fails adds nothing. A loss that is not finite
        raises InvalidRequestError and, with `backward`, drops the accumulated gradient.
        """
        async with self._trainer(model_id) as workers:
            if not backward:
                return await workers.forward(samples, loss=loss, model_id=model_id)
            return await workers.forward_backward(samples, loss=loss, return_logprobs=True, model_id=model_id)

    async def drop_gradient(self, model_id: str) -> None:
        async with self._trainer(model_id) as workers:
            await workers.drop_gradient(model_id=model_id)

    async def optim_step(self, model_id: str, params: OptimParams) -> OptimStepResult:
        """Step with the accumulated gradient, undivided, and clear it; without one, step with zeros.

        Raises:
            InvalidRequestError: the gradient is not finite; it is dropped and the weights stay.
        """
        async with self._trainer(model_id) as workers:
            return await workers.optim_step(params, allow_empty=True, model_id=model_id)

    async def save_model(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        """Write the trained weights, and the optimizer state if asked to, into an empty folder."""
        async with self._trainer(model_id) as workers:
            await workers.save_model(model_id, str(folder.absolute()), optimizer=optimizer)

    async def load_model(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        """Load weights from a folder of `save_model`, and drop the accumulated gradient.

        Without `optimizer` the optimizer starts anew.
        """
        async with self._trainer(model_id) as workers:
            await workers.load_model(model_id, str(folder.absolute()), optimizer=optimizer)

    async def delete_model(self, model_id: str) -> None:
        async with self._trainer(model_id) as workers:
            self._models.discard(model_id)
            await workers.delete_model(model_id)

    # Samplers: immutable weights

    async def publish(self, model_id: str, sampler_id: str) -> None:
        """Create a sampler with the model's weights as they are now.

        Raises:
            LimitReachedError: there is no room for another sampler.
            InvalidRequestError: nothing could be sampled from the weights.
        """
        async with self._trainer(model_id) as workers:
            self._samplers[sampler_id] = await self._push(workers, model_id)

    async def open_sampler(self, sampler_id: str, settings: ModelSettings, folder: Path | None) -> None:
        """Create a sampler from a folder of `save_model`, or from the base model itself with None."""
        async with self._trainer() as workers:
            if folder is None:
                if self._base_version is None:
                    # Fresh adapters change nothing, and need no copy of the base.
                    lora = LoRASettings(rank=1, seed=0, train_unembed=False)
                    self._base_version = await self._loaded(
                        workers, ModelSettings(base_model="", lora=lora), None
                    )
                self._samplers[sampler_id] = self._base_version
            else:
                self._samplers[sampler_id] = await self._loaded(workers, settings, folder)

    async def close_sampler(self, sampler_id: str) -> None:
        """Forget the weights of a sampler that has no requests any more."""
        version = self._samplers.pop(sampler_id, None)
        if version is None:
            raise NotFoundError(f"there is no sampler {sampler_id!r}")
        if version != self._base_version and self._workers is not None:
            await self._workers.forget(version)

    async def sample(self, sampler_id: str, request: SampleRequest) -> SampleOutput:
        """Answer a request; a cancelled one ends its work at the next token."""
        version = self._samplers.get(sampler_id)
        if version is None:
            raise NotFoundError(f"there is no sampler {sampler_id!r}")
        async with self._refusing() as workers, self._turns.serving(version):
            completions = [_EMPTY] * request.sampling.num_samples
            if request.sampling.max_tokens:
                (completions,) = await workers.generate([request.prompt], sampling=request.sampling)
            if not (request.prompt_logprobs or request.topk_prompt_logprobs):
                return SampleOutput(completions=tuple(completions))
            of_prompt = await workers.prompt_logprobs(request.prompt, top_k=request.topk_prompt_logprobs)
        top = TopLogprobs(token_ids=of_prompt.top_ids, logprobs=of_prompt.top_logprobs)
        return SampleOutput(
            completions=tuple(completions),
            prompt_logprobs=of_prompt.logprobs if request.prompt_logprobs else None,
            topk_prompt_logprobs=top if request.topk_prompt_logprobs else None,
        )

    # Within the trainer's turns

    async def _push(self, workers: Workers, model_id: str) -> int:
        assert self._base is not None
        tokens = np.arange(min(PROBED_TOKENS, self._base.max_context_length), dtype=np.int32)
        probe = demonstration_sample(tokens[:1], tokens[1:])
        (logprobs,) = await workers.compute_logprobs([probe], model_id=model_id)
        if not np.isfinite(logprobs).all():
            raise InvalidRequestError(
                "the model's logprobs are not finite: its weights have diverged and cannot be sampled from"
            )
        return await workers.push(model_id=model_id)

    async def _loaded(self, workers: Workers, settings: ModelSettings, folder: Path | None) -> int:
        """Publish saved weights, or fresh ones, by a model that is kept for the next weights of such settings."""
        if self._loader is not None and self._loader[0] != settings:
            _, old = self._loader
            self._loader = None
            await workers.delete_model(old)
        if self._loader is None:
            model_id = f"loader {secrets.token_hex(4)}"
            await workers.create_model(model_id, self._lora(settings.lora))
            self._loader = settings, model_id
        _, model_id = self._loader
        if folder is not None:
            await workers.load_model(model_id, str(folder.absolute()), optimizer=False)
        return await self._push(workers, model_id)

    def _lora(self, settings: LoRASettings | None) -> LoRA.Config | None:
        if settings is None:
            return None
        return LoRA.Config(
            rank=settings.rank,
            alpha=ALPHA,
            target_modules=(
                *(ATTENTION if settings.train_attn else ()),
                *(FEED_FORWARD if settings.train_mlp else ()),
            ),
            unembedding=settings.train_unembed and not self._spec.model.tie_embeddings,
            # Drawn here, so that it is the same on all ranks.
            seed=secrets.randbits(62) if settings.seed is None else settings.seed,
        )

    @asynccontextmanager
    async def _trainer(self, model_id: str | None = None) -> AsyncIterator[Workers]:
        """Wait for the turn of a call about a model."""
        async with self._order, self._refusing() as workers:
            if model_id is not None and model_id not in self._models:
                raise NotFoundError(f"there is no model {model_id!r}")
            yield workers

    @asynccontextmanager
    async def _refusing(self) -> AsyncIterator[Workers]:
        """Turn refusals into InvalidRequestError; after any other RunError nothing works any more."""
        if self._failure is not None:
            raise self._failure
        if self._workers is None:
            raise RuntimeError("the backend was not started")
        try:
            yield self._workers
        except NonFiniteLossError as error:
            raise InvalidRequestError(
                f"the loss or the gradient is not a finite number ({error.what}). The accumulated gradient of this "
                "model is dropped, also that of earlier calls, unless this was a forward; its weights stay as they were"
            ) from error
        except ModelError as error:
            raise InvalidRequestError(str(error)) from error
        except RunError as error:
            if self._failure is None:
                self._failure = BackendLostError(
                    f"the backend is lost, and with it all models in training: {error}. Close this backend and start "
                    "another; what was saved can be loaded there"
                )
            raise self._failure from error


_EMPTY = Completion(
    token_ids=np.empty(0, np.int32),
    logprobs=np.empty(0, np.float32),
    policy_versions=np.empty(0, np.int32),
    finish_reason="length",
)
"""Completion of a prompt that leaves no room."""
