"""Requests to the engine, and their answers.

Shape legend: T tokens of a prompt or sequence.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rl.models.sampling import End, check_sampling, request_seeds
from rl.types import Completion, FinishReason, SamplingParams
from rl.utils.errors import RunError

SMALLEST_TEMPERATURE = 0.01
"""vLLM silently raises a smaller temperature to this."""
GATHER_S, MOST_GATHER_S = 0.002, 0.02
"""Time without a further call after which an idle engine begins, and the longest wait for it."""
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
    seed: int = 0
    num_begun: int = 0
    """Number of tokens at the end of `prompt` that belong to the completion."""
    adapter: int | None = None
    """Version of the adapter to use; None for the newest weights when it starts."""
    scored: int | None = None
    """Last token of a sequence to score: used in place of a drawn token, and the logprobs of
    `prompt` are returned too."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Drawn:
    """The tokens of one engine step."""

    tokens: list[tuple[int, int, float]] = field(default_factory=list)
    """Request id, token id and logprob in nats."""
    adapters: dict[int, int] = field(default_factory=dict)
    """Version of the adapter of each request with a token here, unless it has none."""
    finished: dict[int, FinishReason] = field(default_factory=dict)
    """Requests that end with this token."""
    prompt_logprobs: dict[int, np.ndarray] = field(default_factory=dict)
    """[T - 1] float32 nats of the prompt's tokens but the first, of scored requests that end here.
    """
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
    answer: asyncio.Future[Any] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """The `Completion`, or the logprobs [T] of a scored sequence."""

    def add(self, token_id: int, logprob: float, policy_version: int) -> None:
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.policy_versions.append(policy_version)

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


class Queue:
    """The samples of an engine that have not ended."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        """Set when there is something to do for the engine's loop."""
        self._samples: dict[int, Sample] = {}
        """Samples that run or wait, by request id."""
        self._waiting: list[Request] = []
        self._aborted: list[int] = []

    async def submit(self, samples: Sequence[Sample]) -> list[Any]:
        """Add samples and wait for their answers; a cancellation ends the unfinished samples."""
        new_ids: set[int] = set()
        for sample in samples:
            # A completion that was finished before the call has its answer already.
            if not sample.answer.done():
                self._samples[sample.request.id] = sample
                self._waiting.append(sample.request)
                new_ids.add(sample.request.id)
        self.changed.set()

        try:
            return await asyncio.gather(*(sample.answer for sample in samples))
        except BaseException:
            # Also if a single sample has failed: nobody waits for the others of the call.
            self._drop(new_ids & self._samples.keys())
            raise

    def count_by_adapter(self) -> Counter[int]:
        """Return the number of requests by adapter that no engine has got yet."""
        asked = (request.adapter for request in self._waiting)
        return Counter(version for version in asked if version is not None)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_only_completions(self) -> bool:
        """True if completions wait alone; a scored sequence is to begin at once."""
        return bool(self._waiting) and all(request.scored is None for request in self._waiting)

    async def gather(self, may_wait: Callable[[], bool]) -> None:
        """Let calls that come together begin together.

        The groups of a batch are calls of their own, which arrive within some ms. If the engine
        began with the first, the others would wait for its first step, and end a step later.
        """
        num_waiting = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MOST_GATHER_S):
                while may_wait() and num_waiting < self.num_waiting:
                    num_waiting = self.num_waiting
                    await asyncio.sleep(GATHER_S)

    def take_waiting(self) -> tuple[Request, ...]:
        """Return the requests that no engine has got yet."""
        waiting, self._waiting = tuple(self._waiting), []
        return waiting

    def take_aborted(self) -> tuple[int, ...]:
        """Return the ids of requests that the engine has to end."""
        aborted, self._aborted = tuple(self._aborted), []
        return aborted

    def abort(self, call_ids: Collection[str] | None) -> int:
        """End the completions of these calls (None: all calls) as they are; return their number."""
        ids: set[int] = set()
        for request_id, sample in self._samples.items():
            if sample.call_id is None:
                continue
            if call_ids is None or sample.call_id in call_ids:
                sample.finish("abort")
                ids.add(request_id)
        self._drop(ids)
        return len(ids)

    def deliver(self, drawn: Drawn, policy_version: int) -> None:
        """Give tokens to their samples, and drop requests that end themselves or have failed.

        `policy_version` is that of the weights, for requests without an adapter.
        """
        # A step may still draw tokens for requests that were dropped since it began: they are
        # looked up, and not expected.
        samples = self._samples
        unwanted = drawn.diverged & samples.keys()
        for request_id in unwanted:
            samples[request_id].fail(
                DivergedError("the model's logprobs are NaN: weights or activations are not finite")
            )

        for request_id, token_id, logprob in drawn.tokens:
            sample = samples.get(request_id)
            if sample is not None:
                version = drawn.adapters.get(request_id, policy_version)
                sample.add(token_id, logprob, version)
                # The engine itself does not see this end.
                if sample.end is not None and sample.end(sample.token_ids):
                    sample.finish("stop")
                    unwanted.add(request_id)

        # Before the ends: the answer of a scored sequence has these logprobs in it.
        for request_id, logprobs in drawn.prompt_logprobs.items():
            sample = samples.get(request_id)
            if sample is not None:
                sample.prompt_logprobs = logprobs

        for request_id, reason in drawn.finished.items():
            sample = samples.pop(request_id, None)
            if sample is not None:
                sample.finish(reason)

        # The engine has ended the finished requests itself, and only the others are aborted.
        unwanted &= samples.keys()
        if unwanted:
            self._drop(unwanted)

    def fail(self, failure: GeneratorError) -> None:
        """Fail every sample, running or waiting."""
        for sample in self._samples.values():
            sample.fail(failure)
        self._samples = {}
        self._waiting = []

    def _drop(self, ids: set[int]) -> None:
        for request_id in ids:
            del self._samples[request_id]

        # A request that still waits is not in the engine, and leaves without an abort.
        running_ids = set(ids)
        waiting: list[Request] = []
        for request in self._waiting:
            if request.id in ids:
                running_ids.remove(request.id)
            else:
                waiting.append(request)
        self._waiting = waiting
        # Sorted, so that all ranks end them in the same order.
        self._aborted += sorted(running_ids)
        self.changed.set()


def make_completion_samples(
    prompts: Sequence[np.ndarray],
    sampling: SamplingParams,
    *,
    seed: int,
    ids: Iterator[int],
    call_id: str,
    begun: Begun | None,
    end: End | None = None,
    adapter: int | None = None,
) -> list[Sample]:
    """Return a sample for each completion, in order.

    Finished completions of `begun` have their answers already.
    """
    samples: list[Sample] = []
    seeds = request_seeds(
        prompts, seed=seed, num_samples=sampling.num_samples, first_sample=sampling.first_sample
    )
    for i, prompt in enumerate(prompts):
        for j, request_seed in enumerate(seeds[i]):
            old = _NOTHING if begun is None else begun[i][j]
            # Nothing is left to draw, and vLLM refuses a request for no tokens.
            if old.finish_reason == "abort" and len(old.token_ids) == sampling.max_tokens:
                old = replace(old, finish_reason="length")

            request = Request(
                id=next(ids),
                prompt=np.concatenate([prompt, old.token_ids]).astype(np.int32),
                max_tokens=sampling.max_tokens - len(old.token_ids),
                sampling=sampling,
                seed=request_seed,
                num_begun=len(old.token_ids),
                adapter=adapter,
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


def make_scoring_samples(
    sequences: Sequence[np.ndarray], *, ids: Iterator[int], adapter: int | None = None
) -> list[Sample]:
    """Return a sample for each sequence; those of one token have their answer already."""
    samples = []
    for sequence in sequences:
        tokens = np.asarray(sequence, dtype=np.int32)
        # vLLM always draws a token. The last token takes its place, so that a sequence may have
        # `max_model_len` tokens.
        request = Request(
            id=next(ids),
            prompt=tokens[:-1],
            max_tokens=1,
            scored=int(tokens[-1]),
            adapter=adapter,
        )
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
    limits = {"max_model_len": max_model_len, "vocab_size": vocab_size}
    check_sequences(prompts, kind="prompt", num_new=sampling.max_tokens, **limits)
    if begun is None:
        return

    fits = len(begun) == len(prompts)
    for of_prompt in begun:
        fits &= len(of_prompt) == sampling.num_samples
        for completion in of_prompt:
            fits &= len(completion.token_ids) <= sampling.max_tokens
    if not fits:
        raise ValueError(
            f"begun must have sampling.num_samples={sampling.num_samples} completions for each of "
            f"{len(prompts)} prompts, of at most sampling.max_tokens={sampling.max_tokens} tokens"
        )


def check_sequences(
    sequences: Sequence[np.ndarray],
    *,
    kind: str = "sequence",
    num_new: int = 0,
    max_model_len: int,
    vocab_size: int,
) -> None:
    """Raise ValueError, naming the sequence, unless it can be scored and get `num_new` tokens."""
    for i, token_ids in enumerate(sequences):
        if len(token_ids) == 0:
            raise ValueError(f"{kind} {i} is empty")
        if len(token_ids) + num_new > max_model_len:
            raise ValueError(
                f"{kind} {i} has {len(token_ids)} tokens, and may get {num_new}: more than "
                f"generator.max_model_len={max_model_len}"
            )
        lowest, highest = int(np.min(token_ids)), int(np.max(token_ids))
        if lowest < 0 or highest >= vocab_size:
            raise ValueError(
                f"{kind} {i} has token id {lowest if lowest < 0 else highest}: must be 0 to "
                f"{vocab_size - 1}"
            )
