"""What requests are checked for before anything starts; what a model can take, the backend checks."""

from __future__ import annotations

from collections.abc import Sequence

from rl.tinker.backend import Backend
from rl.tinker.errors import InvalidRequestError
from rl.tinker.messages import BaseModel, Datum, SampleRequest
from rl.tinker.service.limits import MAX_SEQ_ID, MAX_TTL_S, Limits
from rl.tinker.service.names import shown


def check_seq_id(name: str, value: int, *, first: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not first <= value <= MAX_SEQ_ID:
        raise InvalidRequestError(f"{name} is {value!r}; it is a whole number from {first} to {MAX_SEQ_ID}")


def check_ttl(ttl_seconds: int | None) -> None:
    if ttl_seconds is not None and (isinstance(ttl_seconds, bool) or not 1 <= ttl_seconds <= MAX_TTL_S):
        raise InvalidRequestError(
            f"ttl_seconds is {ttl_seconds!r}; it is 1 to {MAX_TTL_S} (ten years), or None"
        )


def check_data(data: Sequence[Datum], limits: Limits) -> None:
    if not 1 <= len(data) <= limits.data_per_request:
        raise InvalidRequestError(
            f"data has {len(data)} entries; it has 1 to {limits.data_per_request} (limit data_per_request)"
        )
    num_tokens = sum(datum.tokens.size for datum in data)
    if num_tokens > limits.tokens_per_request:
        raise InvalidRequestError(
            f"data has {num_tokens} tokens; limit tokens_per_request is {limits.tokens_per_request}"
        )


def check_sample(request: SampleRequest, limits: Limits) -> None:
    if not 1 <= request.num_samples <= limits.samples_per_request:
        raise InvalidRequestError(
            f"num_samples is {request.num_samples}; it is 1 to {limits.samples_per_request} "
            "(limit samples_per_request)"
        )
    if request.prompt.size > limits.tokens_per_request:
        raise InvalidRequestError(
            f"prompt has {request.prompt.size} tokens; limit tokens_per_request is "
            f"{limits.tokens_per_request}"
        )
    num_likeliest = request.prompt.size * request.topk_prompt_logprobs
    if num_likeliest > limits.tokens_per_request:
        raise InvalidRequestError(
            f"topk_prompt_logprobs is {request.topk_prompt_logprobs}, which makes {num_likeliest} tokens of "
            f"a prompt of {request.prompt.size}; limit tokens_per_request is {limits.tokens_per_request}"
        )


def find_base(backend: Backend, name: str) -> BaseModel:
    for base in backend.base_models:
        if base.name == name:
            return base
    offered = ", ".join(repr(base.name) for base in backend.base_models)
    raise InvalidRequestError(f"base_model is {shown(name)}; offered are {offered or 'none'}")
