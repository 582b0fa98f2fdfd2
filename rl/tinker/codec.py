"""The bodies of the wire that hold tensors, protobuf both ways.

The protobuf messages are those that the official client ships. Bytes from the network are believed only once their
parts agree: a few bytes can claim any shape. Arrays are little-endian.

Shape legend: N rows, K columns, Z listed values of a sparse tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb

from rl.tinker.futures import Result
from rl.tinker.types import (
    Datum,
    Failure,
    ForwardBackwardOutput,
    InvalidRequestError,
    LossCall,
    SampleOutput,
    TopLogprobs,
)

PROTOBUF, JSON = "application/x-protobuf", "application/json"
DTYPES: dict[int, np.dtype] = {pb.DTYPE_FLOAT32: np.dtype("<f4"), pb.DTYPE_INT64: np.dtype("<i8")}
MASKED_LOGPROB = -99999.0
"""Value of an empty cell of a top-k table, whose token id is 0."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ForwardBackwardCall:
    """The data and the loss of a `forward_backward` or `forward` request."""

    data: tuple[Datum, ...]
    loss: LossCall


def parse_forward_backward(body: bytes) -> pb.ForwardBackwardRequest:
    """Parse a body without checking its values; raise InvalidRequestError if it is no such message."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise InvalidRequestError(f"body: {len(body)} bytes that are no ForwardBackwardRequest") from None
    return message


def decode_forward_backward(message: pb.ForwardBackwardRequest, *, max_values: int) -> ForwardBackwardCall:
    """Decode a request's data, whose tensors may have `max_values` numbers together once they are dense.

    Raises:
        InvalidRequestError: a field is invalid; the text names it.
    """
    decoder = _Decoder(max_values=max_values)
    data = []
    for i, datum in enumerate(message.data):
        inputs = {
            name: decoder.array(tensor, where=f"data[{i}].loss_fn_inputs[{name!a}]")
            for name, tensor in datum.loss_fn_inputs.items()
        }
        tokens = _tokens(datum.model_input, where=f"data[{i}].model_input")
        data.append(Datum(tokens=tokens, loss_inputs=inputs))
    return ForwardBackwardCall(
        data=tuple(data), loss=LossCall(name=message.loss_fn, settings=_settings(message))
    )


def _tokens(chunks: Iterable[pb.Chunk], *, where: str) -> np.ndarray:
    parts = [np.zeros(0, np.int32)]
    for i, chunk in enumerate(chunks):
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise InvalidRequestError(f"{where}[{i}]: is a chunk of type {kind}: must be encoded_text")
        data = chunk.encoded_text.tokens
        parts.append(_from_bytes(data, np.dtype("<i4"), where=f"{where}[{i}].encoded_text.tokens"))
    return np.concatenate(parts)


def _settings(message: pb.ForwardBackwardRequest) -> dict[str, float]:
    """Merge the two maps of loss settings; the client sends the numbers in both, and the newer one counts."""
    settings = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise InvalidRequestError(f"loss_fn_config[{name!a}]: {value.text!a}, must be a number")
        settings[name] = value.number
    for name, number in settings.items():
        if not math.isfinite(number):
            raise InvalidRequestError(f"loss_fn_config[{name!a}]: {number}, must be finite")
    return settings


class _Decoder:
    """Decodes the tensors of one request within a common budget of numbers."""

    def __init__(self, *, max_values: int) -> None:
        self._max_values = max_values
        self._num_values = 0

    def array(self, message: pb.Tensor, *, where: str) -> np.ndarray:
        """Return an [N] or [N, K] array of float32 or int64; sparse ones become dense."""
        if (dtype := DTYPES.get(message.dtype)) is None:
            names = pb.DType.DESCRIPTOR.values_by_number
            name = names[message.dtype].name if message.dtype in names else str(message.dtype)
            raise InvalidRequestError(f"{where}.dtype: {name}, must be float32 or int64")
        shape = tuple(message.shape)
        if len(shape) > 2 or not all(0 <= size <= self._max_values for size in shape):
            raise InvalidRequestError(
                f"{where}.shape: {list(shape)}, must be [N] or [N, K], each from 0 to {self._max_values}"
            )
        self._count(math.prod(shape), where=where)
        encoding = message.WhichOneof("encoding")
        if encoding == "sparse_csr":
            return _dense(message.sparse_csr, dtype=dtype, shape=shape, where=where)
        if encoding is None:
            raise InvalidRequestError(f"{where}: has neither dense nor sparse_csr values")
        values = _from_bytes(message.dense, dtype, where=f"{where}.dense")
        if not shape:
            self._count(values.size, where=where)
            return values
        if values.size != math.prod(shape):
            raise InvalidRequestError(
                f"{where}.shape: {list(shape)} has {math.prod(shape)} values, but there are {values.size}"
            )
        return values.reshape(shape)

    def _count(self, num_values: int, *, where: str) -> None:
        self._num_values += num_values
        if self._num_values > self._max_values:
            raise InvalidRequestError(
                f"{where}: with it the request's tensors have {self._num_values} values, more than the allowed "
                f"{self._max_values}; send fewer data at once"
            )


def _from_bytes(data: bytes, dtype: np.dtype, *, where: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise InvalidRequestError(
            f"{where}: {len(data)} bytes are no whole number of {dtype.name} values of {dtype.itemsize} bytes"
        )
    return np.frombuffer(data, dtype).astype(dtype.newbyteorder("="))


def _dense(csr: pb.SparseCsr, *, dtype: np.dtype, shape: tuple[int, ...], where: str) -> np.ndarray:
    if len(shape) != 2:
        raise InvalidRequestError(f"{where}.shape: {list(shape)}, must be [N, K] for a sparse tensor")
    num_rows, num_columns = shape
    values_Z = _from_bytes(csr.values, dtype, where=f"{where}.sparse_csr.values")
    starts = _from_bytes(csr.crow_indices, np.dtype("<i8"), where=f"{where}.sparse_csr.crow_indices")
    columns_Z = _from_bytes(csr.col_indices, np.dtype("<i8"), where=f"{where}.sparse_csr.col_indices")
    # Range checks come first: differences of numbers out of range could overflow into valid ones.
    valid = (
        starts.size == num_rows + 1
        and columns_Z.size == values_Z.size
        and ((starts >= 0) & (starts <= values_Z.size)).all()
        and (starts[0], starts[-1]) == (0, values_Z.size)
        and (np.diff(starts) >= 0).all()
        and ((columns_Z >= 0) & (columns_Z < num_columns)).all()
    )
    rows_Z = np.repeat(np.arange(num_rows), np.diff(starts)) if valid else columns_Z
    places_Z = rows_Z * num_columns + columns_Z
    if not valid or (np.diff(places_Z) <= 0).any():
        raise InvalidRequestError(
            f"{where}.sparse_csr: is no CSR matrix of shape {list(shape)}: crow_indices must rise from 0 to the "
            f"number of values, {values_Z.size}, and col_indices must rise within each row, below {num_columns}"
        )
    dense_NK = np.zeros(shape, dtype.newbyteorder("="))
    dense_NK[rows_Z, columns_Z] = values_Z
    return dense_NK


# Results


def encode_result(result: Result | Failure) -> tuple[bytes, str]:
    """Return a result's body and media type: protobuf for tensors, else JSON."""
    match result:
        case ForwardBackwardOutput():
            return encode_forward_backward(result), PROTOBUF
        case SampleOutput():
            return encode_sample(result), PROTOBUF
        case Failure():
            return json.dumps({"error": result.error, "category": result.category}).encode(), JSON
        case _:
            # Python's JSON has NaN, as the official client reads it: null would not be a number.
            return json.dumps(result.model_dump()).encode(), JSON


def encode_forward_backward(output: ForwardBackwardOutput) -> bytes:
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=dict(output.metrics))
    for num_data, tensor in _batched(output.logprobs):
        record = message.loss_fn_outputs.add(num_datums=num_data)
        record.fields["logprobs"].CopyFrom(tensor)
    return message.SerializeToString()


def _batched(arrays: Sequence[np.ndarray]) -> Iterator[tuple[int, pb.BatchedTensor]]:
    """Yield messages of neighbouring arrays with the same trailing shape, and the number of arrays in each."""
    for trailing, group in groupby(arrays, key=lambda array: array.shape[1:]):
        members = [np.ascontiguousarray(array, "<f4") for array in group]
        ends = np.cumsum([0, *(array.nbytes for array in members)], dtype="<i8")
        yield (
            len(members),
            pb.BatchedTensor(
                data=b"".join(array.tobytes() for array in members),
                offsets=ends.tobytes(),
                dtype=pb.DTYPE_FLOAT32,
                trailing_shape=trailing,
            ),
        )


def encode_sample(output: SampleOutput) -> bytes:
    sequences = [
        pb.SampledSequence(
            stop_reason=pb.STOP_REASON_STOP if one.finish_reason == "stop" else pb.STOP_REASON_LENGTH,
            tokens=np.ascontiguousarray(one.token_ids, "<i4").tobytes(),
            logprobs=np.ascontiguousarray(one.logprobs, "<f4").tobytes(),
        )
        for one in output.completions
    ]
    message = pb.SampleResponse(sequences=sequences)
    if output.prompt_logprobs is not None:
        message.prompt_logprobs = np.ascontiguousarray(output.prompt_logprobs, "<f4").tobytes()
    if output.topk_prompt_logprobs is not None:
        message.topk_prompt_logprobs.CopyFrom(_top_logprobs(output.topk_prompt_logprobs))
    return message.SerializeToString()


def _top_logprobs(top: TopLogprobs) -> pb.TopkLogprobs:
    length, k = top.token_ids.shape
    empty_NK = (top.token_ids < 0) | np.isnan(top.logprobs)
    return pb.TopkLogprobs(
        token_ids=np.where(empty_NK, 0, top.token_ids).astype("<i4").tobytes(),
        logprobs=np.where(empty_NK, MASKED_LOGPROB, top.logprobs).astype("<f4").tobytes(),
        k=k,
        length=length,
    )
