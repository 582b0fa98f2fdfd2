"""One episode at the endpoint: requests become turns of its record.

A request that is repeated gets the reply of the first one, also while that is still being sampled.
A client that disconnects cancels its reply, unless it asks again soon.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rl.agents.endpoint.answering import (
    Answer,
    check_model,
    honour_sampling,
    make_context_error,
    plan_turn,
    read_answer,
)
from rl.agents.endpoint.branches import Conversations, list_conversations
from rl.agents.endpoint.record import EpisodeRecord
from rl.agents.endpoint.retries import RequestIdentity, SharedReplies, read_error
from rl.agents.endpoint.turns import PlannedTurn
from rl.agents.settings import ClientRules, EpisodeSettings
from rl.agents.types import ChatRequest, RequestError
from rl.protocols import TokenGenerator
from rl.rollouts.renderer import Renderer
from rl.types import BranchRole, EndReason, SamplingParams
from rl.utils.pace import Pace

logger = logging.getLogger(__name__)

LONG_CHARS = 100_000
"""Characters of a request that take tens of milliseconds to tokenize."""
UNANSWERED_PER_REPLY = 10
UNANSWERED_AT_LEAST = 100
"""Requests without a reply that an episode may make: so many for each reply that it may have, and
so many more. They end an agent that repeats a request that is refused."""
MAX_ASKED = 16
"""Most values of a field that are recorded."""
_told_harmless: set[str] = set()
"""Fields that the log has told of."""


@dataclass(kw_only=True, eq=False)
class AgentEpisode:
    """Conversations of one agent with the model."""

    generator: TokenGenerator
    renderer: Renderer
    settings: EpisodeSettings
    rules: ClientRules = field(default_factory=ClientRules)
    pace: Pace = field(default_factory=Pace)
    """Turns of all episodes."""
    counts: Counter[str] = field(default_factory=Counter)
    """Requests with refused ones, retries, disconnections, fields without effect, by name."""
    asked: dict[str, list[Any]] = field(default_factory=dict)
    """Model and sampling that clients asked for, each value once, by field."""
    posted: dict[str, float] = field(default_factory=dict)
    """Numbers that the agent has posted; `reward` is its reward."""
    reached: EndReason | None = None
    """Limit that a request has met."""

    def __post_init__(self) -> None:
        self.record = EpisodeRecord(
            renderer=self.renderer, announces_tools=self.rules.announces_tools
        )
        self._replies = SharedReplies()
        self._num_asked: Counter[bytes] = Counter()
        self._num_under_way = 0
        """Replies that are being sampled."""
        self._num_reserved = 0
        """Tokens of their prompts, and the most that the replies may have."""
        self._released = asyncio.Event()
        """Set when the next reply ends."""
        self._recording = asyncio.Lock()
        """Held by who reads or changes the record, which long texts do in a thread."""
        self._is_closed = False

    async def reply(
        self, request: ChatRequest, *, identity: RequestIdentity, role: str = ""
    ) -> Answer:
        """Return the reply to a request; the same one to a request that is repeated.

        Raises RequestError for a request that is not answered.
        """
        try:
            shared = self._replies.find(identity)
        except RequestError:
            self.count_refused()
            raise
        if shared is not None:
            self.counts["retries"] += 1
        else:
            shared = self._replies.start(self._answer(request, role=role), identity=identity)
        shared.add_waiter()
        try:
            return await asyncio.shield(shared.task)
        except asyncio.CancelledError:
            if shared.task.cancelled():
                raise RequestError(
                    "the episode has ended", status=409, code="episode_ended"
                ) from None
            self.counts["disconnects"] += 1
            raise
        finally:
            shared.remove_waiter()

    def count_refused(self) -> None:
        """Count a request that is refused before it asks for a reply.

        Raises RequestError if there were too many without a reply.
        """
        self._check_num_unanswered()
        self.counts["requests"] += 1

    def mark_delivered(self, answer: Answer) -> None:
        """Note that the client has got its whole reply."""
        self.record.undelivered.discard(answer.number)
        shared = self._replies.find_answered(answer)
        if shared is not None:
            shared.num_given += 1

    def mark_cut_off(self, answer: Answer) -> None:
        """Count a client that has not taken its reply after all."""
        self.counts["cut_off"] += 1
        shared = self._replies.find_answered(answer)
        if shared is not None:
            shared.num_given -= 1
            if not shared.is_delivered:
                self.record.undelivered.add(answer.number)

    def close(self) -> None:
        """End the episode: replies under way are cancelled, later requests are refused."""
        self._is_closed = True
        self._replies.cancel()

    def check_open(self) -> None:
        """Raise RequestError if the episode has ended."""
        if self._is_closed:
            raise RequestError("the episode has ended", status=409, code="episode_ended")

    def list_conversations(self, *, trained: Collection[BranchRole]) -> Conversations:
        """Return the turns so far, and their branches."""
        return list_conversations(self.record, trained=trained)

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the tokens of a conversation, as a reply to it would read them."""
        return len((await self._plan(request, is_preview=True)).context_ids)

    def list_models(self) -> list[str]:
        """Return the model names that are accepted, or that of any."""
        return [*self.rules.models] or [self.rules.name]

    async def _answer(self, request: ChatRequest, *, role: str) -> Answer:
        self.check_open()
        self._check_number()
        self.counts["requests"] += 1
        check_model(request, self.rules.models)
        self._note_fields(request)
        self._num_under_way += 1
        try:
            return await self._sample(request, role=role)
        finally:
            self._num_under_way -= 1

    def _check_number(self) -> None:
        """Raise RequestError if the episode has had its replies, or too many requests without."""
        most = self.settings.max_requests
        num_replies = len(self.record.turns) + self._num_under_way
        if num_replies >= most:
            self._stop_at("turns", f"its {most} replies")
        self._check_num_unanswered()

    def _check_num_unanswered(self) -> None:
        """Raise RequestError if the episode has had too many requests without a reply."""
        most = UNANSWERED_PER_REPLY * self.settings.max_requests + UNANSWERED_AT_LEAST
        num_replies = len(self.record.turns) + self._num_under_way
        if self.counts["requests"] - num_replies >= most:
            # No limit that the rollout has reached: an agent that fails now has failed.
            raise _make_limit_error(f"{most} requests without a reply")

    async def _sample(self, request: ChatRequest, *, role: str) -> Answer:
        """Plan a turn, sample its reply, and record it."""
        plan = await self._plan(request, role=role)
        await self._wait_for_tokens(request, plan)
        sampling = self._choose_sampling(request, plan)
        num_reserved = len(plan.prompt_ids) + sampling.max_tokens
        self._num_reserved += num_reserved
        try:
            ((completion,),) = await self.generator.generate(
                [plan.context_ids], sampling=sampling, session=self.settings.key
            )
            await self.pace.wait_for_turn()
            self.check_open()
            answer = read_answer(
                request, plan, completion, renderer=self.renderer, model=self.rules.name
            )
            async with self._recording:
                self.record.add(
                    plan,
                    completion,
                    text=answer.text,
                    told=answer.parsed.message,
                    stop_text=answer.reply.stop_text,
                )
        finally:
            self._num_reserved -= num_reserved
            self._released.set()
            self._released = asyncio.Event()
        if request.requires_call and not answer.parsed.calls:
            self.counts["missed_calls"] += 1
        return answer

    async def _plan(
        self, request: ChatRequest, *, role: str = "", is_preview: bool = False
    ) -> PlannedTurn:
        plan = partial(plan_turn, self.record, request, role=role, is_preview=is_preview)
        if not _is_long(request):
            async with self._recording:
                return plan()

        async def plan_in_thread() -> PlannedTurn:
            async with self._recording:
                return await asyncio.to_thread(plan)

        # A thread cannot be cancelled: the record is its own until it is done.
        planning = asyncio.create_task(plan_in_thread())
        planning.add_done_callback(read_error)
        return await asyncio.shield(planning)

    def _note_fields(self, request: ChatRequest) -> None:
        """Record what the client asked for, and count what has no effect."""
        for name, value in (("model", request.model), *request.asked.items()):
            values = self.asked.setdefault(name, [])
            if value not in values and len(values) < MAX_ASKED:
                values.append(value)
        for name in request.harmless:
            self.counts[f"harmless/{name}"] += 1
            if name not in _told_harmless:
                _told_harmless.add(name)
                logger.info("agents send the field %s, which has no effect", name)

    async def _wait_for_tokens(self, request: ChatRequest, plan: PlannedTurn) -> None:
        """Wait for replies under way while they may leave fewer tokens than a reply may have.

        Most replies are shorter than they may be: a reply that begins near the limit of the episode
        has as many tokens as it would have if the agent had asked for one after the other.
        """
        most = self._limit_reply(plan)
        if request.max_tokens is not None:
            most = min(most, request.max_tokens)
        while self._num_reserved and 0 < self._count_left(plan) < self._num_reserved + most:
            await self._released.wait()

    def _limit_reply(self, plan: PlannedTurn) -> int:
        """Return the most tokens of a reply, whatever the episode has left.

        Raises RequestError if there is no room for one.
        """
        settings, num_context = self.settings, len(plan.context_ids)
        room = settings.max_context - num_context
        if room < 1:
            raise make_context_error(num_context, most=settings.max_context)
        return min(settings.sampling.max_tokens, room)

    def _count_left(self, plan: PlannedTurn) -> int:
        """Return the tokens of the episode that a prompt leaves."""
        return self.settings.max_tokens - self.record.num_tokens - len(plan.prompt_ids)

    def _choose_sampling(self, request: ChatRequest, plan: PlannedTurn) -> SamplingParams:
        """Return the sampling of a reply; raise RequestError if there is no room for one."""
        settings = self.settings
        left = self._count_left(plan)
        most = min(self._limit_reply(plan), left)
        if left < 1:
            self._stop_at("tokens", f"its {settings.max_tokens} tokens")

        asked = request.max_tokens
        if asked is not None and asked > most and self.rules.refuses_long_replies:
            raise RequestError(
                f"max_tokens={asked}: at most {most} tokens are left",
                status=400,
                field="max_tokens",
            )
        sampling = settings.sampling
        if self.rules.honours_sampling:
            sampling = honour_sampling(sampling, request)
        return replace(
            sampling,
            num_samples=1,
            max_tokens=most if asked is None else min(most, asked),
            stop_texts=request.stop,
            seed=self._choose_seed(sampling.seed, plan),
        )

    def _choose_seed(self, seed: int | None, plan: PlannedTurn) -> int | None:
        """Return a seed that does not depend on the order of requests that are made together."""
        if seed is None:
            return None
        context = hashlib.blake2b(plan.context_ids.tobytes(), digest_size=16).digest()
        number = self._num_asked[context]
        self._num_asked[context] += 1
        key = f"{seed} request {number} ".encode() + context
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) >> 2

    def _stop_at(self, end: EndReason, limit: str) -> None:
        self.reached = self.reached or end
        raise _make_limit_error(limit)


def _make_limit_error(limit: str) -> RequestError:
    return RequestError(f"the episode has had {limit}, its limit", status=403, code="limit_reached")


def _is_long(request: ChatRequest) -> bool:
    """Return whether other episodes would wait for the tokens of a request."""
    return sum(len(m.content) for m in request.messages) > LONG_CHARS
