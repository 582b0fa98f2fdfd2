"""One request to a sampler of the Tinker backend, answered by one generator.

Shape legend: N tokens of the prompt.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import numpy as np

from actors.tinker_samplers import Replica
from actors.vllm.requests import SMALLEST_TEMPERATURE
from rl.tinker.errors import InvalidRequestError
from rl.tinker.local.base import Base
from rl.tinker.local.requests import EMPTY, check_request, max_tokens, sampled_sequence, stops
from rl.tinker.messages import SampledSequence, SampleOutput, SampleRequest
from rl.types import SamplingParams


def check_served(base: Base, request: SampleRequest) -> None:
    """Raise InvalidRequestError naming the field of a request that generators could not answer."""
    check_request(base, request)
    if request.topk_prompt_logprobs:
        raise InvalidRequestError(
            f"topk_prompt_logprobs={request.topk_prompt_logprobs}: must be 0: the engine of this backend "
            "knows the logprobs of the prompt's own tokens only (prompt_logprobs); the local backend has both"
        )
    if 0.0 < request.sampling.temperature < SMALLEST_TEMPERATURE:
        raise InvalidRequestError(
            f"sampling_params.temperature={request.sampling.temperature}: must be 0 (greedy) or at least "
            f"{SMALLEST_TEMPERATURE} with this backend"
        )


async def answer(replica: Replica, request: SampleRequest, *, base: Base) -> SampleOutput:
    """While the generator has the weights; cancelling it ends the work at the next token."""
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(_sequences(replica, request, base=base))]
    if request.prompt_logprobs:
        tasks.append(asyncio.create_task(_prompt_logprobs(replica, request.prompt)))
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    sequences, *logprobs = (task.result() for task in tasks)
    return SampleOutput(sequences=sequences, prompt_logprobs=logprobs[0] if logprobs else None)


async def _sequences(replica: Replica, request: SampleRequest, *, base: Base) -> tuple[SampledSequence, ...]:
    most = max_tokens(base, request)
    if not most:
        return (EMPTY,) * request.num_samples
    sampling = request.sampling
    stop_ids, stop_texts = stops(base, request)
    params = SamplingParams(
        max_tokens=most,
        num_samples=request.num_samples,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(0, sampling.top_k),
        stop_token_ids=stop_ids,
        stop_texts=stop_texts,
        # As the local backend draws it: with the same seed the tokens are the same.
        seed=secrets.randbits(62) if sampling.seed is None else sampling.seed,
    )
    prompt = np.asarray(request.prompt, np.int32)
    (completions,) = await replica.sampler.generate([prompt], sampling=params)
    return tuple(map(sampled_sequence, completions))


async def _prompt_logprobs(replica: Replica, prompt: np.ndarray) -> np.ndarray:
    """[N] float32, NaN first."""
    tokens = np.asarray(prompt, np.int32)
    answers = await replica.generator.call("compute_logprobs", [tokens], limit="generate_s")
    logprobs_N: np.ndarray = answers[0][0].copy()
    logprobs_N[0] = np.nan
    return logprobs_N
