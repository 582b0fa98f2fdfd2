"""Sampling sessions and samples."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from fastapi import APIRouter, Path

from rl.tinker.errors import InvalidRequestError
from rl.tinker.http import answers, messages
from rl.tinker.http.context import ContextOf, Owner
from rl.tinker.messages import SampleRequest, Sampling

router = APIRouter(tags=["sampling"])
SamplerId = Annotated[str, Path(min_length=1, max_length=512)]
UNSUPPORTED = (
    "base_model",
    "model_path",
    "topk_sample_logprobs",
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
    "prompt_logprobs_last_n",
    "record_stability_info",
)
"""Fields of a sample that have to be off."""


@router.post("/create_sampling_session")
async def create_sampling_session(
    body: messages.CreateSamplingSession, context: ContextOf, owner: Owner
) -> answers.CreatedSamplingSession:
    sampling_session_id = context.service.sampling.create(
        body.session_id,
        body.sampling_session_seq_id,
        model_path=body.model_path,
        base_model=body.base_model,
        owner=owner,
    )
    return answers.CreatedSamplingSession(sampling_session_id=sampling_session_id)


@router.post("/asample")
async def asample(body: messages.Sample, context: ContextOf, owner: Owner) -> answers.Future:
    for name in UNSUPPORTED:
        if value := getattr(body, name):
            raise InvalidRequestError(f"{name}: {value!a:.80} is not supported; leave it out")
    if body.sampling_session_id is None or body.seq_id is None:
        raise InvalidRequestError("sampling_session_id and seq_id: both are needed; create_sampling_session")
    submitted = context.service.sampling.sample(
        body.sampling_session_id, body.seq_id, _request(body), owner=owner
    )
    return answers.Future(
        request_id=submitted.request_id, sample_sequence_ids=list(submitted.sample_sequence_ids)
    )


def _request(body: messages.Sample) -> SampleRequest:
    parts = [np.zeros(0, np.int32)]
    for i, chunk in enumerate(body.prompt.chunks):
        if chunk.type != "encoded_text":
            raise InvalidRequestError(
                f"prompt.chunks[{i}].type: {chunk.type!a}; this server takes 'encoded_text' only"
            )
        parts.append(np.array(chunk.tokens, np.int32))
    params = body.sampling_params
    stop = (params.stop,) if isinstance(params.stop, str) else params.stop
    return SampleRequest(
        prompt=np.concatenate(parts),
        num_samples=body.num_samples,
        sampling=Sampling(
            max_tokens=params.max_tokens,
            seed=params.seed,
            stop=None if stop is None else tuple(stop),  # type: ignore[arg-type]  # all texts or all ids
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
        ),
        prompt_logprobs=bool(body.prompt_logprobs),
        topk_prompt_logprobs=body.topk_prompt_logprobs,
    )


@router.get("/samplers/{sampler_id}")
async def sampler(sampler_id: SamplerId, context: ContextOf, owner: Owner) -> answers.Sampler:
    info = context.service.sampling.info(sampler_id, owner=owner)
    return answers.Sampler(
        sampler_id=info.sampling_session_id, base_model=info.base_model, model_path=info.model_path
    )
