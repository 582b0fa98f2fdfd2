"""Replies without a memory: each request brings its whole conversation.

Unlike in an episode the client decides how its reply is sampled. What it asks for and cannot have
is refused, because an evaluation would otherwise measure something else than it says.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from rl.agents.dialects.checking import show_value
from rl.agents.endpoint.answering import (
    SEED_BITS,
    Answer,
    check_model,
    honour_sampling,
    make_context_error,
    plan_turn,
    read_answer,
)
from rl.agents.endpoint.record import EpisodeRecord
from rl.agents.endpoint.retries import RequestIdentity
from rl.agents.endpoint.turns import PlannedTurn
from rl.agents.types import BadRequestError, ChatRequest
from rl.protocols import TokenGenerator
from rl.rollouts.renderer import Renderer
from rl.types import SamplingParams
from rl.utils.threads import WorkerThread

WITHOUT_EFFECT: Mapping[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "min_tokens": 0,
    "stop_token_ids": [],
    "thinking_token_budget": -1,
}
"""The value of each field of a request that changes nothing, and is the only one accepted."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChatModel:
    """A model as its conversations are written and sampled, whatever its weights are."""

    renderer: Renderer
    thread: WorkerThread
    """Thread in which conversations are rendered: a long one takes a second or more."""
    max_context: int
    """Most tokens of a conversation with its reply."""
    announces_tools: bool = True
    """Tell the model which tools a client offers."""
    thinks: bool = True
    """Value of the renderer's option `thinking`."""
    min_temperature: float = 1e-30
    """Lowest temperature above 0 that can be sampled at."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StatelessAnswerer:
    """An `rl.agents.endpoint.app.Answerer` of one model.

    Example:
        >>> answerer = StatelessAnswerer(model=model, generator=generator, names=("tiny",))
        >>> answer = await answerer.reply(request, identity=identity)
        >>> answer.parsed.content
        'Hello.'
    """

    model: ChatModel
    generator: TokenGenerator
    names: tuple[str, ...]
    """Names that clients may ask for the model by; empty: any."""
    turn: Callable[[], AbstractAsyncContextManager[object]] = nullcontext
    """Returns the block in which a conversation is rendered, for clients that take turns."""

    async def reply(
        self, request: ChatRequest, *, identity: RequestIdentity, role: str = ""
    ) -> Answer:
        """Return the reply to a conversation; cancelling the call cancels its sample.

        Raises RequestError for a request that is not answered.
        """
        check_model(request, self.names)
        _refuse_without_effect(request, thinks=self.model.thinks)
        plan = await self._plan(request)
        sampling = self._choose_sampling(request, num_context=len(plan.context_ids))
        ((completion,),) = await self.generator.generate([plan.context_ids], sampling=sampling)
        name = self.names[0] if self.names else "model"
        return read_answer(request, plan, completion, renderer=self.model.renderer, model=name)

    def count_refused(self) -> None:
        """Do nothing: nobody counts."""

    def mark_delivered(self, answer: Answer) -> None:
        """Do nothing: a client that asks again gets another reply."""

    def mark_cut_off(self, answer: Answer) -> None:
        """Do nothing: nobody counts."""

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the tokens of a conversation, as a reply to it would read them."""
        check_model(request, self.names)
        return len((await self._plan(request)).context_ids)

    def list_models(self) -> list[str]:
        return list(self.names)

    async def _plan(self, request: ChatRequest) -> PlannedTurn:
        # A record of nothing but this request: its messages are rendered from the first one on.
        model = self.model
        record = EpisodeRecord(renderer=model.renderer, announces_tools=model.announces_tools)
        async with self.turn():
            return await model.thread.run(plan_turn, record, request)

    def _choose_sampling(self, request: ChatRequest, *, num_context: int) -> SamplingParams:
        """Return the sampling that the client asks for; raise RequestError without room for it."""
        room = self.model.max_context - num_context
        if room < 1:
            raise make_context_error(num_context, most=self.model.max_context)
        asked = request.max_tokens
        # The defaults of the clients' APIs, not those of a run.
        by_default = SamplingParams(
            max_tokens=room if asked is None else min(asked, room),
            stop_token_ids=self.model.renderer.stop_token_ids,
            stop_texts=request.stop,
            seed=secrets.randbits(SEED_BITS),
        )
        sampling = honour_sampling(by_default, request)
        coldest = self.model.min_temperature
        if 0 < sampling.temperature < coldest:
            raise BadRequestError(
                f"temperature={sampling.temperature} must be 0 or at least {coldest:g}",
                field="temperature",
            )
        # Beyond the vocabulary it would be refused, and it cuts nothing off.
        most = len(self.model.renderer.tokenizer)
        return replace(sampling, top_k=0 if sampling.top_k >= most else sampling.top_k)


def _refuse_without_effect(request: ChatRequest, *, thinks: bool) -> None:
    """Raise BadRequestError for a field that asks for something that would not happen."""
    accepted = {
        **WITHOUT_EFFECT,
        "enable_thinking": thinks,
        "chat_template_kwargs": {"enable_thinking": thinks},
    }
    for name, value in request.asked.items():
        # What is not listed is honoured; an empty object asks for nothing.
        if name not in accepted or value == accepted[name] or value == {}:
            continue
        raise BadRequestError(
            f"{name}={show_value(value)} is not supported: must be {accepted[name]!r} or left out",
            field=name,
        )
