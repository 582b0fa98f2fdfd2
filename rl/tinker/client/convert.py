"""The official client's types to this package's messages, and results back.

Everything is copied: a caller may change an array while a call that was given it has not begun.

Shape legend: N tokens of one datum or prompt, K targets of each, C tokens of one completion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tinker
from tinker import types
from tinker.types.topk_logprobs import MASK_LOGPROB, TopkLogprobs

from rl.tinker.messages import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    LossCall,
    SampleOutput,
    SampleRequest,
    Sampling,
    TopLogprobs,
)

LARGEST_TOKEN = 2**31 - 1


def tokens_of(model_input: types.ModelInput, *, where: str) -> np.ndarray:
    """[N] int32.

    Raises:
        ValueError: it has an image or audio chunk, or a number that is no token id.
    """
    for i, chunk in enumerate(model_input.chunks):
        if not isinstance(chunk, types.EncodedTextChunk):
            raise ValueError(
                f"{where}.chunks[{i}] is a {type(chunk).__name__}: these models read tokens only "
                "(EncodedTextChunk)"
            )
    tokens = np.array([token for chunk in model_input.chunks for token in chunk.tokens], dtype=np.int64)
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() <= LARGEST_TOKEN:
        wrong = int(tokens[(tokens < 0) | (tokens > LARGEST_TOKEN)][0])
        raise ValueError(f"{where} has the token {wrong}: token ids are 0 to {LARGEST_TOKEN}")
    return tokens.astype(np.int32)


def data_of(data: Sequence[types.Datum]) -> list[Datum]:
    """Raises ValueError, which names the datum."""
    if isinstance(data, types.Datum):
        raise ValueError("data is one Datum: must be a list of them")
    if not data:
        raise ValueError("data is empty: at least one Datum is needed")
    return [_datum_of(datum, where=f"data[{i}]") for i, datum in enumerate(data)]


def _datum_of(datum: types.Datum, *, where: str) -> Datum:
    inputs = {}
    for name, tensor in datum.loss_fn_inputs.items():
        try:
            inputs[name] = np.array(tensor.to_numpy())  # what is sparse gets zeros in between
        except (AssertionError, RuntimeError, ValueError) as error:
            raise ValueError(f"{where}.loss_fn_inputs[{name!r}] is no tensor: {error}") from error
    return Datum(tokens=tokens_of(datum.model_input, where=f"{where}.model_input"), loss_inputs=inputs)


def loss_call(name: str, settings: Mapping[str, float | str] | None) -> LossCall:
    numbers: dict[str, float] = {}
    for key, value in (settings or {}).items():
        if isinstance(value, bool) or not isinstance(value, int | float | np.floating | np.integer):
            raise ValueError(f"loss_fn_config[{key!r}]={value!r}: must be a number")
        numbers[key] = float(value)
    return LossCall(name=name, settings=numbers)


def adam_settings(params: Any) -> AdamParams:
    """Raises TypeError for what is no optimizer's settings, ValueError for those of others than Adam."""
    if isinstance(params, types.AdamParams):
        return AdamParams(**{name: float(value) for name, value in params.model_dump().items()})
    if isinstance(params, types.DimuonParams):
        raise ValueError("optim_params is DimuonParams: models here are trained with Adam; give AdamParams")
    raise TypeError(f"optim_params={params!r}: must be AdamParams")


def sample_request(
    prompt: types.ModelInput,
    num_samples: int,
    params: types.SamplingParams,
    *,
    prompt_logprobs: bool,
    topk_prompt_logprobs: int,
) -> SampleRequest:
    stop = (params.stop,) if isinstance(params.stop, str) else params.stop
    return SampleRequest(
        prompt=tokens_of(prompt, where="prompt"),
        num_samples=num_samples,
        sampling=Sampling(
            max_tokens=params.max_tokens,
            seed=params.seed,
            stop=None if stop is None else tuple(stop),
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
        ),
        prompt_logprobs=prompt_logprobs,
        topk_prompt_logprobs=topk_prompt_logprobs,
    )


def forward_backward_output(output: ForwardBackwardOutput) -> types.ForwardBackwardOutput:
    return types.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=[{"logprobs": types.TensorData.from_numpy(values)} for values in output.logprobs],
        metrics=dict(output.metrics),
    )


def sample_response(
    output: SampleOutput, *, sequence_ids: Sequence[str], last_n: int | None = None
) -> types.SampleResponse:
    """`last_n`: what is said of the prompt is of so many tokens at its end only."""
    return types.SampleResponse(
        sequences=[
            types.SampledSequence(
                stop_reason=sequence.stop_reason,
                sequence_id=sequence_id,
                tokens_np=sequence.tokens,
                logprobs_np=sequence.logprobs,
            )
            for sequence, sequence_id in zip(output.sequences, sequence_ids, strict=True)
        ],
        prompt_logprobs_np=_last_of(output.prompt_logprobs, last_n),
        topk_prompt_logprobs_np=_top(output.topk_prompt_logprobs, last_n),
    )


def _last_of(values_N: np.ndarray | None, last_n: int | None) -> np.ndarray | None:
    if values_N is None or last_n is None:
        return values_N
    kept_N = np.full_like(values_N, np.nan)
    kept_N[-last_n:] = values_N[-last_n:]
    return kept_N


def _top(top: TopLogprobs | None, last_n: int | None) -> TopkLogprobs | None:
    if top is None:
        return None
    unknown_NK = np.isnan(top.logprobs)
    if last_n is not None:
        unknown_NK[:-last_n] = True
    return TopkLogprobs(
        token_ids=np.where(unknown_NK, 0, top.token_ids).astype(np.int32),
        logprobs=np.where(unknown_NK, MASK_LOGPROB, top.logprobs).astype(np.float32),
    )


def capabilities(base_models: Sequence[Any]) -> types.GetServerCapabilitiesResponse:
    return types.GetServerCapabilitiesResponse(
        supported_models=[
            tinker.types.SupportedModel(
                model_name=base.name,
                max_context_length=base.max_context_length,
                trainable=base.trainable,
                sampleable=base.sampleable,
            )
            for base in base_models
        ]
    )
