"""The Tinker backend: queues and errors between the service and the workers that compute.

The service checks names, owners, order and values; it never overlaps two calls about one model. The
workers are threads of this process (rl/tinker/local.py) or actors (actors/tinker.py).
"""

from __future__ import annotations

import asyncio
import math
import secrets
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np

from rl.config.configurable import Configurable
from rl.engine_client import EngineClient
from rl.models.generate import DivergedWeightsError, PromptLogprobs
from rl.models.lora import LoRA
from rl.rollouts.samples import make_demonstration_sample
from rl.tinker.base_model import ATTENTION, BaseModelFolder
from rl.tinker.queues import FairLock, FairSlots, VersionGate
from rl.tinker.types import (
    BaseModelInfo,
    InvalidRequestError,
    SampleOutput,
    SampleRequest,
    UnsavedError,
)
from rl.training.failures import NonFiniteLossError
from rl.training.models_by_id import KEEPER, ModelError, UnsavedModelError
from rl.types import BASE, Completion, SamplingParams
from rl.utils.errors import RunError
from rl.utils.threads import gather_or_cancel

PROBED_TOKENS = 16
"""Tokens that a model is probed with before its weights are published."""
NUM_PARTS = 64
"""Parts of the sampler's capacity; a request is divided into parts of that size, so that one that
is larger than an owner's share takes no more than the share."""
NUM_READERS = 8
"""Prompts whose logprobs are computed at once; the sampler does not pause in a prompt."""


class BackendLostError(RunError):
    """Processes of the backend are gone, or in an unknown state."""


class TinkerWorkers(EngineClient):
    """Trainer and generators of models by id, in this process or over actors.

    The methods of `EngineClient` compute on one of the models; the methods below create, save and
    delete models, and publish and sample their weights. No two calls about a model may overlap. A
    `RunError` other than `ModelError` ends all workers.
    """

    num_sequences: int
    """Sequences that the sampler draws at once for all owners."""
    tokens_per_sequence: float = float("inf")
    """Tokens of a sequence that it has room for if it draws `num_sequences`; a longer one counts as
    several."""

    # Models in training (`rl.training.models_by_id.TrainedModels`)

    @abstractmethod
    async def create_model(self, model_id: str, lora: LoRA.Config | None) -> None:
        """Create a fresh model with adapters, or with None a copy of the base."""

    @abstractmethod
    async def delete_model(self, model_id: str) -> None: ...

    @abstractmethod
    async def save_model(self, model_id: str, folder: str, *, optimizer: bool) -> None: ...

    @abstractmethod
    async def load_model(self, model_id: str, folder: str, *, optimizer: bool) -> None: ...

    # Published weights, from trainer to generators

    @abstractmethod
    async def push(self, *, model_id: str) -> int:
        """Return the version of the published weights, of LoRA those of the adapter.

        Raises LimitReachedError if there is no room.
        """

    @abstractmethod
    def get_weights(self, version: int) -> int:
        """Return the weights that generators need for a version: itself, or of adapters `BASE`."""

    @abstractmethod
    async def switch(self, weights: int) -> None:
        """Let all generators have these weights; no request runs meanwhile.

        `BASE` are those beside the adapters of the model `KEEPER`.
        """

    @abstractmethod
    async def forget(self, version: int) -> None:
        """Drop a version that nothing samples from any more."""

    # Generators; `version` is an adapter, or the weights that `switch` has given them

    @abstractmethod
    async def generate(
        self, prompts: Sequence[np.ndarray], *, sampling: SamplingParams, version: int | None
    ) -> list[list[Completion]]:
        """Return the completions of each prompt."""

    @abstractmethod
    async def prompt_logprobs(
        self, prompt: np.ndarray, *, top_k: int, version: int | None
    ) -> PromptLogprobs:
        """Return the logprobs of a prompt's tokens, and the `top_k` likeliest at each position."""

    @abstractmethod
    async def aclose(self) -> None:
        """End all workers; their calls fail."""


class TinkerBackend(Configurable):
    """Base model, and workers behind queues: all that a service needs to compute.

    Calls about models in training run one after another, in blocks of `lock_trainer`; a call that
    is cancelled before its turn is never made. Samples come from versions, which `publish` and
    `open` return. Versions of adapters, and the base, are sampled from at the same time.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        base: BaseModelFolder.Config = field(
            default_factory=lambda: BaseModelFolder.Config(name="tiny")
        )
        """The model that is offered."""
        cache: str = "~/.cache/relay"
        """Folder of a base model that is drawn from a seed."""

    def __init__(self, *, config: Config) -> None:
        self._workers: TinkerWorkers | None = None
        self.base_model: BaseModelInfo
        self._slots: FairSlots
        self._readers: FairSlots
        self._gate: VersionGate
        self._trainer_lock = FairLock()
        self._failure: Exception | None = None

    @abstractmethod
    def _open_base(self) -> BaseModelFolder:
        """Open the base model; called in a thread."""

    @abstractmethod
    async def _start_workers(self, base: BaseModelFolder) -> TinkerWorkers: ...

    async def start(self) -> None:
        """Load everything that the first call needs; raise ValueError as `BaseModelFolder`
        does, or if a field does not fit.
        """
        base = await asyncio.to_thread(self._open_base)
        self._workers = workers = await self._start_workers(base)
        # Fresh adapters change nothing; the base stays in memory as long as a model has it.
        await workers.create_model(KEEPER, LoRA.Config(rank=1, target_modules=ATTENTION))
        await workers.switch(BASE)
        self._gate = VersionGate(workers.switch, weights=BASE)
        self._slots = FairSlots(workers.num_sequences)
        self._readers = FairSlots(NUM_READERS)
        self.base_model = base.info

    async def close(self) -> None:
        """End everything; calls in progress fail. Idempotent."""
        # First, so that calls that wait for their turn fail in place of using closed workers.
        self._failure = RuntimeError("the backend is closed")
        workers, self._workers = self._workers, None
        if workers is not None:
            await workers.aclose()

    @asynccontextmanager
    async def lock_trainer(self, owner: str = "") -> AsyncIterator[TinkerWorkers]:
        """Lock the trainer for a block when it is the owner's turn, and yield the workers.

        The block may make calls about models in training, one after another: those of
        `EngineClient`, and `create_model` to `push` of `TinkerWorkers`. All owners wait for its
        end, so it does nothing else, and never locks the trainer again. Refusals of the workers
        become InvalidRequestError.

        Example:
            async with backend.lock_trainer(owner) as trainer:
                await trainer.forward_backward(samples, loss=loss, model_id="a")
        """
        async with self._trainer_lock.lock_for(owner), self._translate_errors() as workers:
            yield workers

    # Weights to sample from, which never change: versions

    async def publish(self, model_id: str, owner: str = "") -> int:
        """Return the version of a copy of the model's weights as they are now.

        Raises:
            LimitReachedError: there is no room for another one.
            InvalidRequestError: nothing could be sampled from the weights.
        """
        async with self.lock_trainer(owner) as workers:
            return await self._push(workers, model_id)

    async def open(self, lora: LoRA.Config | None, folder: Path | None, owner: str = "") -> int:
        """Return the version of a folder of `save_model`, or with None that of the base model."""
        if folder is None:
            async with self._translate_errors():
                return BASE
        async with self.lock_trainer(owner) as workers:
            return await self._load(workers, lora, folder)

    async def forget(self, version: int) -> None:
        """Drop a version that has no requests any more; the base stays."""
        if version != BASE and self._workers is not None:
            await self._workers.forget(version)

    async def sample(self, version: int, request: SampleRequest, owner: str = "") -> SampleOutput:
        """Answer a request; a cancelled one ends its work at the next token."""
        sampling, top_k = request.sampling, request.topk_prompt_logprobs
        # A prompt that fills the context has no completion, but its logprobs.
        completions, of_prompt = [_EMPTY] * sampling.num_samples, None
        async with self._translate_errors() as workers:
            if sampling.max_tokens:
                # All at once: the slots decide how many of them run.
                parts = self._divide(workers, sampling)
                drawn = await gather_or_cancel(
                    self._generate(workers, version, request, part, owner) for part in parts
                )
                completions = list(chain.from_iterable(drawn))
            if request.prompt_logprobs or top_k:
                weights = workers.get_weights(version)
                # Readers have places of their own: they are short, and would wait for long samples.
                async with self._readers.take(owner), self._gate.use(weights):
                    of_prompt = await workers.prompt_logprobs(
                        request.prompt, top_k=top_k, version=version
                    )
        return SampleOutput(completions=completions, of_prompt=of_prompt)

    def _divide(self, workers: TinkerWorkers, sampling: SamplingParams) -> list[SamplingParams]:
        """Return the settings of calls that together draw what one call with `sampling` draws."""
        size, total = max(1, workers.num_sequences // NUM_PARTS), sampling.num_samples
        parts: list[SamplingParams] = []
        for first in range(0, total, size):
            num_samples = min(size, total - first)
            parts.append(replace(sampling, num_samples=num_samples, first_sample=first))
        return parts

    async def _generate(
        self,
        workers: TinkerWorkers,
        version: int,
        request: SampleRequest,
        sampling: SamplingParams,
        owner: str,
    ) -> list[Completion]:
        # What the sequence may come to: the sampler cannot stop one that takes others' room.
        num_tokens = len(request.prompt) + sampling.max_tokens
        size = max(1.0, num_tokens / workers.tokens_per_sequence)
        num_slots = math.ceil(sampling.num_samples * size)
        # Slots first: a request that holds up other weights must not wait for anything else.
        async with (
            self._slots.take(owner, num_slots),
            self._gate.use(workers.get_weights(version)),
        ):
            (completions,) = await workers.generate(
                [request.prompt], sampling=sampling, version=version
            )
        return completions

    # Blocks of `lock_trainer`

    async def _push(self, workers: TinkerWorkers, model_id: str) -> int:
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

    async def _load(self, workers: TinkerWorkers, lora: LoRA.Config | None, folder: Path) -> int:
        """Publish saved weights, by a model that exists only meanwhile."""
        model_id = f"loader {secrets.token_hex(4)}"
        await workers.create_model(model_id, lora)
        try:
            await workers.load_model(model_id, str(folder.absolute()), optimizer=False)
            return await self._push(workers, model_id)
        finally:
            # The published version is a copy, and stays.
            await workers.delete_model(model_id)

    @asynccontextmanager
    async def _translate_errors(self) -> AsyncIterator[TinkerWorkers]:
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
