"""Boxes: the part of a tensor that a rank holds, and the boxes that a pull reads.

A *box* is torchstore's `TensorSlice`: offsets and shape within the whole tensor, and the rank's
coordinates on the mesh axes that shard the tensor. Ranks that hold the same box, because a mesh axis
replicates it or because it lies on several meshes, therefore have equal coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torchstore.transport import Request, TensorSlice
from torchstore.utils import get_slice_intersection

from rl.weights.shared_memory import SegmentRef
from rl.weights.types import WeightMismatchError

ALIGNMENT = 16
"""Bytes; the offset of a view must be a multiple of the item size of any dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The box of one tensor that this rank holds."""

    name: str
    box: TensorSlice
    local: Tensor
    """The rank's own memory, of the box's shape."""
    dtype: torch.dtype
    """The dtype to send the box in."""

    @property
    def num_bytes(self) -> int:
        return num_elements(self.box) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedPart:
    """A box at an offset within a message, a file or a shared-memory segment."""

    name: str
    box: TensorSlice
    dtype: torch.dtype
    offset: int
    """Bytes before the box."""

    @property
    def num_bytes(self) -> int:
        return num_elements(self.box) * self.dtype.itemsize

    def view(self, flat: Tensor) -> Tensor:
        """Return the box as a view of `flat`, [bytes] uint8."""
        data = flat[self.offset : self.offset + self.num_bytes]
        return data.view(self.dtype).view(self.box.local_shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A stored box of a tensor, and its place."""

    volume: int
    """Number of the volume."""
    part: PackedPart
    place: SegmentRef | Path | None
    """The shared memory or the file that holds the box; None if the volume got it in a message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """A box to fetch, and where it goes."""

    stored: Stored
    """The stored box that contains this box."""
    box: TensorSlice
    destination: Tensor

    @property
    def name(self) -> str:
        return self.stored.part.name

    @property
    def num_bytes(self) -> int:
        return num_elements(self.box) * self.stored.part.dtype.itemsize

    def within(self, tensor: Tensor) -> Tensor:
        """Return the view of the stored box `tensor` at the place of this box."""
        return within_box(tensor, self.stored.part.box, self.box)


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """Boxes of many tensors in one flat array (numpy: Monarch carries that faster than tensors)."""

    parts: list[PackedPart]
    data: np.ndarray
    """[bytes] uint8."""

    @classmethod
    def empty(cls, parts: Sequence[Part]) -> Message:
        """Return a message with room for `parts`, whose data is not copied yet."""
        packed, num_bytes = lay_out(parts)
        return cls(parts=packed, data=np.empty(num_bytes, dtype=np.uint8))

    def tensors(self) -> list[Tensor]:
        """Return each part's box, a view of `data`."""
        flat = torch.from_numpy(self.data)
        return [part.view(flat) for part in self.parts]


B = TypeVar("B", Part, Read)


def parts_of(state_dict: Mapping[str, Tensor]) -> list[Part]:
    """Return this rank's box of every tensor, in the state dict's order.

    A tensor that is no DTensor counts as equal on all ranks. A tensor whose mesh does not contain this rank
    has no box here.

    Raises:
        ValueError: an entry is no tensor, is partial, or its shard is not one box; names the entry.
    """
    parts = []
    for name, value in state_dict.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"state_dict[{name!r}] is a {type(value).__name__}, not a tensor")
        if not isinstance(value, DTensor):
            shape = tuple(value.shape)
            whole = TensorSlice((0,) * len(shape), (), shape, shape, ())
            parts.append(Part(name=name, box=whole, local=value.detach(), dtype=value.dtype))
        elif value.device_mesh.get_coordinate() is not None:
            parts.append(_shard_of(name, value))
    return parts


def _shard_of(name: str, value: DTensor) -> Part:
    mesh = value.device_mesh
    _check_is_box(name, value.placements, tuple(mesh.shape))
    request = Request.from_dtensor(value)
    box, coordinate, local = request.tensor_slice, mesh.get_coordinate(), request.tensor_val
    assert coordinate is not None
    axes = zip(coordinate, mesh.shape, value.placements, strict=True)
    sharded = [(place, size) for place, size, placement in axes if not isinstance(placement, Replicate)]
    box = TensorSlice(
        offsets=tuple(box.offsets),
        coordinates=tuple(place for place, _ in sharded),
        global_shape=tuple(box.global_shape),
        local_shape=tuple(box.local_shape),
        mesh_shape=tuple(size for _, size in sharded),
    )
    return Part(name=name, box=box, local=local.detach(), dtype=value.dtype)


def outgoing_parts(
    state_dict: Mapping[str, Tensor], *, dtype: torch.dtype, buffer_names: Collection[str]
) -> list[Part]:
    """Return this rank's boxes with the dtypes to send them in.

    Floating-point parameters are sent in `dtype`, buffers and integers in their own.
    """
    return [
        replace(part, dtype=dtype)
        if part.local.is_floating_point() and part.name not in buffer_names
        else part
        for part in parts_of(state_dict)
    ]


def lay_out(parts: Sequence[Part]) -> tuple[list[PackedPart], int]:
    """Place the parts one after another; return them with their offsets, and the number of bytes."""
    packed: list[PackedPart] = []
    end = 0
    for part in parts:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        packed.append(PackedPart(name=part.name, box=part.box, dtype=part.dtype, offset=offset))
        end = offset + part.num_bytes
    return packed, end


def batches(boxes: Sequence[B], *, max_bytes: int) -> Iterator[list[B]]:
    """Yield the boxes in order, in batches below `max_bytes`; one large box is a batch by itself."""
    batch: list[B] = []
    num_bytes = 0
    for box in boxes:
        if batch and num_bytes + box.num_bytes > max_bytes:
            yield batch
            batch, num_bytes = [], 0
        batch.append(box)
        num_bytes += box.num_bytes
    if batch:
        yield batch


def plan_reads(
    version: int, parts: Sequence[Part], stored: Mapping[str, Sequence[Stored]]
) -> dict[int, list[Read]]:
    """Return the reads that fill `parts`, by volume; `stored` is by tensor name.

    Raises:
        WeightMismatchError: names or shapes differ, or the stored boxes do not cover a part.
    """
    wanted = {part.name for part in parts}
    if stored.keys() != wanted:
        raise WeightMismatchError(
            f"version {version} holds other tensors than asked for: "
            f"missing {_few(wanted - stored.keys())}, not asked for {_few(stored.keys() - wanted)}"
        )
    reads: dict[int, list[Read]] = {}
    for part in parts:
        for read in _reads_of(part, stored[part.name]):
            reads.setdefault(read.stored.volume, []).append(read)
    return reads


def _reads_of(part: Part, stored: Sequence[Stored]) -> Iterator[Read]:
    num_covered, shape = 0, part.box.global_shape
    for source in stored:
        if source.part.box.global_shape != shape:
            raise WeightMismatchError(
                f"{part.name!r} has shape {source.part.box.global_shape} in the store and {shape} here"
            )
        common = get_slice_intersection(source.part.box, part.box)
        if common is not None:
            num_covered += num_elements(common)
            yield Read(stored=source, box=common, destination=within_box(part.local, part.box, common))
    if num_covered != num_elements(part.box):
        raise WeightMismatchError(
            f"{part.name!r}: the store covers {num_covered} of the {num_elements(part.box)} elements here"
        )


def within_box(tensor: Tensor, box: TensorSlice, inner: TensorSlice) -> Tensor:
    """Return the view of `tensor`, which holds `box`, at the place of `inner`."""
    ranges = zip(inner.offsets, box.offsets, inner.local_shape, strict=True)
    return tensor[tuple(slice(start - base, start - base + size) for start, base, size in ranges)]


def num_elements(box: TensorSlice) -> int:
    return math.prod(box.local_shape)


def _check_is_box(name: str, placements: Sequence[Placement], mesh_shape: Sequence[int]) -> None:
    for axis, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            # FSDP over TP: the later axes cut the same dim first, and the rest is one contiguous piece.
            later = zip(placements[axis + 1 :], mesh_shape[axis + 1 :], strict=True)
            pieces = [size for p, size in later if isinstance(p, Shard) and p.dim == placement.dim]
            if math.prod(pieces) == placement.split_factor:
                continue
        elif isinstance(placement, Replicate | Shard):
            continue
        raise ValueError(
            f"state_dict[{name!r}] has placements {tuple(placements)} on a mesh of {tuple(mesh_shape)}: "
            "a tensor must be replicated or sharded, and its local shard one contiguous box"
        )


def _few(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
    return ", ".join(map(repr, listed[:5])) + more or "none"
