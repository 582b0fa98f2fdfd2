"""Copies by several threads: every element once, cast, summed, and stopped by a cancellation."""

import asyncio
import threading

import pytest
import torch

from rl.weights.checksum import checksum
from rl.weights.plan import parts_of
from rl.weights.transport import PIECE_BYTES, Copier, Copy, pieces_of

SHAPES = [(), (3,), (0, 5), (PIECE_BYTES + 3,), (700, 3000), (3, 900, 1000), (5, 2, 3)]


def copy_of(source, destination):
    (part,) = parts_of({"w": source})
    return Copy(name="w", box=part.box, source=source, destination=destination)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pieces_are_small_and_hold_every_element_once(shape):
    counts = torch.zeros(shape, dtype=torch.uint8)
    for piece in pieces_of(counts):
        counts[piece] += 1
        assert 0 < counts[piece].numel() <= PIECE_BYTES
    assert bool((counts == 1).all())


def test_tensors_are_cast_and_their_sums_are_those_of_the_destinations():
    sources = [torch.randn(shape) for shape in SHAPES]
    destinations = [torch.zeros(shape, dtype=torch.bfloat16) for shape in SHAPES]
    # Into a part of a larger tensor, from a transposed one.
    sources.append(torch.randn(800, 600).t())
    destinations.append(torch.zeros(900, 1000)[100:700, 50:850])
    before, copier = set(threading.enumerate()), Copier(num_threads=2)
    sums = asyncio.run(copier.run([copy_of(s, d) for s, d in zip(sources, destinations, strict=True)]))
    for source, destination, box in zip(sources, destinations, sums, strict=True):
        assert torch.equal(destination, source.to(destination.dtype))
        assert box.value == checksum(destination, global_shape=source.shape, offsets=(0,) * source.dim())
    with pytest.raises(RuntimeError, match="must match"):
        asyncio.run(
            copier.run([copy_of(torch.ones(3), torch.zeros(3)), copy_of(torch.ones(3), torch.zeros(4))])
        )
    assert len(asyncio.run(copier.run([copy_of(torch.ones(3), torch.zeros(3))]))) == 1
    copier.close()
    assert set(threading.enumerate()) <= before


def test_nothing_is_written_after_a_cancelled_run_has_returned():
    source = torch.ones(64, PIECE_BYTES // 4)
    destination = torch.zeros_like(source)
    copier = Copier(num_threads=1)

    async def run_and_cancel():
        await copier.run([copy_of(torch.ones(1), torch.zeros(1))])
        task = asyncio.create_task(copier.run([copy_of(source, destination)]))
        while not destination[0, 0]:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        seen = destination.clone()
        assert not bool(seen.all()), "everything was copied before the cancellation"
        # The thread runs jobs in order: a late write would happen now.
        await copier.run([copy_of(torch.ones(1), torch.zeros(1))])
        assert torch.equal(destination, seen)

    asyncio.run(run_and_cancel())
    copier.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_from_and_to_a_gpu():
    source = torch.randn(300, 500, device="cuda")
    sent = torch.zeros(300, 500, dtype=torch.bfloat16)
    received = torch.zeros(300, 500, device="cuda").bfloat16()
    copier = Copier(num_threads=2)
    (pushed,) = asyncio.run(copier.run([copy_of(source, sent)]))
    (pulled,) = asyncio.run(copier.run([copy_of(sent, received)]))
    copier.close()
    assert torch.equal(received, source.bfloat16())
    assert pushed.value == pulled.value == checksum(sent, global_shape=(300, 500), offsets=(0, 0))
