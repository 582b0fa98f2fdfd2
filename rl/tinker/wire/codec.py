"""Bodies of the wire, in the official client's types: JSON, and protobuf messages with tensors.

Bytes from the network are believed only once their parts agree: a few bytes can claim any shape.
Arrays are little-endian.

Shape legend: N rows, K columns.
"""

from __future__ import annotations

import math
import secrets
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from google.protobuf.message import DecodeError
from pydantic import FailFast
from tinker import types as wire
from tinker.proto import tinker_public_pb2 as pb
from typing_extensions import TypeAliasType

from losses.types import Loss
from rl.tinker.types import (
    MAX_SEQ_ID,
    BaseModelInfo,
    Datum,
    InvalidRequestError,
    SampleOutput,
    SampleRequest,
    check_range,
)
from rl.tinker.wire.datums import (
    NOT_PUBLIC,
    STABLE_REINFORCE,
    WireLoss,
    WireSamples,
    check_ids,
    collect_metrics,
    find_loss,
    make_samples,
)
from rl.trainer_types import ForwardBackwardResult
from rl.types import SamplingParams

PROTOBUF = "application/x-protobuf"
"""Content type of bodies and results that have tensors."""
DTYPES: dict[int, np.dtype] = {pb.DTYPE_FLOAT32: np.dtype("<f4"), pb.DTYPE_INT64: np.dtype("<i8")}
MAX_DATA = 16_384
"""Most data of a request: an empty one has two bytes in a body, and 1,000 decoded."""
MAX_PARTS = 2**17
"""Most chunks and tensors of all data of a request."""
MAX_VALUES = 32 * 2**20
"""Most numbers in the tensors of a request, once the sparse ones are dense."""
MAX_SAMPLES = 1024
"""Most samples of a request."""
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
MASKED_LOGPROB = -99999.0
"""Value of an empty cell of a top-k table, whose token id is 0."""


# JSON. Each list ends at its first wrong entry: the client's types make an error for each.


# Named, because a union asks for hashes, which FailFast does not have.
_Ints = TypeAliasType("_Ints", Annotated[list[int], FailFast()])
_Texts = TypeAliasType("_Texts", Annotated[list[str], FailFast()])


class _Tokens(wire.EncodedTextChunk):
    tokens: _Ints


class _Prompt(wire.ModelInput):
    chunks: Annotated[
        list[_Tokens | wire.ImageAssetPointerChunk | wire.ImageChunk | wire.DmelChunk], FailFast()
    ]


class _SamplingParams(wire.SamplingParams):
    stop: str | _Texts | _Ints | None = None


class SampleBody(wire.SampleRequest):
    prompt: _Prompt
    sampling_params: _SamplingParams
    target_prompt_logprobs: Any = None


class CreateSessionBody(wire.CreateSessionRequest):
    tags: Annotated[list[str], FailFast()]


# Training


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBackwardContent:
    loss: Loss
    wire_loss: WireLoss
    samples: WireSamples


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBackwardBody:
    """A decoded body, whose data may be invalid although the body is a message."""

    model_id: str
    seq_id: int
    backward: bool
    content: ForwardBackwardContent | InvalidRequestError
    """Loss and samples, or the reason why they are refused."""
    num_bytes: int
    """Bytes of the body or, if they are more, of its samples."""


def read_forward_backward(body: bytes, *, base: BaseModelInfo) -> ForwardBackwardBody:
    """Decode a body; raise InvalidRequestError if it is no message."""
    # A body that is no message names no model; with any other mistake the request has a seq id,
    # which it uses up.
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise InvalidRequestError(
            f"body: {len(body)} bytes that are no ForwardBackwardRequest"
        ) from None
    content: ForwardBackwardContent | InvalidRequestError
    num_bytes = len(body)
    try:
        wire_loss = find_loss(message.loss_fn)
        loss = wire_loss.build(merge_loss_settings(message))
        data = decode_data(message, max_values=MAX_VALUES)
        samples = make_samples(data, wire_loss, base)
        content = ForwardBackwardContent(loss=loss, wire_loss=wire_loss, samples=samples)
        num_bytes = max(num_bytes, samples.num_bytes)
    except InvalidRequestError as error:
        content = error
    return ForwardBackwardBody(
        model_id=message.model_id,
        seq_id=message.seq_id,
        backward=not message.forward_only,
        content=content,
        num_bytes=num_bytes,
    )


def decode_data(message: pb.ForwardBackwardRequest, *, max_values: int) -> tuple[Datum, ...]:
    """Decode a request's data, whose tensors may have `max_values` numbers together once they are
    dense.
    """
    if len(message.data) > MAX_DATA:
        raise InvalidRequestError(
            f"data: has {len(message.data)} entries, more than the allowed {MAX_DATA}; send fewer "
            "at once"
        )
    # Before anything is read: an empty chunk has four bytes, and costs hundreds here.
    num_parts = 0
    for datum in message.data:
        num_parts += len(datum.model_input) + len(datum.loss_fn_inputs)
    if num_parts > MAX_PARTS:
        raise InvalidRequestError(
            f"data: has {num_parts} chunks and tensors, more than the allowed {MAX_PARTS}; send "
            "fewer at once"
        )
    data, num_values = [], 0
    for i, datum in enumerate(message.data):
        inputs = {}
        for name, tensor in datum.loss_fn_inputs.items():
            where = f"data[{i}].loss_fn_inputs[{name!a:.100}]"
            # Counted before anything is made dense: a few bytes can claim many gigabytes.
            num_values += _count_values(tensor, most=max_values, where=where)
            if num_values > max_values:
                raise InvalidRequestError(
                    f"{where}: with it the request's tensors have {num_values} values, more than "
                    f"the allowed {max_values}; send fewer data at once"
                )
            inputs[name] = _read_array(tensor, where=where)
        tokens = _read_tokens(datum.model_input, where=f"data[{i}].model_input")
        data.append(Datum(tokens=tokens, loss_inputs=inputs))
    return tuple(data)


def merge_loss_settings(message: pb.ForwardBackwardRequest) -> dict[str, float]:
    """Merge the two maps of loss settings, in both of which the client sends numbers; the newer one
    counts.
    """
    settings = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise InvalidRequestError(
                f"loss_fn_config[{name!a:.100}]: {value.text!a:.100}, must be a number"
            )
        settings[name] = value.number
    return settings


def _read_tokens(chunks: Iterable[pb.Chunk], *, where: str) -> np.ndarray:
    parts = [np.zeros(0, np.int32)]
    for i, chunk in enumerate(chunks):
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise InvalidRequestError(
                f"{where}[{i}]: is a chunk of type {kind}: must be encoded_text"
            )
        data = chunk.encoded_text.tokens
        parts.append(_read_values(data, np.dtype("<i4"), where=f"{where}[{i}].encoded_text.tokens"))
    return np.concatenate(parts)


def _count_values(message: pb.Tensor, *, most: int, where: str) -> int:
    """Return the number of values of the dense tensor."""
    # Three, as a hostile shape may have millions of sizes.
    shape = list(message.shape[:3])
    if len(shape) > 2 or not all(0 <= size <= most for size in shape):
        raise InvalidRequestError(
            f"{where}.shape: {shape}, must be [N] or [N, K], each from 0 to {most}; at most 3 are "
            "shown"
        )
    return math.prod(shape) if shape else len(message.dense) // 4


def _read_array(message: pb.Tensor, *, where: str) -> np.ndarray:
    """Return an [N] or [N, K] array of float32 or int64; sparse ones become dense."""
    dtype = DTYPES.get(message.dtype)
    if dtype is None:
        names = pb.DType.DESCRIPTOR.values_by_number
        name = names[message.dtype].name if message.dtype in names else str(message.dtype)
        raise InvalidRequestError(f"{where}.dtype: {name}, must be float32 or int64")
    shape = tuple(message.shape)
    encoding = message.WhichOneof("encoding")
    if encoding == "sparse_csr":
        return _make_dense(message.sparse_csr, dtype=dtype, shape=shape, where=where)
    if encoding is None:
        raise InvalidRequestError(f"{where}: has neither dense nor sparse_csr values")
    values = _read_values(message.dense, dtype, where=f"{where}.dense")
    if shape and values.size != math.prod(shape):
        raise InvalidRequestError(
            f"{where}.shape: {list(shape)} has {math.prod(shape)} values, but there are "
            f"{values.size}"
        )
    return values.reshape(shape) if shape else values


def _read_values(data: bytes, dtype: np.dtype, *, where: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise InvalidRequestError(
            f"{where}: {len(data)} bytes are no whole number of {dtype.name} values of "
            f"{dtype.itemsize} bytes"
        )
    return np.frombuffer(data, dtype).astype(dtype.newbyteorder("="))


def _make_dense(
    csr: pb.SparseCsr, *, dtype: np.dtype, shape: tuple[int, ...], where: str
) -> np.ndarray:
    if len(shape) != 2:
        raise InvalidRequestError(
            f"{where}.shape: {list(shape)}, must be [N, K] for a sparse tensor"
        )
    rows = _read_values(csr.crow_indices, np.dtype("<i8"), where=f"{where}.sparse_csr.crow_indices")
    columns = _read_values(
        csr.col_indices, np.dtype("<i8"), where=f"{where}.sparse_csr.col_indices"
    )
    values = _read_values(csr.values, dtype, where=f"{where}.sparse_csr.values")
    # Unchecked indices out of range would read foreign memory.
    crow, col, val = torch.from_numpy(rows), torch.from_numpy(columns), torch.from_numpy(values)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            return (
                torch.sparse_csr_tensor(crow, col, val, shape, check_invariants=True)
                .to_dense()
                .numpy()
            )
    except RuntimeError as error:
        raise InvalidRequestError(
            f"{where}.sparse_csr: is no CSR matrix of shape {list(shape)}: {error}"
        ) from None


# Results


def encode_forward_backward(
    content: ForwardBackwardContent, result: ForwardBackwardResult
) -> pb.ForwardBackwardOutput:
    """Encode the metrics, and each datum's [N] or [N, K] logprobs."""
    assert result.logprobs is not None
    metrics = collect_metrics(result, content.wire_loss)
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    for array in content.samples.split_logprobs(result.logprobs):
        tensor = message.loss_fn_outputs.add(num_datums=1).fields["logprobs"]
        tensor.data, tensor.dtype = _to_bytes(array, "<f4"), pb.DTYPE_FLOAT32
        tensor.offsets = np.array([0, len(tensor.data)], "<i8").tobytes()
        tensor.trailing_shape.extend(array.shape[1:])
    return message


def encode_sample(output: SampleOutput, request: SampleRequest) -> pb.SampleResponse:
    """Encode completions, and the prompt's logprobs as far as they were requested."""
    message = pb.SampleResponse()
    for completion in output.completions:
        is_stopped = completion.finish_reason == "stop"
        message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if is_stopped else pb.STOP_REASON_LENGTH,
            tokens=_to_bytes(completion.token_ids, "<i4"),
            logprobs=_to_bytes(completion.logprobs, "<f4"),
        )
    of_prompt = output.of_prompt
    if of_prompt is not None:
        if request.prompt_logprobs:
            message.prompt_logprobs = _to_bytes(of_prompt.logprobs, "<f4")
        k = request.topk_prompt_logprobs
        if k:
            empty_NK = (of_prompt.top_ids < 0) | np.isnan(of_prompt.top_logprobs)
            top = message.topk_prompt_logprobs
            top.token_ids = _to_bytes(np.where(empty_NK, 0, of_prompt.top_ids), "<i4")
            top.logprobs = _to_bytes(
                np.where(empty_NK, MASKED_LOGPROB, of_prompt.top_logprobs), "<f4"
            )
            top.k, top.length = k, len(of_prompt.top_ids)
    return message


def _to_bytes(array: np.ndarray, dtype: str) -> bytes:
    return array.astype(dtype).tobytes()


# Samples


def check_sample(body: wire.SampleRequest, base: BaseModelInfo) -> SampleRequest:
    """Translate a request, with its defaults filled in; raise InvalidRequestError, which names the
    field.
    """
    for name in UNSUPPORTED:
        value = getattr(body, name)
        if value:
            # What samplers record for this loss, the default of some recipes.
            hint = f" ({STABLE_REINFORCE}: {NOT_PUBLIC})" if name == "record_stability_info" else ""
            raise InvalidRequestError(f"{name}: {value!a:.80} is not supported; leave it out{hint}")
    params = body.sampling_params
    prompt = _read_prompt(body, base)
    _check_ranges(body, prompt.size, base)
    stop: Sequence[str | int] = base.stop_token_ids
    if params.stop is not None:
        stop = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop)
    if "" in stop:
        raise InvalidRequestError(
            "sampling_params.stop: has an empty text, which would end every completion"
        )
    stop_ids = [entry for entry in stop if isinstance(entry, int)]
    check_ids(np.array(stop_ids, object), base.vocab_size, where="sampling_params.stop")
    # Without max_tokens a completion may fill the context, and it never exceeds it.
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


def _read_prompt(body: wire.SampleRequest, base: BaseModelInfo) -> np.ndarray:
    tokens: list[int] = []
    for i, chunk in enumerate(body.prompt.chunks):
        if chunk.type != "encoded_text":
            raise InvalidRequestError(
                f"prompt.chunks[{i}].type: {chunk.type!a}, must be 'encoded_text'"
            )
        tokens += chunk.tokens
    # A prompt that fills the context can be scored, but not continued.
    asks_prompt = body.prompt_logprobs or body.topk_prompt_logprobs > 0
    longest = base.max_context_length if asks_prompt else base.max_context_length - 1
    if len(tokens) > longest:
        # Agents and the cookbook's proxy recognise these words, and shorten their history.
        raise InvalidRequestError(
            f"prompt is too long: {len(tokens)} tokens > {longest} maximum; the model's context "
            f"has {base.max_context_length}"
        )
    if not tokens:
        raise InvalidRequestError(f"prompt: has 0 tokens: must be 1 to {longest}")
    # As objects: an integer of the wire may not fit into 64 bits.
    check_ids(np.array(tokens, object), base.vocab_size, where="prompt")
    return np.array(tokens, np.int32)


def _check_ranges(body: wire.SampleRequest, num_tokens: int, base: BaseModelInfo) -> None:
    # 0 is greedy; the samplers cannot divide logits by a temperature just above it.
    params, coldest = body.sampling_params, base.min_temperature
    most_top = (
        min(base.vocab_size, MAX_TOP_VALUES // num_tokens) if base.topk_prompt_logprobs else 0
    )
    for name, value, lowest, highest in (
        ("num_samples", body.num_samples, 1, MAX_SAMPLES),
        ("topk_prompt_logprobs", body.topk_prompt_logprobs, 0, most_top),
        ("sampling_params.max_tokens", params.max_tokens, 1, math.inf),
        (
            "sampling_params.temperature, unless it is 0",
            params.temperature or coldest,
            coldest,
            1e30,
        ),
        ("sampling_params.top_p", params.top_p, 1e-30, 1),
        ("sampling_params.top_k", params.top_k, -1, math.inf),
        ("sampling_params.seed", params.seed, 0, MAX_SEQ_ID),
    ):
        check_range(name, value, lowest, highest)
