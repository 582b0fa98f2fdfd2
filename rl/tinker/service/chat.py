"""Conversations of OpenAI's and Anthropic's clients, sampled as the client `tinker` samples.

    rl/agents/endpoint/app.py -> OwnerAnswerer -> StatelessAnswerer -> OpenWeights, TinkerBackend

A model is the base model, by any of its names, or the path of saved sampler weights:
`tinker://<model>/sampler_weights/<name>`, also behind the base model's name and a semicolon. There
are no sessions: weights open with their first conversation, and close as those of sessions do.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from fastapi import Request

from rl.agents.endpoint.answering import Answer, make_model_error
from rl.agents.endpoint.retries import RequestIdentity
from rl.agents.endpoint.stateless import ChatModel, StatelessAnswerer
from rl.agents.types import ChatRequest, RequestError
from rl.models.files.tokenizer import open_tokenizer
from rl.rollouts.renderer import Renderer, RendererConfig, make_renderer
from rl.tinker.backend import TinkerBackend
from rl.tinker.queues import FairLock
from rl.tinker.service.sampling import OpenWeights
from rl.tinker.service.storage import Storage, Stored
from rl.tinker.types import (
    BaseModelInfo,
    BusyError,
    InvalidRequestError,
    NotFoundError,
    SampleRequest,
    TinkerError,
)
from rl.types import Completion, SamplingParams
from rl.utils.threads import WorkerThread

log = logging.getLogger(__name__)

PATH = "tinker://"
CLOSED = "the server is closing"


class Chats:
    """Conversations of all owners with the models of a server."""

    def __init__(
        self,
        *,
        backend: TinkerBackend,
        storage: Storage,
        weights: OpenWeights,
        renderer: RendererConfig,
    ) -> None:
        self._backend = backend
        self._storage = storage
        self._weights = weights
        # Clients send the whole conversation each time, so that no reply is looked at in hindsight.
        self._renderer = replace(renderer, keep_replies=renderer.kind == "template")
        self._turns = FairLock()
        self._thread = WorkerThread("renderer")
        self._model: asyncio.Task[ChatModel] | None = None
        self._samples: set[asyncio.Task[Completion]] = set()
        self._is_closed = False

    @property
    def has_work(self) -> bool:
        return bool(self._samples)

    def find(self, request: Request) -> OwnerAnswerer:
        """Return what answers the requests of a key."""
        return OwnerAnswerer(chats=self, owner=request.state.owner)

    def end_samples(self) -> None:
        """End all samples, and answer nothing more. Idempotent."""
        self._is_closed = True
        for sample in self._samples:
            sample.cancel()

    def close(self) -> None:
        """End the thread of the renderer, for which nobody may wait any more. Idempotent."""
        self.end_samples()
        self._thread.stop(timeout_s=0)

    # For the answerers

    def list_names(self) -> list[str]:
        base = self._backend.base_model
        return [base.name, *base.aliases]

    async def open(self, name: str, owner: str) -> StatelessAnswerer:
        """Return the answerer of a model; raise RequestError if this owner has none of the name."""
        self._check_open()
        source = self._find_source(name, owner)
        # A task, because a client that disconnects must not stop it for the others.
        if self._model is None or (self._model.done() and self._model.exception() is not None):
            self._model = asyncio.create_task(self._make_model())
        try:
            model = await asyncio.shield(self._model)
        except ValueError as error:
            base = self._backend.base_model.name
            raise RequestError(
                f"model {base!r} has no usable chat template: {error}", status=400, field="model"
            ) from error
        return StatelessAnswerer(
            model=model,
            generator=_Sampler(chats=self, source=source, owner=owner),
            names=(),
            turn=partial(self._turns.lock_for, owner),
        )

    def _find_source(self, name: str, owner: str) -> Stored | None:
        """Return saved weights, or None for the base model."""
        base = self._backend.base_model
        chosen, _, path = name.rpartition(";")
        if not path.startswith(PATH):
            chosen, path = name, ""
        if (chosen or not path) and base.resolve_alias(chosen) != base.name:
            raise make_model_error(
                f"must be {' or '.join(self.list_names())}, or the path of sampler weights "
                f"({PATH}<training run>/sampler_weights/<name>)",
                model=name,
            )
        if not path:
            return None
        try:
            return self._storage.find_weights(path, "sampler", owner, base_model=base.name)
        except (NotFoundError, InvalidRequestError) as error:
            # The same words whether it never was, was deleted, or belongs to another owner.
            raise make_model_error(str(error), model=name) from None

    async def _make_model(self) -> ChatModel:
        """Open the base model's tokenizer; raise ValueError if conversations cannot be rendered."""
        base, config = self._backend.base_model, self._renderer
        renderer = await self._thread.run(_open_renderer, config, base)
        return ChatModel(
            renderer=renderer,
            thread=self._thread,
            max_context=base.max_context_length,
            thinks=config.thinking,
            min_temperature=base.min_temperature,
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise RequestError(CLOSED, status=503)

    async def draw(
        self, request: SampleRequest, *, source: Stored | None, owner: str
    ) -> Completion:
        """Return a completion of some weights; a cancelled call ends its work at the next token."""
        self._check_open()
        if source is not None:
            # It may have been deleted while the conversation was rendered.
            self._storage.find(source.path, owner)
        weights = self._weights.open(source, owner)
        self._weights.acquire(weights)

        # As unique as the request ids of sessions, beside which a ledger has it.
        name = f"conversation {secrets.token_hex(8)}"

        async def sample() -> Completion:
            output = await self._weights.sample(weights, request, owner=owner, name=name)
            return output.completions[0]

        task = asyncio.create_task(sample(), name="sample of a conversation")
        self._samples.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._is_closed:
                raise RequestError(CLOSED, status=503) from None
            raise
        finally:
            self._samples.discard(task)
            self._weights.release(weights)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Sampler:
    """An `rl.protocols.TokenGenerator` of some weights, for one owner."""

    chats: Chats
    source: Stored | None
    owner: str

    async def generate(
        self, prompts: Sequence[np.ndarray], *, sampling: SamplingParams, session: str | None = None
    ) -> list[list[Completion]]:
        (prompt,) = prompts
        request = SampleRequest(prompt=prompt, sampling=sampling)
        return [[await self.chats.draw(request, source=self.source, owner=self.owner)]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnerAnswerer:
    """An `rl.agents.endpoint.app.Answerer` of all models that an owner may sample from."""

    chats: Chats
    owner: str

    async def reply(
        self, request: ChatRequest, *, identity: RequestIdentity, role: str = ""
    ) -> Answer:
        """Return the reply to a conversation; raise RequestError if there is none."""
        with _translate_errors():
            answerer = await self.chats.open(request.model, self.owner)
            return await answerer.reply(request, identity=identity, role=role)

    def count_refused(self) -> None:
        """Do nothing, as `StatelessAnswerer`."""

    def mark_delivered(self, answer: Answer) -> None:
        """Do nothing, as `StatelessAnswerer`."""

    def mark_cut_off(self, answer: Answer) -> None:
        """Do nothing, as `StatelessAnswerer`."""

    async def count_tokens(self, request: ChatRequest) -> int:
        with _translate_errors():
            answerer = await self.chats.open(request.model, self.owner)
            return await answerer.count_tokens(request)

    def list_models(self) -> list[str]:
        return self.chats.list_names()


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Turn every error into a RequestError, without the internals of the server."""
    try:
        yield
    except RequestError:
        raise
    except TinkerError as error:
        again = 1.0 if isinstance(error, BusyError) else None
        raise RequestError(str(error), status=error.status, retry_after_s=again) from error
    except Exception as error:
        log.exception("a conversation failed")
        raise RequestError("the server failed; its log has the reason", status=500) from error


def _open_renderer(config: RendererConfig, base: BaseModelInfo) -> Renderer:
    folder = Path(base.tokenizer_folder)
    tokenizer, _ = open_tokenizer(folder, vocab_size=base.vocab_size)
    return make_renderer(config, tokenizer=tokenizer, stop_token_ids=base.stop_token_ids)
