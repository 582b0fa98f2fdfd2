"""Which box of a tensor a rank holds, and many boxes packed into one message.

A *box* is torchstore's `TensorSlice`: offsets and shape within the global tensor, with the
rank's coordinates on the mesh axes that shard it. Ranks that hold the same box, because a mesh
axis replicates it or because it lies on several meshes, so have the same coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from rl.weights.monarch_compat import Request, TensorSlice

ALIGNMENT = 16
"""Bytes; views of any dtype need their offset to be a multiple of the item size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one rank holds of one tensor."""

    name: str
    box: TensorSlice
    local: Tensor
    """The rank's own memory, of the box's shape."""
    is_first: bool = True
    """Of the ranks that hold the box, this is the one that sends it."""

    def dtype_to_send(self, dtype: torch.dtype, *, buffer_names: Collection[str]) -> torch.dtype:
        """`dtype` for a floating-point parameter; buffers and integers go as they are."""
        is_cast = self.local.is_floating_point() and self.name not in buffer_names
        return dtype if is_cast else self.local.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedPart:
    key: str
    box: TensorSlice
    dtype: torch.dtype
    offset: int
    """Where its bytes start in the message."""

    @property
    def num_bytes(self) -> int:
        return _num_bytes(self.box, self.dtype)

    def view(self, flat: Tensor) -> Tensor:
        """The box, in [bytes] uint8 that hold it."""
        raw = flat[self.offset : self.offset + self.num_bytes]
        return raw.view(self.dtype).view(self.box.local_shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outgoing:
    """A box that is to be sent."""

    key: str
    box: TensorSlice
    local: Tensor
    dtype: torch.dtype
    """To send it in."""
    is_first: bool = True
    """As `Part.is_first`."""

    @property
    def num_bytes(self) -> int:
        return _num_bytes(self.box, self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """Boxes of many tensors in one flat array (numpy: Monarch carries that faster than tensors)."""

    parts: list[PackedPart]
    data: np.ndarray
    """[bytes] uint8."""

    def tensors(self) -> Iterator[tuple[PackedPart, Tensor]]:
        """Each part with its box, a view of `data`."""
        flat = torch.from_numpy(self.data)
        for part in self.parts:
            yield part, part.view(flat)


def part_of(name: str, value: Tensor) -> Part | None:
    """What this rank holds of a state dict's tensor; None if it is not on the tensor's mesh.

    A tensor that is no DTensor counts as replicated over all ranks.

    Raises:
        ValueError: names the entry, if it is no tensor, is partial, or its shard is not one box.
    """
    if not isinstance(value, Tensor):
        raise ValueError(f"state_dict[{name!r}] is a {type(value).__name__}, not a tensor")
    if not isinstance(value, DTensor):
        shape = tuple(value.shape)
        whole = TensorSlice((0,) * len(shape), (), shape, shape, ())
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        return Part(name=name, box=whole, local=value.detach(), is_first=is_first)
    mesh = value.device_mesh
    if mesh.get_coordinate() is None:
        return None
    _check_is_box(name, value.placements, tuple(mesh.shape))
    request = Request.from_dtensor(value)
    box, local = request.tensor_slice, request.tensor_val
    assert box is not None
    assert local is not None
    sharded = [axis for axis, p in enumerate(value.placements) if not isinstance(p, Replicate)]
    box = TensorSlice(
        offsets=tuple(box.offsets),
        coordinates=tuple(box.coordinates[axis] for axis in sharded),
        global_shape=tuple(box.global_shape),
        local_shape=tuple(box.local_shape),
        mesh_shape=tuple(box.mesh_shape[axis] for axis in sharded),
    )
    coordinate = request.tensor_slice.coordinates
    copies = [axis for axis, p in enumerate(value.placements) if isinstance(p, Replicate)]
    is_first = all(coordinate[axis] == 0 for axis in copies)
    return Part(name=name, box=box, local=local.detach(), is_first=is_first)


def parts_of(state_dict: Mapping[str, Tensor]) -> list[Part]:
    """What this rank holds of every tensor, in the state dict's order."""
    parts = (part_of(name, value) for name, value in state_dict.items())
    return [part for part in parts if part is not None]


def outgoing_parts(
    state_dict: Mapping[str, Tensor],
    *,
    key_prefix: str,
    dtype: torch.dtype,
    buffer_names: Collection[str],
) -> list[Outgoing]:
    """What this rank holds, under the keys and in the dtypes in which it is sent."""
    return [
        Outgoing(
            key=key_prefix + part.name,
            box=part.box,
            local=part.local,
            dtype=part.dtype_to_send(dtype, buffer_names=buffer_names),
            is_first=part.is_first,
        )
        for part in parts_of(state_dict)
    ]


def lay_out(parts: Sequence[Outgoing]) -> tuple[list[PackedPart], int]:
    """Where each lies when they follow one another, and how many bytes that takes."""
    packed: list[PackedPart] = []
    end = 0
    for part in parts:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        packed.append(PackedPart(key=part.key, box=part.box, dtype=part.dtype, offset=offset))
        end = offset + packed[-1].num_bytes
    return packed, end


def empty_message(parts: Sequence[Outgoing]) -> Message:
    """With room for these, which are still to be copied into `Message.tensors`."""
    packed, num_bytes = lay_out(parts)
    return Message(parts=packed, data=np.empty(num_bytes, dtype=np.uint8))


def batches(parts: Sequence[Outgoing], *, max_bytes: int) -> Iterator[list[Outgoing]]:
    """The parts in order, split so that a message stays below `max_bytes` (one part may exceed it alone)."""
    batch: list[Outgoing] = []
    num_bytes = 0
    for part in parts:
        if batch and num_bytes + part.num_bytes > max_bytes:
            yield batch
            batch, num_bytes = [], 0
        batch.append(part)
        num_bytes += part.num_bytes
    if batch:
        yield batch


def within_box(tensor: Tensor, box: TensorSlice, inner: TensorSlice) -> Tensor:
    """The view of `tensor`, which holds `box`, where `inner` lies."""
    ranges = zip(inner.offsets, box.offsets, inner.local_shape, strict=True)
    return tensor[tuple(slice(start - base, start - base + size) for start, base, size in ranges)]


def num_elements(box: TensorSlice) -> int:
    return math.prod(box.local_shape)


def _num_bytes(box: TensorSlice, dtype: torch.dtype) -> int:
    return num_elements(box) * dtype.itemsize


def _check_is_box(name: str, placements: Sequence[Placement], mesh_shape: Sequence[int]) -> None:
    for axis, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            # FSDP over TP: the later axes cut the same dim first, and what is left of that is one piece.
            later = zip(placements[axis + 1 :], mesh_shape[axis + 1 :], strict=True)
            pieces = [size for p, size in later if isinstance(p, Shard) and p.dim == placement.dim]
            if int(np.prod(pieces, dtype=np.int64)) == placement.split_factor:
                continue
        elif isinstance(placement, Replicate | Shard):
            continue
        raise ValueError(
            f"state_dict[{name!r}] has placements {tuple(placements)} on a mesh of {tuple(mesh_shape)}: "
            "a tensor must be replicated or sharded, and its local shard one contiguous box"
        )
