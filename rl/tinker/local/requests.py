"""Answers of the local backend's samplers: a group of requests in one call of `generate`.

Shape legend: N tokens of one prompt, C tokens of one completion.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl.models.generate import generate
from rl.models.prompt_logprobs import prompt_logprobs
from rl.models.qwen3.model import Qwen3
from rl.models.stop_texts import spells_any
from rl.tinker.errors import InvalidRequestError
from rl.tinker.local.base import Base
from rl.tinker.local.models import SamplerWeights
from rl.tinker.messages import SampledSequence, SampleOutput, SampleRequest, TopLogprobs
from rl.types import Completion, SamplingParams

EMPTY = SampledSequence(tokens=np.empty(0, np.int32), logprobs=np.empty(0, np.float32), stop_reason="length")
"""Where the prompt leaves no room."""

MIN_TEMPERATURE = 1e-30
"""Logits that are divided by less are no numbers of float32 any more."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ask:
    """A request with the weights that are to answer it."""

    weights: SamplerWeights
    request: SampleRequest
    cancelled: threading.Event = field(default_factory=threading.Event)

    def goes_with(self, other: Ask) -> bool:
        """Whether one call of `generate` can answer both."""
        return self.weights is other.weights and self._how == other._how

    @property
    def _how(self) -> tuple[object, ...]:
        sampling = self.request.sampling
        return sampling.temperature, max(0, sampling.top_k), sampling.top_p, self.request.num_samples

    @property
    def max_tokens(self) -> int:
        return max_tokens(self.weights.base, self.request)

    @property
    def wants_prompt(self) -> bool:
        return self.request.prompt_logprobs or self.request.topk_prompt_logprobs > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """Of one request's completions: what `generate` asks after each token."""

    tokenizer: Any
    stop_ids: frozenset[int]
    texts: tuple[str, ...]
    cancelled: threading.Event

    @classmethod
    def of(cls, ask: Ask) -> End:
        base = ask.weights.base
        ids, texts = stops(base, ask.request)
        return cls(tokenizer=base.tokenizer, stop_ids=frozenset(ids), texts=texts, cancelled=ask.cancelled)

    def __call__(self, tokens: Sequence[int]) -> bool:
        return self.cancelled.is_set() or self.stops(tokens)

    def stops(self, tokens: Sequence[int]) -> bool:
        """Whether the last of these tokens is, or ends, what ends a completion."""
        return tokens[-1] in self.stop_ids or spells_any(self.texts, tokens, tokenizer=self.tokenizer)


def max_tokens(base: Base, request: SampleRequest) -> int:
    """Of each completion; 0 where the prompt fills the context."""
    room = base.context - len(request.prompt)
    most = request.sampling.max_tokens
    return room if most is None else min(most, room)


def stops(base: Base, request: SampleRequest) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Token ids, and texts, that end its completions."""
    stop = request.sampling.stop
    given = base.stop_token_ids if stop is None else stop
    return (
        tuple(entry for entry in given if isinstance(entry, int)),
        tuple(entry for entry in given if isinstance(entry, str)),
    )


def answer(group: Sequence[Ask], *, max_sequences: int, is_closed: Callable[[], bool]) -> list[SampleOutput]:
    """Of requests that go together, in order. Those that are cancelled get anything."""
    weights = group[0].weights
    model = weights.base.module(weights.lora, weights.trained)
    # Of a request whose prompt fills the context only the prompt's logprobs are asked for.
    drawing = [ask for ask in group if ask.max_tokens]
    drawn = _draw(model, drawing, max_sequences=max_sequences, is_closed=is_closed)
    sequences = dict(zip(map(id, drawing), drawn, strict=True))
    of_prompts = _of_prompts(model, group)
    return [
        SampleOutput(
            sequences=sequences.get(id(ask), (EMPTY,) * ask.request.num_samples),
            prompt_logprobs=of_prompts[id(ask)][0] if ask.request.prompt_logprobs else None,
            topk_prompt_logprobs=of_prompts[id(ask)][1] if ask.request.topk_prompt_logprobs else None,
        )
        for ask in group
    ]


def _draw(
    model: Qwen3, group: Sequence[Ask], *, max_sequences: int, is_closed: Callable[[], bool]
) -> list[tuple[SampledSequence, ...]]:
    if not group:
        return []
    first = group[0].request
    limits = [ask.max_tokens for ask in group]
    seeds = [ask.request.sampling.seed for ask in group]
    completions = generate(
        model,
        [ask.request.prompt for ask in group],
        sampling=SamplingParams(
            max_tokens=max(limits),
            num_samples=first.num_samples,
            temperature=first.sampling.temperature,
            top_p=first.sampling.top_p,
            top_k=max(0, first.sampling.top_k),
        ),
        max_sequences=max_sequences,
        # PyTorch's own generator starts anew with each model that is made.
        seeds=[secrets.randbits(62) if seed is None else seed for seed in seeds],
        limits=limits,
        ends=[End.of(ask) for ask in group],
        is_cancelled=lambda: is_closed() or all(ask.cancelled.is_set() for ask in group),
    )
    return [tuple(map(sampled_sequence, of_prompt)) for of_prompt in completions]


def sampled_sequence(completion: Completion) -> SampledSequence:
    stopped = completion.finish_reason == "stop"
    return SampledSequence(
        tokens=completion.token_ids,
        logprobs=completion.logprobs,
        stop_reason="stop" if stopped else "length",
    )


def _of_prompts(model: Qwen3, group: Sequence[Ask]) -> dict[int, tuple[np.ndarray, TopLogprobs]]:
    """By the id of each request that asks for them."""
    answers = {}
    # Apart by their k: one that asks for many must not make so many of everybody's.
    for k in sorted({ask.request.topk_prompt_logprobs for ask in group if ask.wants_prompt}):
        asking = [ask for ask in group if ask.wants_prompt and ask.request.topk_prompt_logprobs == k]
        found = prompt_logprobs(model, [ask.request.prompt for ask in asking], top_k=k)
        for ask, of_prompt in zip(asking, found, strict=True):
            top = TopLogprobs(token_ids=of_prompt.top_ids, logprobs=of_prompt.top_logprobs)
            answers[id(ask)] = of_prompt.logprobs, top
    return answers


def check_request(base: Base, request: SampleRequest) -> None:
    """Raise InvalidRequestError naming the field of a request that could not be answered."""
    _check_ids("prompt", np.asarray(request.prompt), base)
    num_tokens = len(request.prompt)
    asks_prompt = request.prompt_logprobs or request.topk_prompt_logprobs > 0
    longest = base.context if asks_prompt else base.context - 1
    if not 1 <= num_tokens <= longest:
        raise InvalidRequestError(
            f"prompt: has {num_tokens} tokens: must be 1 to {longest}; the model's context has {base.context}"
        )
    sampling = request.sampling
    for name, value, valid, rule in (
        ("num_samples", request.num_samples, request.num_samples >= 1, "at least 1"),
        (
            "topk_prompt_logprobs",
            request.topk_prompt_logprobs,
            0 <= request.topk_prompt_logprobs <= base.vocab_size,
            f"0 to {base.vocab_size}, the model's vocabulary",
        ),
        (
            "sampling_params.max_tokens",
            sampling.max_tokens,
            sampling.max_tokens is None or sampling.max_tokens >= 1,
            "at least 1, or none for as many as the context holds",
        ),
        (
            "sampling_params.temperature",
            sampling.temperature,
            sampling.temperature == 0.0 or MIN_TEMPERATURE <= sampling.temperature < math.inf,
            f"0 (greedy), or a finite number of at least {MIN_TEMPERATURE:g}",
        ),
        ("sampling_params.top_p", sampling.top_p, 0.0 < sampling.top_p <= 1.0, "above 0, at most 1"),
        ("sampling_params.top_k", sampling.top_k, sampling.top_k >= -1, "at least 1, or -1 or 0 for all"),
    ):
        if not valid:
            raise InvalidRequestError(f"{name}={value}: must be {rule}")
    _check_stop(base, sampling.stop)


def _check_stop(base: Base, stop: Sequence[str] | Sequence[int] | None) -> None:
    given = stop or ()
    kinds = {type(entry) for entry in given}
    if not (kinds <= {str} or kinds <= {int}):
        raise InvalidRequestError(f"sampling_params.stop={stop}: must be all texts or all token ids")
    if "" in given:
        raise InvalidRequestError("sampling_params.stop: has an empty text, which would end all at once")
    if kinds == {int}:
        _check_ids("sampling_params.stop", np.array(given), base)


def _check_ids(name: str, ids: np.ndarray, base: Base) -> None:
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidRequestError(f"{name}: is of {ids.dtype} and shape {list(ids.shape)}: must be token ids")
    if ids.size and not (ids.min() >= 0 and ids.max() < base.vocab_size):
        outside = ids[(ids < 0) | (ids >= base.vocab_size)][0]
        raise InvalidRequestError(
            f"{name}: has token id {outside}: must be 0 to {base.vocab_size - 1}, the model's vocabulary"
        )
