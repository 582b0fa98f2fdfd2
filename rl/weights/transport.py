"""Four ways for weights to get from a trainer rank to a generator rank.

    shared memory   processes of one host: written once, read in place
    messages        torchstore volumes on other hosts, by Monarch's messages
    RDMA            the same, by torchstore's transport where there is hardware
    files           one file of each rank in a folder that all hosts see

Sending and fetching return the checksum of each box. On a CPU a tensor is copied in pieces that fit a core's
cache: each piece is copied, cast on the way, and summed while it is still in the cache. Neither PyTorch's copy
nor the checksum holds the GIL. Copies from or to a GPU are done whole, on a separate stream; the GPU computes
their checksums.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import warnings
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torchstore.transport import Request, TensorSlice
from torchstore.transport.buffers import rdma_available
from torchstore.transport.pipe import Pipe

from rl.distributed.runtime import use_threads
from rl.types import BoxSum
from rl.utils.threads import WorkerThread, run_aside
from rl.weights.checksum import box_sum, checksum
from rl.weights.plan import Message, Part, Read, batches, lay_out
from rl.weights.shared_memory import SegmentMaps, SegmentRef, this_host
from rl.weights.types import StaleSegmentError, VersionNotFoundError, WeightStoreError
from rl.weights.volume import key_of

MAX_MESSAGE_BYTES = 16 * 2**20
"""Larger messages are slower: the allocator reuses memory of this size, and touches larger memory anew."""
PIECE_BYTES = 2**21
"""Bytes of the destination that are copied at a time."""

T = TypeVar("T")
Slices = tuple[slice, ...]
Sums = list[tuple[int, int]]
"""(number of the copy, checksum of a piece)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """One box of a tensor to copy; source and destination have the shape of the box."""

    name: str
    box: TensorSlice
    source: Tensor
    destination: Tensor

    @property
    def device(self) -> torch.device | None:
        """The GPU that holds the source or the destination."""
        devices = (self.source.device, self.destination.device)
        return next((device for device in devices if device.type != "cpu"), None)

    def sum(self, tensor: Tensor, *, offsets: Sequence[int]) -> int:
        return checksum(tensor, global_shape=self.box.global_shape, offsets=offsets)


class Transport:
    """The copy threads and the mapped shared memory of one process."""

    def __init__(self, *, num_threads: int, max_age: int) -> None:
        """`max_age` is the number of pushes or pulls that an unused segment stays mapped."""
        self._copier = Copier(num_threads=num_threads)
        self._maps = SegmentMaps(max_age=max_age)

    async def send_by_memory(
        self, volume: Any, version: int, outgoing: Sequence[Part], *, num_versions: int
    ) -> tuple[SegmentRef | None, list[BoxSum]]:
        """Have the volume reserve shared memory, with room for `num_versions` in all, and fill it."""
        if not outgoing:
            return None, []
        self._maps.begin_operation()
        parts, num_bytes = lay_out(outgoing)
        ref: SegmentRef = await volume.reserve.call_one(version, parts, num_bytes, num_versions)
        with self._maps.holding(ref, pinned=outgoing[0].local.is_cuda) as data:
            return ref, await self._send(outgoing, [part.view(data) for part in parts])

    async def send_by_messages(self, volume: Any, version: int, outgoing: Sequence[Part]) -> list[BoxSum]:
        """Put the boxes into the volume, in as few messages as possible."""
        sums: list[BoxSum] = []
        for batch in batches(outgoing, max_bytes=MAX_MESSAGE_BYTES):
            message = Message.empty(batch)
            sums += await self._send(batch, message.tensors())
            await volume.put_batch.call_one(version, message)
        return sums

    async def send_by_file(self, file: Path, outgoing: Sequence[Part]) -> list[BoxSum]:
        """Write the boxes to one file; raise WeightStoreError if that fails."""
        message = Message.empty(outgoing)
        sums = await self._send(outgoing, message.tensors())

        def write() -> None:
            file.parent.mkdir(exist_ok=True)
            message.data.tofile(file)

        try:
            await run_aside(write, name="weight-file")
        except OSError as error:
            raise WeightStoreError(f"weights were not written to {file}: {error}") from error
        return sums

    async def fetch(
        self, volume: Any, version: int, reads: Sequence[Read], *, is_near: bool, rdma: bool
    ) -> list[BoxSum]:
        """Fill the destinations from one volume's boxes; use its shared memory only if `is_near`.

        Raises:
            VersionNotFoundError: the version was deleted after it was located.
        """
        place = reads[0].stored.place
        if is_near and isinstance(place, SegmentRef) and place.host == this_host():
            return await self.fetch_by_memory(reads)
        if isinstance(place, Path):
            return await self.fetch_by_file(reads)
        if rdma:
            return await self.fetch_by_rdma(volume, version, reads)
        return await self.fetch_by_messages(volume, version, reads)

    async def fetch_by_memory(self, reads: Sequence[Read]) -> list[BoxSum]:
        """Fill the destinations from shared memory."""
        self._maps.begin_operation()
        data: dict[Any, Tensor] = {}
        with ExitStack() as held:
            try:
                for read in reads:
                    ref = read.stored.place
                    assert isinstance(ref, SegmentRef)
                    if ref not in data:
                        holding = self._maps.holding(ref, pinned=read.destination.is_cuda)
                        data[ref] = held.enter_context(holding)
            except StaleSegmentError as error:
                raise VersionNotFoundError(
                    f"{read.name!r} was deleted while it was being pulled: {error}"
                ) from error
            stored = [read.stored.part.view(data[read.stored.place]) for read in reads]
            return await self._receive(reads, map(Read.within, reads, stored))

    async def fetch_by_file(self, reads: Sequence[Read]) -> list[BoxSum]:
        """Fill the destinations from the ranks' files."""

        def load(read: Read) -> Tensor:
            part, file = read.stored.part, read.stored.place
            assert isinstance(file, Path)
            data = np.fromfile(file, dtype=np.uint8, count=part.num_bytes, offset=part.offset)
            return torch.from_numpy(data).view(part.dtype).view(part.box.local_shape)

        try:
            stored = await run_aside(lambda: [load(read) for read in reads], name="weight-file")
        except (OSError, RuntimeError) as error:
            raise WeightStoreError(f"the files of a version cannot be read: {error}") from error
        return await self._receive(reads, map(Read.within, reads, stored))

    async def fetch_by_messages(self, volume: Any, version: int, reads: Sequence[Read]) -> list[BoxSum]:
        """Fill the destinations from the volume's messages."""
        sums: list[BoxSum] = []
        for batch in batches(reads, max_bytes=MAX_MESSAGE_BYTES):
            message = await volume.get_batch.call_one(version, [(read.name, read.box) for read in batch])
            sums += await self._receive(batch, message.tensors())
        return sums

    async def fetch_by_rdma(self, volume: Any, version: int, reads: Sequence[Read]) -> list[BoxSum]:
        """Fill the destinations by torchstore's own transport, box by box."""
        pipe = Pipe(volume)

        async def get(read: Read) -> Tensor:
            # torchstore writes into contiguous memory of the stored dtype.
            received = torch.empty(read.box.local_shape, dtype=read.stored.part.dtype)
            request = Request(tensor_val=received, tensor_slice=read.box)
            return await pipe.get_from_storage_volume(key_of(version, read.name), request)

        return await self._receive(reads, await gather_all(get(read) for read in reads))

    async def _send(self, outgoing: Sequence[Part], destinations: Iterable[Tensor]) -> list[BoxSum]:
        return await self._copy(outgoing, [part.local for part in outgoing], destinations)

    async def _receive(self, reads: Sequence[Read], sources: Iterable[Tensor]) -> list[BoxSum]:
        return await self._copy(reads, sources, [read.destination for read in reads])

    async def _copy(
        self, boxes: Sequence[Part | Read], sources: Iterable[Tensor], destinations: Iterable[Tensor]
    ) -> list[BoxSum]:
        triples = zip(boxes, sources, destinations, strict=True)
        copies = [Copy(name=b.name, box=b.box, source=s, destination=d) for b, s, d in triples]
        return await self._copier.run(copies)

    def close(self) -> None:
        self._copier.close()
        self._maps.close()


@cache
def has_rdma() -> bool:
    """Return whether torchstore uses RDMA on this machine; TORCHSTORE_RDMA_ENABLED=0 switches it off."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torchstore calls a renamed function of Monarch
        return rdma_available()


async def gather_all(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Return all results; raise the first error only after everything has ended."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks]


class Copier:
    """Threads that copy, started at the first copy."""

    def __init__(self, *, num_threads: int) -> None:
        self._num_threads = num_threads
        self._threads: list[WorkerThread] = []

    async def run(self, copies: Sequence[Copy]) -> list[BoxSum]:
        """Copy everything and return the checksum of each destination.

        After a cancellation, all threads have stopped writing before the error is raised.
        """
        if not self._threads:
            self._threads = [WorkerThread(f"weights-{i}") for i in range(self._num_threads)]
            await asyncio.gather(*(thread.run(use_threads, 1) for thread in self._threads))
        stop = threading.Event()
        on_cpu = ((i, copy) for i, copy in enumerate(copies) if copy.device is None)
        pieces = [(i, piece) for i, copy in on_cpu for piece in pieces_of(copy.destination)]
        # `next` of a count is atomic, so the threads share the list of pieces.
        numbers = itertools.count()

        def copy_pieces() -> Sums:
            done: Sums = []
            while (number := next(numbers)) < len(pieces) and not stop.is_set():
                i, piece = pieces[number]
                done.append((i, _copy_piece(copies[i], piece)))
            return done

        work = [thread.run(copy_pieces) for thread in self._threads]
        if any(copy.device is not None for copy in copies):
            work.append(self._threads[0].run(partial(_copy_by_gpu, copies, stop=stop)))
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
            box_sum(copy.name, copy.box, dtype=copy.destination.dtype, value=value)
            for copy, value in zip(copies, sums, strict=True)
        ]

    def close(self) -> None:
        """End the idle threads."""
        for thread in self._threads:
            thread.stop(timeout_s=1.0)
        self._threads = []


def pieces_of(tensor: Tensor) -> Iterator[Slices]:
    """Yield non-empty slices of at most about `PIECE_BYTES` that together cover the tensor."""
    if tensor.nbytes <= PIECE_BYTES:
        if tensor.nbytes:
            yield ()
        return
    row_bytes = tensor.nbytes // len(tensor)
    if row_bytes > PIECE_BYTES and tensor.dim() > 1:
        for i in range(len(tensor)):
            yield from ((slice(i, i + 1), *inner) for inner in pieces_of(tensor[i]))
        return
    step = max(1, PIECE_BYTES // row_bytes)
    yield from ((slice(start, start + step),) for start in range(0, len(tensor), step))


def _copy_piece(copy: Copy, piece: Slices) -> int:
    destination = copy.destination[piece]
    destination.copy_(copy.source[piece])
    starts = [part.start for part in piece] + [0] * (destination.dim() - len(piece))
    offsets = [offset + start for offset, start in zip(copy.box.offsets, starts, strict=True)]
    return copy.sum(destination, offsets=offsets)


def _copy_by_gpu(copies: Sequence[Copy], *, stop: threading.Event) -> Sums:
    """Run the copies that involve a GPU, after the work queued on its default stream."""
    done: Sums = []
    for device in {copy.device for copy in copies if copy.device is not None}:
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.default_stream(device))
        with torch.cuda.stream(stream):
            for i, copy in enumerate(copies):
                if copy.device != device or stop.is_set():
                    continue
                sent = copy.source
                if sent.is_cuda:
                    # Cast on the GPU, so that only the cast tensor crosses the bus, and sum it there.
                    sent = sent.to(copy.destination.dtype)
                copy.destination.copy_(sent, non_blocking=True)
                summed = copy.destination if copy.destination.is_cuda else sent
                done.append((i, copy.sum(summed, offsets=copy.box.offsets)))
        stream.synchronize()
    return done
