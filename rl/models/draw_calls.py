"""Calls of a local sampler, and which of them are answered together."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rl.models.files.tokenizer import open_tokenizer
from rl.models.generate import CompletionRequest, DivergedWeightsError, Drawing, build_requests
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
    cancelled: threading.Event
    group: SharedDrawing | None = None
    """The calls that are drawn together, once they are."""
    completions: list[Completion] | None = None
    error: DivergedWeightsError | None = None

    @property
    def num_drawn(self) -> int:
        """Tokens so far, those of the calls in its group included."""
        return 0 if self.group is None else self.group.drawing.num_tokens

    @property
    def shared_settings(self) -> tuple[float, ...]:
        """Settings that calls have in common if they are answered together."""
        return self.sampling.temperature, self.sampling.top_k, self.sampling.top_p


@dataclass(slots=True, kw_only=True, eq=False)
class SharedDrawing:
    """Calls that are drawn together."""

    calls: list[DrawCall]
    drawing: Drawing

    @property
    def is_wanted(self) -> bool:
        """False if all calls are cancelled."""
        return not all(call.cancelled.is_set() for call in self.calls)

    def finish(self, completions: Sequence[Completion]) -> None:
        """Give each call its completions."""
        begin = 0
        for call in self.calls:
            end = begin + len(call.requests)
            call.completions = list(completions[begin:end])
            begin = end


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

    def create_call(self, prompts: Sequence[np.ndarray], *, sampling: SamplingParams) -> DrawCall:
        """Return a call; raise ValueError as `LocalBackend.generate`."""
        if sampling.stop_texts and self._folder is None:
            raise ValueError(
                f"stop_texts={sampling.stop_texts}: needs a tokenizer: set hf_assets_path, or give "
                "stop_token_ids"
            )
        cancelled = threading.Event()

        def ends(tokens: Sequence[int]) -> bool:
            # A cancelled call ends token by token, as the others of its group go on.
            if cancelled.is_set() or tokens[-1] in sampling.stop_token_ids:
                return True
            texts = sampling.stop_texts
            return bool(texts) and spells_any(texts, tokens, tokenizer=self._tokenizer)

        context = self._spec.model.rope.max_positions
        requests = build_requests(prompts, sampling=sampling, context=context, ends=ends)
        return DrawCall(
            sampling=sampling,
            requests=requests,
            num_tokens=sum(len(prompt) for prompt in prompts),
            cancelled=cancelled,
        )

    @cached_property
    def _tokenizer(self) -> Any:
        assert self._folder is not None, "`new` refuses stop texts without a tokenizer"
        return open_tokenizer(Path(self._folder), vocab_size=self._spec.model.vocab_size)[0]

    def group(self, first: DrawCall) -> SharedDrawing:
        """Put a call and the waiting calls that fit into a group.

        The first call may exceed the limits alone.
        """
        calls = [first]
        requests = list(first.requests)
        num_sequences, num_tokens = len(first.requests), first.num_tokens
        # A copy, because the sampler's thread reads what the event loop changes.
        for call in tuple(self.waiting):
            if call is first or call.cancelled.is_set() or call.group is not None:
                continue
            # A call without room counts too: a later, smaller call does not overtake it.
            num_sequences += len(call.requests)
            num_tokens += call.num_tokens
            has_room = num_sequences <= MAX_SEQUENCES and num_tokens <= self._max_tokens
            if has_room and call.shared_settings == first.shared_settings:
                calls.append(call)
                requests += call.requests

        group = SharedDrawing(calls=calls, drawing=Drawing(requests, sampling=first.sampling))
        for call in calls:
            call.group = group
        return group
