"""Boxes: the part of a tensor that a rank holds, and the boxes that a pull reads.

Trainer and generator may be sharded differently, so a generator's box may lie in the boxes of
several trainer ranks, and a trainer's box in several generators'. A pull therefore cuts each of its
boxes along the stored boxes:

    stored by rank 0        rows 0 to 3 ]
    stored by rank 1        rows 4 to 7 ]    a generator's rows 2 to 5: two reads
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from rl.distributed.compat import StridedShard
from rl.weights.compat import find_offsets
from rl.weights.types import WeightMismatchError

ALIGNMENT = 16
"""Bytes; the offset of a view must be a multiple of the item size of any dtype."""
MAX_LISTED = 5
"""Names of tensors in an error message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """Place of a contiguous part within a whole tensor.

    Example:
        Rows 4 and 5 of a tensor of 6 x 8: Box(offsets=(4, 0), shape=(2, 8), global_shape=(6, 8)).
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Return the elements of both boxes of a tensor; None if they have none in common."""
        offsets, shape = [], []
        for start, size, other_start, other_size in zip(
            self.offsets, self.shape, other.offsets, other.shape, strict=True
        ):
            first = max(start, other_start)
            end = min(start + size, other_start + other_size)
            if first >= end:
                return None
            offsets.append(first)
            shape.append(end - first)
        return Box(offsets=tuple(offsets), shape=tuple(shape), global_shape=self.global_shape)

    def slice_inner(self, tensor: Tensor, *, inner: Box) -> Tensor:
        """Return the view of `tensor`, which holds this box, at the place of `inner`."""
        slices = []
        for start, base, size in zip(inner.offsets, self.offsets, inner.shape, strict=True):
            slices.append(slice(start - base, start - base + size))
        return tensor[tuple(slices)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A box of one tensor in this rank's memory."""

    name: str
    box: Box
    local: Tensor
    dtype: torch.dtype
    """Dtype to send the box in, or of the stored box."""

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedPart:
    """A box at an offset within flat memory: a shared-memory segment, a file or a message."""

    name: str
    box: Box
    dtype: torch.dtype
    offset: int
    """Bytes before the box."""

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * self.dtype.itemsize

    def view(self, flat: Tensor) -> Tensor:
        """Return the box as a view of `flat`, [bytes] uint8."""
        data = flat[self.offset : self.offset + self.num_bytes]
        return data.view(self.dtype).view(self.box.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """A box to fetch, and where it goes."""

    part: Part
    stored: PackedPart
    """The stored box that contains this box."""

    def slice_stored(self, tensor: Tensor) -> Tensor:
        """Return the view of the stored box `tensor` at the place of this box."""
        return self.stored.box.slice_inner(tensor, inner=self.part.box)


def list_parts(state_dict: Mapping[str, Tensor]) -> list[Part]:
    """Return this rank's box of every tensor, in the state dict's order.

    A tensor that is no DTensor counts as equal on all ranks. A tensor whose mesh does not contain
    this rank has no box here.

    Raises:
        ValueError: a tensor is partial, or its shard is not one box; names the tensor.
    """
    parts = []
    for name, value in state_dict.items():
        local, offsets = value, (0,) * value.dim()
        if isinstance(value, DTensor):
            if value.device_mesh.get_coordinate() is None:
                continue
            _check_is_box(name, value.placements, tuple(value.device_mesh.shape))
            local, offsets = value.to_local(), find_offsets(value)

        box = Box(offsets=offsets, shape=tuple(local.shape), global_shape=tuple(value.shape))
        parts.append(Part(name=name, box=box, local=local.detach(), dtype=value.dtype))
    return parts


def _check_is_box(name: str, placements: Sequence[Placement], mesh_shape: Sequence[int]) -> None:
    for axis, placement in enumerate(placements):
        if isinstance(placement, StridedShard):
            # FSDP over TP: the later axes cut the same dim first, and the rest is one contiguous
            # piece.
            num_pieces = 1
            for later, size in zip(placements[axis + 1 :], mesh_shape[axis + 1 :], strict=True):
                if isinstance(later, Shard) and later.dim == placement.dim:
                    num_pieces *= size
            if num_pieces == placement.split_factor:
                continue
        elif isinstance(placement, Replicate | Shard):
            continue
        raise ValueError(
            f"state_dict[{name!r}] has placements {tuple(placements)} on a mesh of "
            f"{tuple(mesh_shape)}: a tensor must be replicated or sharded, and its local shard one "
            "contiguous box"
        )


def select_parts_to_push(
    state_dict: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    buffer_names: Collection[str],
    rank: int = 0,
) -> list[Part]:
    """Return the boxes that this rank pushes, with the dtypes to store them in.

    Of ranks that hold the same box, the first pushes it. A tensor that is no DTensor counts as
    equal on all ranks, so rank 0 pushes it whole. Floating-point parameters are stored in `dtype`,
    buffers and integers in their own.

    Example:
        On a 2 x 2 mesh that replicates a tensor on the first axis and shards it on the second,
        ranks 0 and 1 push half of the tensor each, ranks 2 and 3 nothing.
    """
    outgoing = []
    for part in list_parts(state_dict):
        if not _is_first_replica(state_dict[part.name], rank):
            continue
        # A buffer is not cast: a rounded bias of a router would choose other experts.
        if part.local.is_floating_point() and part.name not in buffer_names:
            part = replace(part, dtype=dtype)
        outgoing.append(part)
    return outgoing


def _is_first_replica(value: Tensor, rank: int) -> bool:
    if not isinstance(value, DTensor):
        return rank == 0
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside the mesh has no part"
    for place, placement in zip(coordinate, value.placements, strict=True):
        if isinstance(placement, Replicate) and place != 0:
            return False
    return True


def assign_offsets(parts: Sequence[Part]) -> tuple[list[PackedPart], int]:
    """Place the boxes one after another in flat memory; return their places and the size in bytes.

    Example:
        Boxes of 6 and 8 bytes get the offsets 0 and 16, in 24 bytes.
    """
    packed: list[PackedPart] = []
    end = 0
    for part in parts:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        packed.append(PackedPart(name=part.name, box=part.box, dtype=part.dtype, offset=offset))
        end = offset + part.num_bytes
    return packed, end


def split_reads(reads: Sequence[Read], *, max_bytes: int) -> Iterator[list[Read]]:
    """Yield the reads in order, in batches below `max_bytes`; a larger box is a batch by itself."""
    batch: list[Read] = []
    size = 0
    for read in reads:
        if batch and size + read.part.num_bytes > max_bytes:
            yield batch
            batch, size = [], 0
        batch.append(read)
        size += read.part.num_bytes
    if batch:
        yield batch


def plan_reads(
    version: int, parts: Sequence[Part], shards: Sequence[Sequence[PackedPart]]
) -> dict[int, list[Read]]:
    """Return the reads that fill `parts`, by the number of the shard that they read.

    Example:
        If shards 0 and 1 store rows 0 to 3 and 4 to 7 of a tensor, a part of its rows 2 to 5 needs
        a read of rows 2 and 3 from shard 0, and of rows 4 and 5 from shard 1.

    Raises:
        WeightMismatchError: names or shapes differ, or the stored boxes do not cover a part.
    """
    stored: dict[str, list[tuple[int, PackedPart]]] = {}
    for number, shard in enumerate(shards):
        for packed in shard:
            stored.setdefault(packed.name, []).append((number, packed))

    # Before any read: a pull that fails here has left the generator's weights as they were.
    names = {part.name for part in parts}
    if stored.keys() != names:
        raise WeightMismatchError(
            f"version {version} holds other tensors than asked for: "
            f"missing {_list_names(names - stored.keys())}, "
            f"not asked for {_list_names(stored.keys() - names)}"
        )

    reads: dict[int, list[Read]] = {}
    for part in parts:
        for number, read in _cut_into_reads(part, stored[part.name]):
            reads.setdefault(number, []).append(read)
    return reads


def _cut_into_reads(
    part: Part, stored: Sequence[tuple[int, PackedPart]]
) -> Iterator[tuple[int, Read]]:
    """Yield a read of each stored box that shares elements with the part, and its shard's number.

    Stored boxes are disjoint or equal, so the elements can be counted.
    """
    num_covered, shape = 0, part.box.global_shape
    covered: set[tuple[int, ...]] = set()
    for number, source in stored:
        if source.box.global_shape != shape:
            raise WeightMismatchError(
                f"{part.name!r} has shape {source.box.global_shape} in the store and {shape} here"
            )
        common = source.box.intersect(part.box)
        if common is None or common.offsets in covered:  # several ranks may have sent the same box
            continue
        covered.add(common.offsets)
        num_covered += common.num_elements
        local = part.box.slice_inner(part.local, inner=common)
        target = Part(name=part.name, box=common, local=local, dtype=source.dtype)
        yield number, Read(part=target, stored=source)

    if num_covered != part.box.num_elements:
        raise WeightMismatchError(
            f"{part.name!r}: the store covers {num_covered} of the {part.box.num_elements} "
            "elements here"
        )


def _list_names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - MAX_LISTED} more" if len(ordered) > MAX_LISTED else ""
    return ", ".join(map(repr, ordered[:MAX_LISTED])) + more or "none"
