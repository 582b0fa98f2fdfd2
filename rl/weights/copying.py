"""Copies of many tensors, with a checksum of what was written, by a few threads.

On a CPU a tensor goes in pieces that a core's cache holds: each is copied, cast on the way, and
summed while it is still there. Neither PyTorch's copy nor the sum holds Python's lock. Copies
from or to a GPU go whole, on a stream of their own; there the sum is taken by the GPU.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl.distributed.threads import use_threads
from rl.weights.sums import checksum
from rl.worker_thread import WorkerThread

PIECE_BYTES = 2**21
"""Of the destination."""

Slices = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """Of one box, whose shape both tensors have."""

    source: Tensor
    destination: Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def device(self) -> torch.device | None:
        """The GPU that takes part."""
        devices = (self.source.device, self.destination.device)
        return next((device for device in devices if device.type != "cpu"), None)


class Copier:
    """Threads that copy; of one process, started when they are needed."""

    def __init__(self, *, num_threads: int) -> None:
        self._num_threads = num_threads
        self._threads: list[WorkerThread] = []

    async def run(self, copies: Sequence[Copy]) -> list[int]:
        """The checksum of each destination, once all is copied.

        When cancelled, the threads have stopped before this returns.
        """
        if not self._threads:
            self._threads = [WorkerThread(f"weights-{i}") for i in range(self._num_threads)]
            await asyncio.gather(*(thread.run(use_threads, 1) for thread in self._threads))
        sums = [0] * len(copies)
        stop = threading.Event()
        num_started = itertools.count()
        pieces = [
            (i, piece) for i, copy in enumerate(copies) if copy.device is None for piece in pieces_of(copy)
        ]

        def copy_pieces() -> list[tuple[int, int]]:
            # `next` of a count is one step for Python, whichever threads ask.
            done: list[tuple[int, int]] = []
            while (number := next(num_started)) < len(pieces) and not stop.is_set():
                i, piece = pieces[number]
                done.append((i, _copy_piece(copies[i], piece)))
            return done

        def copy_whole() -> list[tuple[int, int]]:
            return _copy_by_gpu(copies, stop=stop)

        work = [thread.run(copy_pieces) for thread in self._threads]
        if any(copy.device is not None for copy in copies):
            work.append(self._threads[0].run(copy_whole))
        tasks = [asyncio.ensure_future(job) for job in work]
        try:
            results = await asyncio.gather(*(asyncio.shield(task) for task in tasks))
        finally:
            stop.set()
            await asyncio.wait(tasks)
        for i, value in itertools.chain.from_iterable(results):
            sums[i] = (sums[i] + value) % 2**64
        return sums

    def close(self) -> None:
        """Let the threads end; they are idle."""
        for thread in self._threads:
            thread.stop(timeout_s=1.0)
        self._threads = []


def pieces_of(copy: Copy) -> Iterator[Slices]:
    """Slices that together are the tensor, each of about `PIECE_BYTES`, none empty."""
    return _pieces(tuple(copy.destination.shape), copy.destination.element_size())


def _pieces(shape: tuple[int, ...], element_size: int) -> Iterator[Slices]:
    num_bytes = math.prod(shape) * element_size
    if num_bytes <= PIECE_BYTES:
        if num_bytes:
            yield tuple(slice(0, size) for size in shape)
        return
    slice_bytes = num_bytes // shape[0]
    if slice_bytes > PIECE_BYTES and len(shape) > 1:
        for i, inner in itertools.product(range(shape[0]), _pieces(shape[1:], element_size)):
            yield (slice(i, i + 1), *inner)
        return
    step = max(1, PIECE_BYTES // slice_bytes)
    inner = tuple(slice(0, size) for size in shape[1:])
    for start in range(0, shape[0], step):
        yield (slice(start, min(start + step, shape[0])), *inner)


def _copy_piece(copy: Copy, piece: Slices) -> int:
    source, destination = copy.source, copy.destination
    for dim, part in enumerate(piece):
        if part.stop - part.start < destination.shape[dim]:
            source = source.narrow(dim, part.start, part.stop - part.start)
            destination = destination.narrow(dim, part.start, part.stop - part.start)
    destination.copy_(source)
    offsets = [start + part.start for start, part in zip(copy.offsets, piece, strict=True)]
    return checksum(destination, global_shape=copy.global_shape, offsets=offsets)


def _copy_by_gpu(copies: Sequence[Copy], *, stop: threading.Event) -> list[tuple[int, int]]:
    """Those in which a GPU takes part, after what is queued on its default stream; (number, sum)."""
    done: list[tuple[int, int]] = []
    by_device: dict[torch.device, list[int]] = {}
    for i, copy in enumerate(copies):
        if copy.device is not None:
            by_device.setdefault(copy.device, []).append(i)
    for device, numbers in by_device.items():
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.default_stream(device))
        with torch.cuda.stream(stream):
            for i in numbers:
                if stop.is_set():
                    break
                copy = copies[i]
                sent = copy.source
                if sent.device.type != "cpu":
                    # Cast where it is, so that only what is sent crosses the bus, and is summed here.
                    sent = sent.to(copy.destination.dtype)
                copy.destination.copy_(sent, non_blocking=True)
                summed = sent if copy.destination.device.type == "cpu" else copy.destination
                done.append((i, checksum(summed, global_shape=copy.global_shape, offsets=copy.offsets)))
        stream.synchronize()
    return done
