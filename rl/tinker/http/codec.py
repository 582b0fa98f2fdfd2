"""The protobuf bodies of the wire: what `forward_backward` sends, and the two results that come as such.

The messages' descriptors are those that the official client ships.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb

from rl.tinker.errors import InvalidRequestError
from rl.tinker.http.tensors import MASKED_LOGPROB, Decoder, batched, from_bytes
from rl.tinker.messages import (
    Datum,
    ForwardBackwardOutput,
    LossCall,
    SampledSequence,
    SampleOutput,
    TopLogprobs,
)

MEDIA_TYPE = "application/x-protobuf"
STOP_REASONS = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ForwardBackwardCall:
    """A `forward_backward` or `forward` request."""

    model_id: str
    seq_id: int
    data: tuple[Datum, ...]
    loss: LossCall
    backward: bool


def parse_forward_backward(body: bytes) -> pb.ForwardBackwardRequest:
    """The message as it came from the network, of which nothing is believed yet.

    Raises:
        InvalidRequestError: it is none.
    """
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise InvalidRequestError(f"body: {len(body)} bytes that are no ForwardBackwardRequest") from None
    return message


def decode_forward_backward(message: pb.ForwardBackwardRequest, *, max_values: int) -> ForwardBackwardCall:
    """Read a request.

    Args:
        message: Of `parse_forward_backward`.
        max_values: Most numbers that its tensors may have together, once the sparse ones are dense.

    Raises:
        InvalidRequestError: naming the field that is wrong.
    """
    decoder = Decoder(max_values=max_values)
    return ForwardBackwardCall(
        model_id=message.model_id,
        seq_id=message.seq_id,
        data=tuple(_datum(datum, decoder, where=f"data[{i}]") for i, datum in enumerate(message.data)),
        loss=LossCall(name=message.loss_fn, settings=_settings(message)),
        backward=not message.forward_only,
    )


def _datum(message: pb.Datum, decoder: Decoder, *, where: str) -> Datum:
    return Datum(
        tokens=_tokens(message.model_input, where=f"{where}.model_input"),
        loss_inputs={
            name: decoder.array(tensor, where=f"{where}.loss_fn_inputs[{name!a}]")
            for name, tensor in message.loss_fn_inputs.items()
        },
    )


def _tokens(chunks: Iterable[pb.Chunk], *, where: str) -> np.ndarray:
    parts = [np.zeros(0, np.int32)]
    for i, chunk in enumerate(chunks):
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise InvalidRequestError(
                f"{where}[{i}]: a chunk of type {kind}; this server takes encoded_text only"
            )
        parts.append(
            from_bytes(chunk.encoded_text.tokens, np.dtype("<i4"), where=f"{where}[{i}].encoded_text.tokens")
        )
    return np.concatenate(parts)


def _settings(message: pb.ForwardBackwardRequest) -> dict[str, float]:
    """The newer of the two maps where it is there; the client sends the numbers in both."""
    settings = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise InvalidRequestError(f"loss_fn_config[{name!a}]: {value.text!a}, must be a number")
        settings[name] = value.number
    for name, number in settings.items():
        if not math.isfinite(number):
            raise InvalidRequestError(f"loss_fn_config[{name!a}]: {number}, must be finite")
    return settings


def encode_forward_backward(output: ForwardBackwardOutput) -> bytes:
    """A `ForwardBackwardOutput` message."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=dict(output.metrics))
    for num_data, tensor in batched(output.logprobs):
        record = message.loss_fn_outputs.add(num_datums=num_data)
        record.fields["logprobs"].CopyFrom(tensor)
    return message.SerializeToString()


def encode_sample(output: SampleOutput) -> bytes:
    """A `SampleResponse` message."""
    message = pb.SampleResponse(sequences=[_sequence(sequence) for sequence in output.sequences])
    if output.prompt_logprobs is not None:
        message.prompt_logprobs = np.ascontiguousarray(output.prompt_logprobs, "<f4").tobytes()
    if output.topk_prompt_logprobs is not None:
        message.topk_prompt_logprobs.CopyFrom(_top_logprobs(output.topk_prompt_logprobs))
    return message.SerializeToString()


def _sequence(sequence: SampledSequence) -> pb.SampledSequence:
    return pb.SampledSequence(
        stop_reason=STOP_REASONS[sequence.stop_reason],
        tokens=np.ascontiguousarray(sequence.tokens, "<i4").tobytes(),
        logprobs=np.ascontiguousarray(sequence.logprobs, "<f4").tobytes(),
    )


def _top_logprobs(top: TopLogprobs) -> pb.TopkLogprobs:
    length, k = top.token_ids.shape
    empty_NK = (top.token_ids < 0) | np.isnan(top.logprobs)
    return pb.TopkLogprobs(
        token_ids=np.where(empty_NK, 0, top.token_ids).astype("<i4").tobytes(),
        logprobs=np.where(empty_NK, MASKED_LOGPROB, top.logprobs).astype("<f4").tobytes(),
        k=k,
        length=length,
    )
