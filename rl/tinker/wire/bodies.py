"""Request bodies, decoded so that a hostile one costs little: parts are counted before they become
objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from google.protobuf.message import DecodeError
from pydantic import FailFast
from tinker import types as wire
from tinker.proto import tinker_public_pb2 as pb
from typing_extensions import TypeAliasType

from losses.types import Loss
from rl.tinker.types import BaseModel, HttpLimits, InvalidRequestError
from rl.tinker.wire.codec import decode_data, loss_settings
from rl.tinker.wire.datums import WireLoss, WireSamples, find_loss, wire_samples

MAX_FIELDS = 2**17
"""Most fields of a protobuf body, those of its parts included: 128 for each of 1,024 data."""
MAX_JSON_PARTS = 4096
"""Most lists, objects and keys of a JSON body, each of which costs a hundred times its bytes;
numbers do not.
"""


# JSON. Each list ends at its first wrong entry, where the client's types make an error for every
# one.


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


def check_json(body: bytes | bytearray) -> None:
    """Raise InvalidRequestError if a body has too many lists, objects and keys; each has one of
    three characters.
    """
    if sum(map(body.count, (b"[", b"{", b":"))) > MAX_JSON_PARTS:
        raise InvalidRequestError(f"body: has more than {MAX_JSON_PARTS} lists, objects and keys")


# Protobuf


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBackwardBody:
    model_id: str
    seq_id: int
    backward: bool
    content: tuple[Loss, WireLoss, WireSamples] | InvalidRequestError
    """Loss and samples, or the reason why they are refused."""
    num_bytes: int
    """Bytes of the body or, if they are more, of its samples."""


def read_forward_backward(body: bytes, *, base: BaseModel, http: HttpLimits) -> ForwardBackwardBody:
    """Decode a body; raise InvalidRequestError if it is no message, or has too many fields."""
    _check_fields(body)
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise _malformed(body) from None
    content: tuple[Loss, WireLoss, WireSamples] | InvalidRequestError
    num_bytes = len(body)
    try:
        loss = find_loss(message.loss_fn)
        built = loss.build(loss_settings(message))
        data = decode_data(message, max_values=http.values_per_request)
        content = built, loss, wire_samples(data, loss, base)
        num_bytes = max(num_bytes, content[2].num_bytes)
    except InvalidRequestError as error:
        content = error
    return ForwardBackwardBody(
        model_id=message.model_id,
        seq_id=message.seq_id,
        backward=not message.forward_only,
        content=content,
        num_bytes=num_bytes,
    )


def _check_fields(body: bytes) -> None:
    """Count a body's fields, without any object for them: two bytes make a message of a hundred."""
    parts, num_fields = [(0, len(body), pb.ForwardBackwardRequest.DESCRIPTOR)], 0
    while parts:
        at, end, kind = parts.pop()
        while at < end:
            num_fields += 1
            tag, at = _varint(body, at)
            size = {1: 8, 5: 4}.get(tag & 7, 0)
            if tag & 7 == 0:
                _, at = _varint(body, at)
            elif tag & 7 == 2:
                size, at = _varint(body, at)
                field = kind.fields_by_number.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    parts.append((at, at + size, field.message_type))
                elif field is not None and field.type not in (field.TYPE_BYTES, field.TYPE_STRING):
                    num_fields += size  # packed numbers, of at least a byte
            elif not size:
                raise _malformed(body)  # groups, which the message does not have
            at += size
            if num_fields > MAX_FIELDS:
                raise InvalidRequestError(
                    f"body: has more than {MAX_FIELDS} fields; send fewer data at once, and their "
                    "tokens in few chunks"
                )
        if at != end:
            raise _malformed(body)


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """Return a number of 7 bits a byte, and the place after it."""
    value = 0
    for index, byte in enumerate(body[at : at + 10]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    raise _malformed(body)


def _malformed(body: bytes) -> InvalidRequestError:
    return InvalidRequestError(f"body: {len(body)} bytes that are no ForwardBackwardRequest")
