"""Boxes: the part of a tensor that a rank holds, the boxes that a pull reads, and their copies.

A *box* is torchstore's `TensorSlice`: offsets and shape within the whole tensor.

On a CPU a box is copied in pieces of whole rows that fit a core's cache: each piece is copied, cast
on the way, and summed, without the GIL. Copies from or to a GPU are queued on a separate stream;
the GPU computes their checksums. Part of the columns of a stored box crosses the bus as whole rows,
and the GPU picks the columns: PyTorch would gather them on one core, into memory that is not
page-locked.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torchstore.transport import Request, TensorSlice
from torchstore.utils import get_slice_intersection

from rl.types import BoxSum
from rl.utils.processes import use_threads
from rl.utils.threads import WorkerThread
from rl.weights.checksum import box_sum, checksum, queue_checksum
from rl.weights.types import WeightMismatchError

ALIGNMENT = 16
"""Bytes; the offset of a view must be a multiple of the item size of any dtype."""
PIECE_BYTES = 2**21
"""Most bytes of the destination in one piece, unless a single row has more."""
GPU_PIECE_BYTES = 2**26
"""The same of whole rows on their way to a GPU, which holds each piece twice."""

Slices = tuple[slice, ...]
Sums = list[tuple[int, int]]
"""(number of the copy, checksum of a piece)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A box of one tensor in this rank's memory."""

    name: str
    box: TensorSlice
    local: Tensor
    dtype: torch.dtype
    """Dtype to send the box in, or of the stored box."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedPart:
    """A box at an offset within flat memory: a shared-memory segment, a file or a message."""

    name: str
    box: TensorSlice
    dtype: torch.dtype
    offset: int
    """Bytes before the box."""

    def view(self, flat: Tensor) -> Tensor:
        """Return the box as a view of `flat`, [bytes] uint8."""
        data = flat[self.offset : self.offset + num_bytes(self)]
        return data.view(self.dtype).view(self.box.local_shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """A box to fetch, and where it goes."""

    part: Part
    stored: PackedPart
    """The stored box that contains this box."""

    def within(self, tensor: Tensor) -> Tensor:
        """Return the view of the stored box `tensor` at the place of this box."""
        return within_box(tensor, self.stored.box, self.part.box)


def num_elements(box: TensorSlice) -> int:
    return math.prod(box.local_shape)


def num_bytes(part: Part | PackedPart) -> int:
    return num_elements(part.box) * part.dtype.itemsize


def within_box(tensor: Tensor, box: TensorSlice, inner: TensorSlice) -> Tensor:
    """Return the view of `tensor`, which holds `box`, at the place of `inner`."""
    ranges = zip(inner.offsets, box.offsets, inner.local_shape, strict=True)
    return tensor[tuple(slice(start - base, start - base + size) for start, base, size in ranges)]


def parts_of(state_dict: Mapping[str, Tensor]) -> list[Part]:
    """Return this rank's box of every tensor, in the state dict's order.

    A tensor that is no DTensor counts as equal on all ranks. A tensor whose mesh does not contain
    this rank has no box here.

    Raises:
        ValueError: a tensor is partial, or its shard is not one box; names the tensor.
    """
    parts = []
    for name, value in state_dict.items():
        if not isinstance(value, DTensor):
            shape = tuple(value.shape)
            box, local = _box((0,) * len(shape), global_shape=shape, local_shape=shape), value
        elif value.device_mesh.get_coordinate() is not None:
            _check_is_box(name, value.placements, tuple(value.device_mesh.shape))
            request = Request.from_dtensor(value)
            own, local = request.tensor_slice, request.tensor_val
            box = _box(own.offsets, global_shape=own.global_shape, local_shape=own.local_shape)
        else:
            continue
        parts.append(Part(name=name, box=box, local=local.detach(), dtype=value.dtype))
    return parts


def _box(
    offsets: Iterable[int], *, global_shape: Iterable[int], local_shape: Iterable[int]
) -> TensorSlice:
    """Return a box without coordinates on a mesh."""
    return TensorSlice(tuple(offsets), (), tuple(global_shape), tuple(local_shape), ())


def _check_is_box(name: str, placements: Sequence[Placement], mesh_shape: Sequence[int]) -> None:
    for axis, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            # FSDP over TP: the later axes cut the same dim first, and the rest is one contiguous
            # piece.
            later = zip(placements[axis + 1 :], mesh_shape[axis + 1 :], strict=True)
            pieces = [size for p, size in later if isinstance(p, Shard) and p.dim == placement.dim]
            if math.prod(pieces) == placement.split_factor:
                continue
        elif isinstance(placement, Replicate | Shard):
            continue
        raise ValueError(
            f"state_dict[{name!r}] has placements {tuple(placements)} on a mesh of "
            f"{tuple(mesh_shape)}: a tensor must be replicated or sharded, and its local shard one "
            "contiguous box"
        )


def outgoing_parts(
    state_dict: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    buffer_names: Collection[str],
    rank: int = 0,
) -> list[Part]:
    """Return the boxes that this rank sends, with the dtypes to send them in.

    Floating-point parameters are sent in `dtype`, buffers and integers in their own. Of ranks that
    hold the same box, the first sends it; a tensor that is no DTensor counts as equal on all ranks.
    """
    return [
        replace(part, dtype=dtype)
        if part.local.is_floating_point() and part.name not in buffer_names
        else part
        for part in parts_of(state_dict)
        if _is_first_replica(state_dict[part.name], rank)
    ]


def _is_first_replica(value: Tensor, rank: int) -> bool:
    if not isinstance(value, DTensor):
        return rank == 0
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside the mesh has no part"
    axes = zip(coordinate, value.placements, strict=True)
    return all(place == 0 for place, placement in axes if isinstance(placement, Replicate))


def lay_out(parts: Sequence[Part]) -> tuple[list[PackedPart], int]:
    """Place the parts one after another; return them with their offsets, and the number of
    bytes.
    """
    packed: list[PackedPart] = []
    end = 0
    for part in parts:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        packed.append(PackedPart(name=part.name, box=part.box, dtype=part.dtype, offset=offset))
        end = offset + num_bytes(part)
    return packed, end


def batches(reads: Sequence[Read], *, max_bytes: int) -> Iterator[list[Read]]:
    """Yield the reads in order, in batches below `max_bytes`; one large box is a batch by
    itself.
    """
    batch: list[Read] = []
    size = 0
    for read in reads:
        if batch and size + num_bytes(read.part) > max_bytes:
            yield batch
            batch, size = [], 0
        batch.append(read)
        size += num_bytes(read.part)
    if batch:
        yield batch


def plan_reads(
    version: int, parts: Sequence[Part], shards: Sequence[Sequence[PackedPart]]
) -> dict[int, list[Read]]:
    """Return the reads that fill `parts`, by the number of the shard that they read.

    Raises:
        WeightMismatchError: names or shapes differ, or the stored boxes do not cover a part.
    """
    stored: dict[str, list[tuple[int, PackedPart]]] = {}
    for number, shard in enumerate(shards):
        for packed in shard:
            stored.setdefault(packed.name, []).append((number, packed))
    wanted = {part.name for part in parts}
    if stored.keys() != wanted:
        raise WeightMismatchError(
            f"version {version} holds other tensors than asked for: "
            f"missing {_few(wanted - stored.keys())}, not asked for {_few(stored.keys() - wanted)}"
        )
    reads: dict[int, list[Read]] = {}
    for part in parts:
        for number, read in _reads_of(part, stored[part.name]):
            reads.setdefault(number, []).append(read)
    return reads


def _reads_of(part: Part, stored: Sequence[tuple[int, PackedPart]]) -> Iterator[tuple[int, Read]]:
    num_covered, shape = 0, part.box.global_shape
    covered: set[tuple[int, ...]] = set()
    for number, source in stored:
        if source.box.global_shape != shape:
            raise WeightMismatchError(
                f"{part.name!r} has shape {source.box.global_shape} in the store and {shape} here"
            )
        common = get_slice_intersection(source.box, part.box)
        if common is None or common.offsets in covered:  # several ranks may have sent the same box
            continue
        covered.add(common.offsets)
        num_covered += num_elements(common)
        local = within_box(part.local, part.box, common)
        wanted = Part(name=part.name, box=common, local=local, dtype=source.dtype)
        yield number, Read(part=wanted, stored=source)
    if num_covered != num_elements(part.box):
        raise WeightMismatchError(
            f"{part.name!r}: the store covers {num_covered} of the {num_elements(part.box)} "
            "elements here"
        )


def _few(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
    return ", ".join(map(repr, listed[:5])) + more or "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A box to copy; source and destination, one of which is `part.local`, have its shape."""

    part: Part
    source: Tensor
    destination: Tensor

    @property
    def device(self) -> torch.device | None:
        """The GPU that holds the source or the destination, or None."""
        devices = (self.source.device, self.destination.device)
        return next((device for device in devices if device.type != "cpu"), None)


class Copier:
    """Threads that copy, started at the first copy."""

    def __init__(self, *, num_threads: int) -> None:
        self._num_threads = num_threads
        self._threads: list[WorkerThread] = []
        self._gpu: _GPUCopier | None = None

    async def run(self, copies: Sequence[Copy]) -> list[BoxSum]:
        """Copy everything and return the checksum of each destination.

        After a cancellation, all threads have stopped writing before the error is raised.
        """
        if not self._threads:
            self._threads = [WorkerThread(f"weights-{i}") for i in range(self._num_threads)]
            await asyncio.gather(*(thread.run(use_threads, 1) for thread in self._threads))
        stop = threading.Event()
        on_cpu = ((i, copy) for i, copy in enumerate(copies) if copy.device is None)
        # `next` of a list's iterator is atomic, so the threads share it.
        pieces = iter([(i, piece) for i, copy in on_cpu for piece in pieces_of(copy.destination)])

        def copy_pieces() -> Sums:
            done: Sums = []
            for i, piece in pieces:
                done.append((i, _copy_piece(copies[i], piece)))
                if stop.is_set():
                    break
            return done

        work = [thread.run(copy_pieces) for thread in self._threads]
        if device := next((copy.device for copy in copies if copy.device is not None), None):
            self._gpu = self._gpu or _GPUCopier(device)
            work.append(self._threads[0].run(partial(self._gpu.run, copies, stop=stop)))
        tasks = [asyncio.ensure_future(job) for job in work]
        try:
            results = await asyncio.gather(*(asyncio.shield(task) for task in tasks))
        finally:
            stop.set()
            await asyncio.wait(tasks)
        sums = [0] * len(copies)
        for i, value in itertools.chain.from_iterable(results):
            sums[i] = (sums[i] + value) % 2**64
        return [
            box_sum(copy.part.name, copy.part.box, dtype=copy.destination.dtype, value=value)
            for copy, value in zip(copies, sums, strict=True)
        ]

    def close(self) -> None:
        for thread in self._threads:
            thread.stop(timeout_s=1.0)
        self._threads, self._gpu = [], None


def pieces_of(tensor: Tensor, *, max_bytes: int = PIECE_BYTES) -> Iterator[Slices]:
    """Yield slices of rows, each of at most `max_bytes` or one row, that together cover the
    tensor.
    """
    if tensor.dim() == 0:
        yield ()
    elif tensor.nbytes:
        step = max(1, max_bytes * len(tensor) // tensor.nbytes)
        yield from ((slice(start, start + step),) for start in range(0, len(tensor), step))


def _copy_piece(copy: Copy, piece: Slices) -> int:
    destination = copy.destination[piece]
    destination.copy_(copy.source[piece])
    starts = [part.start for part in piece] + [0] * (destination.dim() - len(piece))
    offsets = [offset + start for offset, start in zip(copy.part.box.offsets, starts, strict=True)]
    return checksum(destination, global_shape=copy.part.box.global_shape, offsets=offsets)


class _GPUCopier:
    """Stream of this process's GPU, for copies from and to it; used by one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        """One stream for all copies, since PyTorch keeps freed memory for the stream that it was
        used on.
        """

    def run(self, copies: Sequence[Copy], *, stop: threading.Event) -> Sums:
        """Make the copies that involve the GPU and wait for them; return their checksums."""
        torch.cuda.set_device(
            self._device
        )  # Else leaving the stream would open a context on GPU 0.
        torch.cuda.synchronize()  # Weights are computed on any stream: vLLM has its own.
        self._stream = self._stream or torch.cuda.Stream()
        try:
            with torch.cuda.stream(self._stream):
                queued = dict(self._queue(copies, stop=stop))
                # The only wait: the next copy is queued before the last one ends.
                sums = torch.stack(list(queued.values())).tolist() if queued else []
        finally:
            self._stream.synchronize()  # After an error too, nothing is written once this returns.
        return list(zip(queued, sums, strict=True))

    def _queue(
        self, copies: Sequence[Copy], *, stop: threading.Event
    ) -> Iterator[tuple[int, Tensor]]:
        """Queue the copies; yield the number of each and its checksum, [] int64 on the GPU."""
        for i, copy in enumerate(copies):
            if copy.device is None or stop.is_set():
                continue
            destination, sent = copy.destination, copy.source
            if sent.is_cuda:
                # Cast on the GPU, so that only the cast tensor crosses the bus, and sum it there.
                sent = sent.to(destination.dtype)
                destination.copy_(sent, non_blocking=True)
            else:
                for piece in pieces_of(destination, max_bytes=GPU_PIECE_BYTES):
                    destination[piece].copy_(
                        whole_rows(sent[piece], device=self._device), non_blocking=True
                    )
            summed = destination if destination.is_cuda else sent
            box = copy.part.box
            yield i, queue_checksum(summed, global_shape=box.global_shape, offsets=box.offsets)


def whole_rows(source: Tensor, *, device: torch.device) -> Tensor:
    """Return a view of part of a box's columns on `device`, with all that lies between them;
    contiguous ones as is.
    """
    if source.is_contiguous():
        return source
    size = 1 + sum((n - 1) * step for n, step in zip(source.shape, source.stride(), strict=True))
    flat = source.as_strided((size,), (1,)).to(device, non_blocking=True)
    return flat.as_strided(source.shape, source.stride())
