"""Requests to the engine, and their answers.

Shape legend: T tokens of a prompt or sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rl.models.sampling import End, check_sampling, request_seeds
from rl.types import Completion, FinishReason, SamplingParams
from rl.utils.errors import RunError

SMALLEST_TEMPERATURE = 0.01
"""vLLM silently raises a smaller temperature to this."""
Begun = Sequence[Sequence[Completion]]
"""[prompt][sample]: completions to continue."""


class GeneratorError(RunError):
    """The generator cannot serve: it has no weights, was closed, or its engine has failed."""


class EngineFailedError(GeneratorError):
    """The generator's engine, on this rank or another, has failed for good."""


class EngineTimeoutError(EngineFailedError, TimeoutError):
    """The engine has failed because a rank did not take part within a deadline."""


class DivergedError(GeneratorError):
    """The weights give a call logprobs that are NaN; with other weights the engine goes on."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Request:
    """One completion to generate, or one sequence to score."""

    id: int
    prompt: np.ndarray
    """[T] int32, including the tokens that a continued completion already has."""
    max_tokens: int
    """Most tokens after `prompt`."""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=1))
    """Temperature, top-p, top-k and stop tokens."""
    seed: int = 0
    num_begun: int = 0
    """Number of tokens at the end of `prompt` that belong to the completion."""
    scored: int | None = None
    """Last token of a sequence to score: used in place of a drawn token, and the logprobs of `prompt` are
    returned too."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Drawn:
    """The tokens of one engine step."""

    tokens: list[tuple[int, int, float]] = field(default_factory=list)
    """Request id, token id and logprob in nats."""
    finished: dict[int, FinishReason] = field(default_factory=dict)
    """Requests that end with this token."""
    prompt_logprobs: dict[int, np.ndarray] = field(default_factory=dict)
    """[T - 1] float32 nats of the prompt's tokens but the first, of scored requests that end here."""
    diverged: set[int] = field(default_factory=set)
    """Requests with a logprob that is NaN."""


@dataclass(kw_only=True, slots=True, eq=False)
class Sample:
    """A request with the part of its answer that is there."""

    request: Request
    call_id: str | None = None
    """Identifies the call for `abort`; None for a call that cannot be aborted."""
    end: End | None = None
    """Called after each token with all tokens of the completion; True ends it."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    prompt_logprobs: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    """[T - 2] float32 nats of a scored sequence's tokens but the first and the last."""
    answer: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The `Completion`, or the logprobs [T] of a scored sequence."""

    def add(self, token_id: int, logprob: float, policy_version: int) -> None:
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.policy_versions.append(policy_version)

    @property
    def has_ended(self) -> bool:
        """True if the last token ends the completion, which the engine itself does not see."""
        return self.end is not None and self.end(self.token_ids)

    def finish(self, reason: FinishReason) -> None:
        """Give the answer, unless the sample has one, failed or was cancelled."""
        if self.answer.done():
            return
        if self.request.scored is not None:
            logprobs = np.concatenate([[0.0], self.prompt_logprobs, self.logprobs])
            self.answer.set_result(logprobs.astype(np.float32))
            return
        completion = Completion(
            token_ids=np.array(self.token_ids, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            policy_versions=np.array(self.policy_versions, dtype=np.int32),
            finish_reason=reason,
        )
        self.answer.set_result(completion)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


def completion_samples(
    prompts: Sequence[np.ndarray],
    sampling: SamplingParams,
    *,
    seed: int,
    first_id: int,
    call_id: str,
    begun: Begun | None,
    end: End | None = None,
) -> list[Sample]:
    """Return a sample for each completion, in order; finished completions of `begun` are their answers already."""
    samples: list[Sample] = []
    seeds = request_seeds(prompts, seed=seed, num_samples=sampling.num_samples)
    for i, prompt in enumerate(prompts):
        for j, request_seed in enumerate(seeds[i]):
            old = _NOTHING if begun is None else begun[i][j]
            if old.finish_reason == "abort" and len(old.token_ids) == sampling.max_tokens:
                old = replace(old, finish_reason="length")
            request = Request(
                id=first_id + len(samples),
                prompt=np.concatenate([prompt, old.token_ids]).astype(np.int32),
                max_tokens=sampling.max_tokens - len(old.token_ids),
                sampling=sampling,
                seed=request_seed,
                num_begun=len(old.token_ids),
            )
            sample = Sample(
                request=request,
                call_id=call_id,
                end=end,
                token_ids=old.token_ids.tolist(),
                logprobs=old.logprobs.tolist(),
                policy_versions=old.policy_versions.tolist(),
            )
            if old.finish_reason != "abort":
                sample.answer.set_result(old)
            samples.append(sample)
    return samples


_NOTHING = Completion(
    token_ids=np.empty(0, dtype=np.int32),
    logprobs=np.empty(0, dtype=np.float32),
    policy_versions=np.empty(0, dtype=np.int32),
    finish_reason="abort",
)


def scoring_samples(sequences: Sequence[np.ndarray], *, first_id: int) -> list[Sample]:
    """Return a sample for each sequence; those of one token have their answer already."""
    samples = []
    for i, sequence in enumerate(sequences):
        tokens = np.asarray(sequence, dtype=np.int32)
        request = Request(id=first_id + i, prompt=tokens[:-1], max_tokens=1, scored=int(tokens[-1]))
        samples.append(Sample(request=request))
        if len(tokens) == 1:
            samples[-1].answer.set_result(np.zeros(1, dtype=np.float32))
    return samples


def check_call(
    prompts: Sequence[np.ndarray],
    sampling: SamplingParams,
    begun: Begun | None = None,
    *,
    max_model_len: int,
    vocab_size: int,
) -> None:
    """Raise ValueError, naming the prompt or the field, if the call cannot be served."""
    check_sampling(sampling)
    if 0 < sampling.temperature < SMALLEST_TEMPERATURE:
        raise ValueError(
            f"sampling.temperature={sampling.temperature}: must be 0 (greedy) "
            f"or at least {SMALLEST_TEMPERATURE}"
        )
    for i, prompt in enumerate(prompts):
        if len(prompt) + sampling.max_tokens > max_model_len:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens: with sampling.max_tokens={sampling.max_tokens} "
                f"that is more than generator.max_model_len={max_model_len}"
            )
        _check_tokens(f"prompt {i}", prompt, vocab_size=vocab_size)
    if begun is None:
        return
    if [len(of_prompt) for of_prompt in begun] != [sampling.num_samples] * len(prompts):
        raise ValueError(
            f"begun must have sampling.num_samples={sampling.num_samples} completions for each of "
            f"{len(prompts)} prompts"
        )
    for i, of_prompt in enumerate(begun):
        for j, one in enumerate(of_prompt):
            length = len(one.token_ids)
            if length > sampling.max_tokens or {len(one.logprobs), len(one.policy_versions)} != {length}:
                raise ValueError(
                    f"begun[{i}][{j}] has {length} tokens: must be at most sampling.max_tokens="
                    f"{sampling.max_tokens}, with as many logprobs and policy_versions"
                )
            if length:
                _check_tokens(f"begun[{i}][{j}]", one.token_ids, vocab_size=vocab_size)


def check_sequences(sequences: Sequence[np.ndarray], *, max_model_len: int, vocab_size: int) -> None:
    """Raise ValueError, naming the sequence, if it cannot be scored."""
    for i, sequence in enumerate(sequences):
        if len(sequence) > max_model_len:
            raise ValueError(
                f"sequence {i} has {len(sequence)} tokens: more than generator.max_model_len={max_model_len}"
            )
        _check_tokens(f"sequence {i}", sequence, vocab_size=vocab_size)


def _check_tokens(name: str, token_ids: np.ndarray, *, vocab_size: int) -> None:
    if len(token_ids) == 0:
        raise ValueError(f"{name} is empty")
    lowest, highest = int(np.min(token_ids)), int(np.max(token_ids))
    if lowest < 0 or highest >= vocab_size:
        raise ValueError(
            f"{name} has token id {lowest if lowest < 0 else highest}: must be 0 to {vocab_size - 1}"
        )
