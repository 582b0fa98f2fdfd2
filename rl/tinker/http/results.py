"""Results of work, as bodies: protobuf for the two large ones where the client takes it, else JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from rl.tinker.http.codec import MEDIA_TYPE, encode_forward_backward, encode_sample
from rl.tinker.messages import ForwardBackwardOutput, OptimStepOutput, SampleOutput
from rl.tinker.service import responses as r

JSON = "application/json"
Body: TypeAlias = tuple[bytes, str]
"""And its media type."""


def encode(result: r.Response | r.Failure, *, accept: str) -> Body:
    """The body of a result.

    Args:
        result: Of `Service.retrieve`.
        accept: The request's header.
    """
    if MEDIA_TYPE in accept:
        if isinstance(result, ForwardBackwardOutput):
            return encode_forward_backward(result), MEDIA_TYPE
        if isinstance(result, SampleOutput):
            return encode_sample(result), MEDIA_TYPE
    # As Python and the official client read it: a metric may be NaN, and would be no number if it were null.
    return json.dumps(_ENCODERS[type(result)](result)).encode(), JSON


def metadata_only(num_bytes: int) -> dict[str, Any]:
    """In place of a large body, for a client that first makes room for it."""
    return {"status": "complete_metadata", "response_payload_size": num_bytes}


def _failure(result: r.Failure) -> dict[str, Any]:
    return {"error": result.error, "category": result.category}


def _loaded(result: r.LoadedState) -> dict[str, Any]:
    return {"type": "load_weights", "path": result.path, "model_id": result.model_id}


def _saved_sampler(result: r.SavedSampler) -> dict[str, Any]:
    return {
        "type": "save_weights_for_sampler",
        "path": result.path,
        "sampling_session_id": result.sampling_session_id,
    }


def _forward_backward(result: ForwardBackwardOutput) -> dict[str, Any]:
    outputs = [
        {"logprobs": {"data": array.ravel().tolist(), "dtype": "float32", "shape": list(array.shape)}}
        for array in result.logprobs
    ]
    return {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": outputs,
        "metrics": dict(result.metrics),
    }


def _sample(result: SampleOutput) -> dict[str, Any]:
    top = result.topk_prompt_logprobs
    return {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": sequence.stop_reason,
                "tokens": sequence.tokens.tolist(),
                "logprobs": _numbers(sequence.logprobs),
            }
            for sequence in result.sequences
        ],
        "prompt_logprobs": None if result.prompt_logprobs is None else _numbers(result.prompt_logprobs),
        "topk_prompt_logprobs": None
        if top is None
        else [_pairs(ids, logprobs) for ids, logprobs in zip(top.token_ids, top.logprobs, strict=True)],
    }


def _pairs(token_ids: np.ndarray, logprobs: np.ndarray) -> list[tuple[int, float]] | None:
    pairs = [
        (token, logprob)
        for token, logprob in zip(token_ids.tolist(), logprobs.tolist(), strict=True)
        if token >= 0
    ]
    return pairs or None


def _numbers(array: np.ndarray) -> list[float | None]:
    """With null where there is no number."""
    return [None if math.isnan(value) else value for value in array.tolist()]


_ENCODERS: dict[type, Callable[[Any], dict[str, Any]]] = {
    r.Failure: _failure,
    r.CreatedModel: lambda result: {"type": "create_model", "model_id": result.model_id},
    r.LoadedState: _loaded,
    r.SavedState: lambda result: {"type": "save_weights", "path": result.path},
    r.SavedSampler: _saved_sampler,
    r.UnloadedModel: lambda result: {"type": "unload_model", "model_id": result.model_id},
    OptimStepOutput: lambda result: {"metrics": dict(result.metrics)},
    ForwardBackwardOutput: _forward_backward,
    SampleOutput: _sample,
}
