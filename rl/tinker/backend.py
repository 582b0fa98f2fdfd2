"""The Tinker backend: locks, turns and errors between the service and the workers that compute.

The service checks names, owners, order and values; it never overlaps two calls about one model. The
workers are threads of this process (rl/tinker/local.py) or actors (actors/tinker.py).
"""

from __future__ import annotations

import asyncio
import secrets
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from tinker import types as wire

from rl.config.configurable import Configurable
from rl.engine_client import EngineClient
from rl.models.generate import DivergedWeightsError, Interrupted, PromptLogprobs
from rl.models.lora import LoRA
from rl.rollouts.samples import make_demonstration_sample
from rl.tinker.base_model import BaseModelFolder, make_lora_config
from rl.tinker.turns import FairLock, Turns
from rl.tinker.types import (
    BaseModelInfo,
    InvalidRequestError,
    SampleOutput,
    SampleRequest,
    UnsavedError,
)
from rl.training.failures import NonFiniteLossError
from rl.training.models_by_id import ModelError, UnsavedModelError
from rl.types import Completion, SamplingParams
from rl.utils.errors import RunError

PROBED_TOKENS = 16
"""Tokens that a model is probed with before its weights are published."""


class BackendLostError(RunError):
    """Processes of the backend are gone, or in an unknown state."""


class TinkerWorkers(EngineClient):
    """Trainer and generators of models by id, in this process or over actors.

    The methods of `EngineClient` compute on one of the models; the methods below create, save and
    delete models, and publish and sample their weights. No two calls about a model may overlap. A
    `RunError` other than `ModelError` ends all workers.
    """

    num_sequences: int
    """Sequences that several owners draw at once; 0: the owners draw one after another."""

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
        """Return the version of the published weights; raise LimitReachedError if there is no
        room.
        """

    @abstractmethod
    async def pull(self, version: int) -> object:
        """Let all generators pull a version; no request runs meanwhile."""

    @abstractmethod
    async def forget(self, version: int) -> None:
        """Drop a version that nothing samples from any more."""

    # Generators

    @abstractmethod
    async def generate_in_turns(
        self, prompts: Sequence[np.ndarray], *, sampling: SamplingParams
    ) -> list[list[Completion]] | Interrupted[list[list[Completion]]]:
        """Return the completions, or after `interrupt` what is left to do."""

    @abstractmethod
    async def interrupt(self) -> None:
        """End the calls of `generate_in_turns` under way soon; one may be missed."""

    @abstractmethod
    async def prompt_logprobs(self, prompt: np.ndarray, *, top_k: int) -> PromptLogprobs:
        """Return the logprobs of a prompt's tokens, and the `top_k` likeliest at each position."""

    @abstractmethod
    async def aclose(self) -> None:
        """End all workers; their calls fail."""


class TinkerBackend(Configurable):
    """Base model, and workers behind a lock and turns: all that a service needs to compute.

    Calls about models in training run one after another, in blocks of `lock_trainer`; a call that
    is cancelled before its turn is never made. Samples come from versions, which `publish` and
    `open` return.
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
        self._turns: Turns
        self._num_interruptions = 0
        self._reading: asyncio.Semaphore
        """Prompts whose logprobs are computed at once, which cannot be interrupted."""
        self._trainer_lock = FairLock()
        self._base_version: int | None = None
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
        self._workers = await self._start_workers(base)
        capacity = self._workers.num_sequences
        self._turns = Turns(self._workers.pull, interrupt=self._interrupt, capacity=capacity)
        self._reading = asyncio.Semaphore(max(1, capacity // 8))
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
        async with self.lock_trainer(owner) as workers:
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
        self, workers: TinkerWorkers, request: SampleRequest
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

    async def _load(
        self, workers: TinkerWorkers, lora: LoRA.Config | None, folder: Path | None
    ) -> int:
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
