"""Weights by torchstore's own ways, between any two hosts: Monarch's messages, or RDMA."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from rl.weights.copying import Copier
from rl.weights.deadline import Progress
from rl.weights.monarch_compat import Pipe, Request
from rl.weights.plan import Read, copy_of
from rl.weights.shards import Outgoing, batches, empty_message

T = TypeVar("T")

MAX_MESSAGE_BYTES = 16 * 2**20
"""A version goes in as few messages as this allows. The allocator reuses memory of this size;
larger messages are slower, because every page of them is touched for the first time."""


async def send(volume: Any, outgoing: Sequence[Outgoing], *, copier: Copier, progress: Progress) -> list[int]:
    """Put the boxes into the volume; their checksums."""
    sums: list[int] = []
    for batch in batches(outgoing, max_bytes=MAX_MESSAGE_BYTES):
        message = empty_message(batch)
        sums += await copier.run(
            [
                copy_of(part.box, source=part.local, destination=destination)
                for (_, destination), part in zip(message.tensors(), batch, strict=True)
            ]
        )
        progress.waiting_for = f"the volume to take {message.data.nbytes} bytes"
        await volume.put_batch.call_one(message)
    return sums


async def fetch(volume: Any, reads: Sequence[Read], *, copier: Copier) -> list[int]:
    """Fill the destinations; the checksums of what they then hold."""
    sums: list[int] = []
    wanted = [_wanted(read) for read in reads]
    done = 0
    for batch in batches(wanted, max_bytes=MAX_MESSAGE_BYTES):
        message = await volume.get_batch.call_one([(part.key, part.box) for part in batch])
        received = reads[done : done + len(batch)]
        sums += await copier.run(
            [read.copy_from(t) for (_, t), read in zip(message.tensors(), received, strict=True)]
        )
        done += len(batch)
    return sums


async def fetch_by_pipe(volume: Any, reads: Sequence[Read], *, copier: Copier) -> list[int]:
    """As `fetch`, by torchstore's own transport, which is RDMA where there is hardware; a key at a time."""
    pipe = Pipe(volume)

    async def get(read: Read) -> torch.Tensor:
        # torchstore writes into what is contiguous and of the stored dtype.
        room = torch.empty(read.box.local_shape, dtype=read.stored.part.dtype)
        request = Request(tensor_val=room, tensor_slice=read.box)
        return await pipe.get_from_storage_volume(read.stored.part.key, request)

    received = await all_of(get(read) for read in reads)
    return await copier.run([read.copy_from(t) for t, read in zip(received, reads, strict=True)])


async def all_of(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Their results, once all are done; the first error only then, so that none is left running."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def _wanted(read: Read) -> Outgoing:
    part = read.stored.part
    return Outgoing(key=part.key, box=read.box, local=read.destination, dtype=part.dtype)
