"""From a call to engine requests, and from their tokens back to its answer.

Shape legend: T tokens of a prompt or sequence, C tokens of a completion.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np

from actors.vllm.lockstep import Request
from rl.models.prompt_requests import End
from rl.models.sampling import check_sampling, request_seeds
from rl.types import Completion, FinishReason, SamplingParams

SMALLEST_TEMPERATURE = 0.01
"""vLLM silently raises a smaller one to this."""
Begun = Sequence[Sequence[Completion]]
"""[prompt][sample]: completions to go on with."""

T = TypeVar("T")


class Call(Generic[T]):
    """A call in progress: its future resolves when the last of its samples has ended."""

    def __init__(self, *, num_prompts: int, num_samples: int = 1, call_id: str | None = None) -> None:
        """`call_id` is what `abort` knows it by; None for a call that is not aborted."""
        self.future: asyncio.Future[list[list[T]]] = asyncio.get_running_loop().create_future()
        self.call_id = call_id
        self._num_samples = num_samples
        self._results: list[T | None] = [None] * (num_prompts * num_samples)
        self._num_left = len(self._results)

    def put(self, place: int, result: T) -> None:
        """`place` counts samples within prompts."""
        self._results[place] = result
        self._num_left -= 1
        if self._num_left == 0 and not self.future.done():
            made = [r for r in self._results if r is not None]
            step = self._num_samples
            self.future.set_result([made[i : i + step] for i in range(0, len(made), step)])

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(kw_only=True, slots=True)
class Sample:
    """What one completion has got so far."""

    call: Call[Completion]
    place: int
    end: End | None = None
    """Asked after each token."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)

    def add(self, token_id: int, logprob: float, policy_version: int) -> None:
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.policy_versions.append(policy_version)

    @property
    def has_ended(self) -> bool:
        """Whether its last token ends it, which the engine itself does not see."""
        return self.end is not None and self.end(self.token_ids)

    def finish(self, reason: FinishReason) -> None:
        completion = Completion(
            token_ids=np.array(self.token_ids, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            policy_versions=np.array(self.policy_versions, dtype=np.int32),
            finish_reason=reason,
        )
        self.call.put(self.place, completion)


@dataclass(kw_only=True, slots=True)
class Scored:
    """A sequence whose logprobs are asked for: those of its prompt's tokens come with that of its last."""

    call: Call[np.ndarray]
    place: int
    prompt_logprobs: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    """[T - 2] float32, nats, of all tokens but the first and the last."""
    last: float = 0.0

    def add(self, token_id: int, logprob: float, policy_version: int) -> None:
        self.last = logprob

    def finish(self, reason: FinishReason) -> None:
        logprobs = np.concatenate([[0.0], self.prompt_logprobs, [self.last]])
        self.call.put(self.place, logprobs.astype(np.float32))


def completion_call(
    prompts: Sequence[np.ndarray],
    sampling: SamplingParams,
    *,
    seed: int,
    first_id: int,
    call_id: str,
    begun: Begun | None,
    end: End | None = None,
) -> tuple[Call[Completion], list[Request], list[Sample]]:
    """A request and a sample for each completion that is still to be made, in order.

    The others are in the call already. `seed` is of the call; `end` says of a completion's tokens whether
    they end it.
    """
    call: Call[Completion] = Call(num_prompts=len(prompts), num_samples=sampling.num_samples, call_id=call_id)
    requests: list[Request] = []
    samples: list[Sample] = []
    for place, (prompt, request_seed, old) in enumerate(_completions(prompts, sampling, seed, begun)):
        if old is not None and old.finish_reason == "abort" and len(old.token_ids) == sampling.max_tokens:
            old = replace(old, finish_reason="length")
        if old is not None and old.finish_reason != "abort":
            call.put(place, old)
            continue
        sample = Sample(call=call, place=place, end=end)
        parts = [prompt]
        if old is not None:
            parts.append(old.token_ids)
            sample.token_ids = old.token_ids.tolist()
            sample.logprobs = old.logprobs.tolist()
            sample.policy_versions = old.policy_versions.tolist()
        samples.append(sample)
        requests.append(
            Request(
                id=first_id + len(requests),
                prompt=np.concatenate(parts).astype(np.int32),
                max_tokens=sampling.max_tokens - len(sample.token_ids),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                stop_token_ids=tuple(sampling.stop_token_ids),
                seed=request_seed,
                num_begun=len(sample.token_ids),
            )
        )
    return call, requests, samples


def _completions(
    prompts: Sequence[np.ndarray], sampling: SamplingParams, seed: int, begun: Begun | None
) -> Iterator[tuple[np.ndarray, int, Completion | None]]:
    """Prompt, seed and what is there of each completion."""
    seeds = request_seeds(prompts, seed=seed, num_samples=sampling.num_samples)
    for i, (prompt, of_prompt) in enumerate(zip(prompts, seeds, strict=True)):
        for j, request_seed in enumerate(of_prompt):
            yield prompt, request_seed, None if begun is None else begun[i][j]


def scoring_call(
    sequences: Sequence[np.ndarray], *, first_id: int
) -> tuple[Call[np.ndarray], list[Request], list[Scored]]:
    """A request for each sequence that has something to score."""
    call: Call[np.ndarray] = Call(num_prompts=len(sequences))
    requests: list[Request] = []
    samples: list[Scored] = []
    for place, sequence in enumerate(sequences):
        if len(sequence) == 1:
            call.put(place, np.zeros(1, dtype=np.float32))
            continue
        samples.append(Scored(call=call, place=place))
        tokens = np.asarray(sequence, dtype=np.int32)
        requests.append(
            Request(
                id=first_id + len(requests), prompt=tokens[:-1], max_tokens=1, temperature=1.0, top_p=1.0,
                top_k=0, stop_token_ids=(), seed=0, scored=int(tokens[-1]),
            )
        )  # fmt: skip
    return call, requests, samples


def check_call(
    prompts: Sequence[np.ndarray],
    sampling: SamplingParams,
    begun: Begun | None = None,
    *,
    max_model_len: int,
    vocab_size: int,
) -> None:
    """Raises ValueError naming the prompt or the field, its value and what is valid."""
    check_sampling(sampling)
    if 0 < sampling.temperature < SMALLEST_TEMPERATURE:
        raise ValueError(
            f"sampling.temperature={sampling.temperature}: must be 0 (greedy) "
            f"or at least {SMALLEST_TEMPERATURE}"
        )
    for i, prompt in enumerate(prompts):
        length = len(prompt)
        if length and length + sampling.max_tokens > max_model_len:
            raise ValueError(
                f"prompt {i} has {length} tokens: with sampling.max_tokens={sampling.max_tokens} "
                f"that is more than generator.max_model_len={max_model_len}"
            )
        _check_tokens(f"prompt {i}", prompt, vocab_size=vocab_size)
    if begun is not None:
        _check_begun(begun, sampling, num_prompts=len(prompts), vocab_size=vocab_size)


def _check_begun(begun: Begun, sampling: SamplingParams, *, num_prompts: int, vocab_size: int) -> None:
    if len(begun) != num_prompts:
        raise ValueError(f"begun has completions of {len(begun)} prompts: there are {num_prompts} prompts")
    for i, of_prompt in enumerate(begun):
        if len(of_prompt) != sampling.num_samples:
            raise ValueError(
                f"begun[{i}] has {len(of_prompt)} completions: must be "
                f"sampling.num_samples={sampling.num_samples}"
            )
        for j, completion in enumerate(of_prompt):
            name, length = f"begun[{i}][{j}]", len(completion.token_ids)
            if length > sampling.max_tokens:
                raise ValueError(
                    f"{name} has {length} tokens: more than sampling.max_tokens={sampling.max_tokens}"
                )
            for array in ("logprobs", "policy_versions"):
                if (size := len(getattr(completion, array))) != length:
                    raise ValueError(f"{name}.{array} has {size} entries: it has {length} tokens")
            if length:
                _check_tokens(name, completion.token_ids, vocab_size=vocab_size)


def check_sequences(sequences: Sequence[np.ndarray], *, max_model_len: int, vocab_size: int) -> None:
    """Raises ValueError naming the sequence to be scored, what is wrong with it and what is valid."""
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
