"""From a `generate` call to engine requests, and from their tokens back to its completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from actors.vllm.lockstep import Request
from rl.models.sampling import check_sampling, request_seeds
from rl.types import Completion, FinishReason, SamplingParams

SMALLEST_TEMPERATURE = 0.01
"""vLLM silently raises a smaller one to this."""


class Call:
    """A `generate` call in progress: its future resolves when the last of its samples has ended."""

    def __init__(self, *, num_prompts: int, num_samples: int) -> None:
        self.future: asyncio.Future[list[list[Completion]]] = asyncio.get_running_loop().create_future()
        self._num_samples = num_samples
        self._completions: list[Completion | None] = [None] * (num_prompts * num_samples)
        self._num_left = len(self._completions)

    def put(self, place: int, completion: Completion) -> None:
        """`place` counts samples within prompts."""
        self._completions[place] = completion
        self._num_left -= 1
        if self._num_left == 0 and not self.future.done():
            made = [c for c in self._completions if c is not None]
            step = self._num_samples
            self.future.set_result([made[i : i + step] for i in range(0, len(made), step)])

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(kw_only=True, slots=True)
class Sample:
    """What one request has got so far."""

    call: Call
    place: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def finish(self, reason: FinishReason, *, policy_version: int) -> None:
        completion = Completion(
            token_ids=np.array(self.token_ids, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            policy_versions=np.full(len(self.token_ids), policy_version, dtype=np.int32),
            finish_reason=reason,
        )
        self.call.put(self.place, completion)


def make_requests(
    prompts: Sequence[np.ndarray], sampling: SamplingParams, *, seed: int, first_id: int
) -> list[Request]:
    """One for each sample of each prompt, in order; `seed` is of the call."""
    seeds = request_seeds(prompts, seed=seed, num_samples=sampling.num_samples)
    pairs = [(prompt, s) for prompt, of_prompt in zip(prompts, seeds, strict=True) for s in of_prompt]
    return [
        Request(
            id=first_id + i,
            prompt=np.asarray(prompt, dtype=np.int32),
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=tuple(sampling.stop_token_ids),
            seed=s,
        )
        for i, (prompt, s) in enumerate(pairs)
    ]


def check_call(
    prompts: Sequence[np.ndarray], sampling: SamplingParams, *, max_model_len: int, vocab_size: int
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
        if length == 0:
            raise ValueError(f"prompt {i} is empty")
        if length + sampling.max_tokens > max_model_len:
            raise ValueError(
                f"prompt {i} has {length} tokens: with sampling.max_tokens={sampling.max_tokens} "
                f"that is more than generator.max_model_len={max_model_len}"
            )
        lowest, highest = int(np.min(prompt)), int(np.max(prompt))
        if lowest < 0 or highest >= vocab_size:
            raise ValueError(
                f"prompt {i} has token id {lowest if lowest < 0 else highest}: must be 0 to {vocab_size - 1}"
            )
