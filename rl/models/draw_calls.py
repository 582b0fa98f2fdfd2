"""Calls of a local sampler, and which of them are answered together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rl.models.files.tokenizer import open_tokenizer
from rl.models.generate import CompletionRequest, DivergedWeightsError, Drawing, build_requests
from rl.models.low_rank.types import NONE
from rl.models.sampling import spells_any
from rl.models.spec import ModelSpec
from rl.types import Completion, SamplingParams

MAX_SEQUENCES = 256
"""Most completions that are decoded at once for several calls; a single call may have more."""


@dataclass(slots=True, kw_only=True, eq=False)
class DrawCall:
    """The completions of one call, which can be drawn with those of others."""

    sampling: SamplingParams
    requests: list[CompletionRequest]
    num_tokens: int
    """Tokens of all prompts."""
    adapter: int | None
    """Version in the model's bank, or NONE; None: the newest one when it is drawn."""
    cancelled: threading.Event
    group: SharedDrawing | None = None
    """The calls that are drawn together, once they are."""
    is_alone: bool = False
    """True after an error of a group, in which another call may have caused it."""
    completions: list[Completion] | None = None
    error: DivergedWeightsError | None = None

    @property
    def is_done(self) -> bool:
        return self.completions is not None or self.error is not None

    @property
    def shared_settings(self) -> tuple[float, ...]:
        """Settings that calls have in common if they are answered together."""
        return self.sampling.temperature, self.sampling.top_k, self.sampling.top_p


@dataclass(slots=True, kw_only=True, eq=False)
class SharedDrawing:
    """Calls that are drawn together."""

    calls: list[DrawCall]
    drawing: Drawing
    slice: asyncio.Task[None] | None = None
    """The latest slice of the drawing after the first."""

    @property
    def is_wanted(self) -> bool:
        """False if all calls are cancelled."""
        return not all(call.cancelled.is_set() for call in self.calls)

    @property
    def has_ended_calls(self) -> bool:
        """True if a call could be answered, while others may go on."""
        return any(True for _ in self._list_ended())

    def deliver(self, policy_version: int) -> None:
        """Give their completions to the calls that have ended; see `Drawing.build_completion`."""
        for call, first in list(self._list_ended()):
            completions: list[Completion] = []
            for n in range(first, first + len(call.requests)):
                completions.append(self.drawing.build_completion(n, policy_version))
            call.completions = completions

    def _list_ended(self) -> Iterator[tuple[DrawCall, int]]:
        """Yield ended calls without an answer, with the number of their first request."""
        first = 0
        for call in self.calls:
            numbers = range(first, first + len(call.requests))
            if not call.is_done and all(map(self.drawing.has_ended, numbers)):
                yield call, first
            first += len(call.requests)

    def fail(self, error: DivergedWeightsError) -> None:
        """Give the error to the call, or let each of several be drawn again alone.

        A forward spreads NaN from one call to others: their attention multiplies it by 0.
        """
        for call in self.calls:
            if len(self.calls) == 1:
                call.error = error
            else:
                call.group, call.is_alone = None, True


class DrawCalls:
    """Calls that wait for the sampler, and the rule by which they share a forward.

    The sampler decodes one group of calls at a time. A call alone would leave it half idle, so
    calls with the same settings are drawn as one batch (`group`).
    """

    def __init__(self, *, spec: ModelSpec, hf_assets_path: str | None, max_tokens: int) -> None:
        """Store the arguments.

        Args:
            hf_assets_path: folder of the tokenizer, for stop texts; None refuses them.
            max_tokens: most tokens of the prompts that are read at once for several calls.
        """
        self._spec = spec
        self._folder = hf_assets_path
        self._max_tokens = max_tokens
        self.waiting: list[DrawCall] = []
        """Calls under way, which can be answered with others; changed by the event loop alone."""

    def create_call(
        self,
        prompts: Sequence[np.ndarray],
        *,
        sampling: SamplingParams,
        adapter: int | None = NONE,
    ) -> DrawCall:
        """Return a call; raise ValueError as `LocalBackend.generate`."""
        if sampling.stop_texts and self._folder is None:
            raise ValueError(
                f"stop_texts={sampling.stop_texts}: needs a tokenizer: set hf_assets_path, or give "
                "stop_token_ids"
            )
        cancelled = threading.Event()

        def ends(tokens: Sequence[int]) -> bool:
            if tokens[-1] in sampling.stop_token_ids:
                return True
            texts = sampling.stop_texts
            return bool(texts) and spells_any(texts, tokens, tokenizer=self._tokenizer)

        context = self._spec.model.rope.max_positions
        requests = build_requests(prompts, sampling=sampling, context=context, ends=ends)
        return DrawCall(
            sampling=sampling,
            requests=requests,
            num_tokens=sum(len(prompt) for prompt in prompts),
            adapter=adapter,
            cancelled=cancelled,
        )

    @cached_property
    def _tokenizer(self) -> Any:
        assert self._folder is not None, "`new` refuses stop texts without a tokenizer"
        return open_tokenizer(Path(self._folder), vocab_size=self._spec.model.vocab_size)[0]

    def group(self, first: DrawCall, *, newest: int = NONE) -> SharedDrawing:
        """Put a call and the waiting calls that fit into a group.

        The first call may exceed the limits alone. Calls of different adapters share a group.

        Args:
            newest: adapter of the calls that name none.
        """
        calls = [first]
        num_sequences, num_tokens = len(first.requests), first.num_tokens
        # A copy, because the sampler's thread reads what the event loop changes.
        for call in tuple(self.waiting):
            if call is first or call.cancelled.is_set() or call.group is not None:
                continue
            if first.is_alone or call.is_alone or call.is_done:
                continue
            # A call without room counts too: a later, smaller call does not overtake it.
            num_sequences += len(call.requests)
            # Parts of a larger call hold the same array, which is read once.
            shares_prompt = call.requests[0].prompt is calls[-1].requests[-1].prompt
            num_tokens += 0 if shares_prompt else call.num_tokens
            has_room = num_sequences <= MAX_SEQUENCES and num_tokens <= self._max_tokens
            if has_room and call.shared_settings == first.shared_settings:
                calls.append(call)

        requests: list[CompletionRequest] = []
        for call in calls:
            adapter = newest if call.adapter is None else call.adapter
            for request in call.requests:
                # A cancelled call ends before its next token, and the others of its group go on.
                is_cancelled = call.cancelled.is_set
                requests.append(replace(request, adapter=adapter, is_cancelled=is_cancelled))
        group = SharedDrawing(calls=calls, drawing=Drawing(requests, sampling=first.sampling))
        for call in calls:
            call.group = group
        return group
