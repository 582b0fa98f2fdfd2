"""A client's request to sample, checked and translated into the backend's `SampleRequest`."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence

import numpy as np
from tinker import types as wire

from rl.tinker.ids import MAX_SEQ_ID
from rl.tinker.limits import Limits
from rl.tinker.types import BaseModel, InvalidRequestError, SampleRequest
from rl.types import SamplingParams

MAX_TOP_VALUES = 8_000_000
"""Most values of a prompt's top-k table."""
UNSUPPORTED = (
    "base_model",
    "model_path",
    "topk_sample_logprobs",
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
    "prompt_logprobs_last_n",
    "record_stability_info",
)
"""Fields of a sample that must be off."""


def checked_request(body: wire.SampleRequest, base: BaseModel, limits: Limits) -> SampleRequest:
    """Translate a request, with its defaults filled in.

    Raises:
        InvalidRequestError: a field is unsupported or out of range; the text names it.
    """
    for name in UNSUPPORTED:
        if value := getattr(body, name):
            raise InvalidRequestError(f"{name}: {value!a:.80} is not supported; leave it out")
    params = body.sampling_params
    prompt = _prompt(body, base)
    _check_ranges(body, prompt.size, base, limits)
    stop: Sequence[str | int] = base.stop_token_ids
    if params.stop is not None:
        stop = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop)
    if "" in stop:
        raise InvalidRequestError("sampling_params.stop: has an empty text, which would end every completion")
    stop_ids = [entry for entry in stop if isinstance(entry, int)]
    _check_ids("sampling_params.stop", stop_ids, base)
    room = base.max_context_length - prompt.size
    return SampleRequest(
        prompt=prompt,
        sampling=SamplingParams(
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            num_samples=body.num_samples,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=min(max(0, params.top_k), base.vocab_size),
            stop_token_ids=tuple(stop_ids),
            stop_texts=tuple(entry for entry in stop if isinstance(entry, str)),
            seed=secrets.randbits(62) if params.seed is None else params.seed,
        ),
        prompt_logprobs=bool(body.prompt_logprobs),
        topk_prompt_logprobs=body.topk_prompt_logprobs,
    )


def _prompt(body: wire.SampleRequest, base: BaseModel) -> np.ndarray:
    tokens: list[int] = []
    for i, chunk in enumerate(body.prompt.chunks):
        if chunk.type != "encoded_text":
            raise InvalidRequestError(f"prompt.chunks[{i}].type: {chunk.type!a}, must be 'encoded_text'")
        tokens += chunk.tokens
    asks_prompt = body.prompt_logprobs or body.topk_prompt_logprobs > 0
    longest = base.max_context_length if asks_prompt else base.max_context_length - 1
    if not 1 <= len(tokens) <= longest:
        raise InvalidRequestError(
            f"prompt: has {len(tokens)} tokens: must be 1 to {longest}; the model's context has "
            f"{base.max_context_length}"
        )
    _check_ids("prompt", tokens, base)
    return np.array(tokens, np.int32)


def _check_ranges(body: wire.SampleRequest, num_tokens: int, base: BaseModel, limits: Limits) -> None:
    params, lowest = body.sampling_params, base.min_temperature
    most_top = min(base.vocab_size, MAX_TOP_VALUES // num_tokens) if base.topk_prompt_logprobs else 0
    for name, value, lower, upper in (
        ("num_samples", body.num_samples, 1, limits.samples_per_request),
        ("topk_prompt_logprobs", body.topk_prompt_logprobs, 0, most_top),
        ("sampling_params.max_tokens", params.max_tokens, 1, math.inf),
        ("sampling_params.temperature, unless it is 0", params.temperature or lowest, lowest, 1e30),
        ("sampling_params.top_p", params.top_p, 1e-30, 1),
        ("sampling_params.top_k", params.top_k, -1, math.inf),
        ("sampling_params.seed", params.seed, 0, MAX_SEQ_ID),
    ):
        if value is not None and not lower <= value <= upper:
            raise InvalidRequestError(f"{name}={value!r:.100}: must be {lower} to {upper}")


def _check_ids(name: str, ids: Sequence[int], base: BaseModel) -> None:
    for token in ids:
        if not 0 <= token < base.vocab_size:
            raise InvalidRequestError(
                f"{name}: has token id {token!s:.100}: must be 0 to {base.vocab_size - 1}, the model's vocabulary"
            )
