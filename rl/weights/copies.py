"""Copies of boxes by threads, with the checksum of each destination.

On a CPU a box is copied in pieces of whole rows that fit a core's cache: each piece is copied, cast
on the way, and summed, without the GIL. Copies from or to a GPU are queued on a separate stream;
the GPU computes their checksums. Part of the columns of a stored box crosses the bus as whole rows,
and the GPU picks the columns: PyTorch would gather them on one core, into memory that is not
page-locked.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rl.types import BoxSum
from rl.utils.processes import use_threads
from rl.utils.threads import WorkerThread
from rl.weights.boxes import Part
from rl.weights.checksum import checksum, enqueue_checksum, make_box_sum

PIECE_BYTES = 2**21
"""Most bytes of the destination in one piece, unless a single row has more."""
GPU_PIECE_BYTES = 2**26
"""Most bytes of whole rows on their way to a GPU, which buffers each piece twice."""

Slices = tuple[slice, ...]
Sums = list[tuple[int, int]]
"""(number of the copy, checksum of a piece)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A box to copy; source and destination, one of which is `part.local`, have its shape."""

    part: Part
    source: Tensor
    destination: Tensor

    @property
    def device(self) -> torch.device | None:
        """The GPU that holds the source or the destination, or None."""
        for tensor in (self.source, self.destination):
            if tensor.device.type != "cpu":
                return tensor.device
        return None


class Copier:
    """Threads that copy, started at the first copy."""

    def __init__(self, *, num_threads: int) -> None:
        self._num_threads = num_threads
        self._threads: list[WorkerThread] = []
        self._gpu: _GPUCopier | None = None

    async def run(self, copies: Sequence[Copy]) -> list[BoxSum]:
        """Copy everything and return the checksum of each destination.

        The threads take the pieces of the copies on the CPU; the first thread then makes the copies
        that involve the GPU. After a cancellation, all threads have stopped writing before the
        error is raised.
        """
        if not self._threads:
            self._threads = [WorkerThread(f"weights-{i}") for i in range(self._num_threads)]
            await asyncio.gather(*(thread.run(use_threads, 1) for thread in self._threads))

        stop = threading.Event()
        # `next` of a list's iterator is atomic, so the threads can share it; a generator's is not.
        pieces = iter(list(_split_copies(copies)))

        def copy_pieces() -> Sums:
            done: Sums = []
            for i, piece in pieces:
                done.append((i, _copy_piece(copies[i], piece)))
                if stop.is_set():
                    break
            return done

        work = [thread.run(copy_pieces) for thread in self._threads]
        devices = [copy.device for copy in copies if copy.device is not None]
        if devices:
            self._gpu = self._gpu or _GPUCopier(devices[0])
            work.append(self._threads[0].run(partial(self._gpu.run, copies, stop=stop)))

        # A cancelled `gather` would cancel the waits but not the threads, which would write into
        # memory that the caller takes for its own again: so wait for them, whatever happens.
        tasks = [asyncio.ensure_future(job) for job in work]
        try:
            results = await asyncio.gather(*(asyncio.shield(task) for task in tasks))
        finally:
            stop.set()
            await asyncio.wait(tasks)

        return _add_up(copies, itertools.chain.from_iterable(results))

    def close(self) -> None:
        for thread in self._threads:
            thread.stop(timeout_s=1.0)
        self._threads, self._gpu = [], None


def _add_up(copies: Sequence[Copy], sums: Iterable[tuple[int, int]]) -> list[BoxSum]:
    """Return the checksum of each copy, given those of its pieces."""
    totals = [0] * len(copies)
    for i, value in sums:
        totals[i] = (totals[i] + value) % 2**64

    box_sums = []
    for copy, total in zip(copies, totals, strict=True):
        part, dtype = copy.part, copy.destination.dtype
        box_sums.append(make_box_sum(part.name, part.box, dtype=dtype, value=total))
    return box_sums


def _split_copies(copies: Sequence[Copy]) -> Iterator[tuple[int, Slices]]:
    """Yield the pieces of all copies on the CPU, with the number of each copy."""
    for i, copy in enumerate(copies):
        if copy.device is None:
            for piece in split_rows(copy.destination):
                yield i, piece


def split_rows(tensor: Tensor, *, max_bytes: int = PIECE_BYTES) -> Iterator[Slices]:
    """Yield slices of rows that cover the tensor, each of at most `max_bytes` or one row."""
    if tensor.dim() == 0:
        yield ()
    elif tensor.nbytes:
        step = max(1, max_bytes * len(tensor) // tensor.nbytes)
        for start in range(0, len(tensor), step):
            yield (slice(start, start + step),)


def _copy_piece(copy: Copy, piece: Slices) -> int:
    destination = copy.destination[piece]
    destination.copy_(copy.source[piece])

    # The destination is summed, not the source: the sum is of what has arrived.
    offsets = list(copy.part.box.offsets)
    if piece:
        offsets[0] += piece[0].start
    return checksum(destination, global_shape=copy.part.box.global_shape, offsets=offsets)


class _GPUCopier:
    """Stream of this process's GPU, for copies from and to it; used by one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One stream for all copies: PyTorch keeps freed memory for the stream that it was used on.
        self._stream: torch.cuda.Stream | None = None

    def run(self, copies: Sequence[Copy], *, stop: threading.Event) -> Sums:
        """Make the copies that involve the GPU and wait for them; return their checksums."""
        # Else leaving the stream would open a context on GPU 0.
        torch.cuda.set_device(self._device)
        torch.cuda.synchronize()  # Weights are computed on any stream: vLLM has its own.
        self._stream = self._stream or torch.cuda.Stream()
        try:
            with torch.cuda.stream(self._stream):
                sums_by_copy = dict(self._enqueue(copies, stop=stop))
                # The only wait: the next copy is queued before the last one ends.
                sums = torch.stack(list(sums_by_copy.values())).tolist() if sums_by_copy else []
        finally:
            self._stream.synchronize()  # After an error too, nothing is written once this returns.
        return list(zip(sums_by_copy, sums, strict=True))

    def _enqueue(
        self, copies: Sequence[Copy], *, stop: threading.Event
    ) -> Iterator[tuple[int, Tensor]]:
        """Queue the copies; yield the number of each and its checksum, [] int64 on the GPU."""
        for i, copy in enumerate(copies):
            if copy.device is None or stop.is_set():
                continue
            destination, on_gpu = copy.destination, copy.source
            if copy.source.is_cuda:
                # Cast on the GPU, so that only the cast tensor crosses the bus, and sum it there.
                on_gpu = copy.source.to(destination.dtype)
                destination.copy_(on_gpu, non_blocking=True)
            else:
                for piece in split_rows(destination, max_bytes=GPU_PIECE_BYTES):
                    rows = send_whole_rows(copy.source[piece], device=self._device)
                    destination[piece].copy_(rows, non_blocking=True)
            if destination.is_cuda:
                on_gpu = destination
            box = copy.part.box
            yield i, enqueue_checksum(on_gpu, global_shape=box.global_shape, offsets=box.offsets)


def send_whole_rows(source: Tensor, *, device: torch.device) -> Tensor:
    """Return part of a box's columns on `device`, as a view of the rows that contain them.

    Contiguous rows are returned as they are.
    """
    if source.is_contiguous():
        return source
    # From the first element to the last, with all that lies between: one block of memory.
    size = 1
    for n, step in zip(source.shape, source.stride(), strict=True):
        size += (n - 1) * step
    flat = source.as_strided((size,), (1,)).to(device, non_blocking=True)
    return flat.as_strided(source.shape, source.stride())
