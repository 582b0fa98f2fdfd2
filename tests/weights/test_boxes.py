"""Boxes and their copies without a store; a fake process group plays each of four ranks in turn."""

import asyncio
import threading
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from rl.weights.boxes import (
    PIECE_BYTES,
    Copier,
    Copy,
    batches,
    lay_out,
    outgoing_parts,
    parts_of,
    pieces_of,
    plan_reads,
)
from rl.weights.checksum import checksum
from rl.weights.store import WeightStore

WORLD_SIZE = 4


@contextmanager
def rank_of_four(rank):
    dist.init_process_group("fake", rank=rank, world_size=WORLD_SIZE, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def only_part(value):
    (part,) = parts_of({"w": value})
    assert part.local.shape == part.box.local_shape
    return part


def boxes_of_all_ranks(make_tensor):
    boxes = []
    for rank in range(WORLD_SIZE):
        with rank_of_four(rank):
            boxes.append(only_part(make_tensor()).box)
    return boxes


def chunk(rows, index):
    """Return the rows of chunk `index` of two, as `torch.chunk` cuts."""
    size = -(-len(rows) // 2)
    return rows[index * size : (index + 1) * size]


def fsdp_over_tp_rows(num_rows):
    """Return the rows of each rank of a (dp, tp) mesh: TP cuts first, then FSDP cuts the rest."""
    ranks = [(dp, tp) for dp in range(2) for tp in range(2)]
    return [chunk(chunk(list(range(num_rows)), tp), dp) for dp, tp in ranks]


@pytest.mark.parametrize("num_rows", [1, 3, 7, 16])
def test_strided_shards_of_any_size_lie_where_fsdp_over_tp_puts_them(num_rows):
    rows_of_rank = fsdp_over_tp_rows(num_rows)

    def make_tensor():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        local = torch.zeros(len(rows_of_rank[dist.get_rank()]), 5)
        return sharded(local, mesh, [_StridedShard(0, split_factor=2), Shard(0)], (num_rows, 5))

    boxes = boxes_of_all_ranks(make_tensor)
    ranges = [range(box.offsets[0], box.offsets[0] + box.local_shape[0]) for box in boxes]
    assert [list(rows) for rows in ranges] == rows_of_rank


def sharded(local, mesh, placements, shape):
    stride = (shape[1], 1)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def test_the_first_of_equal_replicas_sends_a_box():
    sent = []
    for rank in range(WORLD_SIZE):
        with rank_of_four(rank):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            tensor = DTensor.from_local(torch.zeros(3, 5), mesh, [Replicate(), Shard(0)], run_check=False)
            state_dict = {"sharded": tensor, "whole": torch.zeros(2)}
            parts = outgoing_parts(state_dict, dtype=torch.float32, buffer_names=(), rank=rank)
            sent.append([(part.name, part.box.offsets) for part in parts])
    assert sent == [[("sharded", (0, 0)), ("whole", (0,))], [("sharded", (3, 0))], [], []]


@pytest.mark.parametrize("placement", [Partial(), _StridedShard(0, split_factor=2)])
def test_shard_that_is_no_box_is_rejected_by_name(placement):
    with rank_of_four(0):
        mesh = init_device_mesh("cpu", (4,))
        tensor = DTensor.from_local(
            torch.zeros(2, 5), mesh, [placement], run_check=False, shape=torch.Size((8, 5)), stride=(5, 1)
        )
        with pytest.raises(ValueError, match=r"state_dict\['layers.0.w'\] has placements .* contiguous box"):
            parts_of({"layers.0.w": tensor})


def test_ranks_outside_the_mesh_have_no_part():
    with rank_of_four(3):
        mesh = dist.device_mesh.DeviceMesh("cpu", [0, 1])
        tensor = DTensor.from_local(torch.zeros(2, 5), mesh, [Shard(0)], run_check=False)
        assert parts_of({"w": tensor}) == []


def test_parameters_are_cast_and_buffers_and_integers_are_not():
    state_dict = {"w": torch.ones(2), "scale": torch.ones(2), "steps": torch.ones(2, dtype=torch.int64)}
    parts = outgoing_parts(state_dict, dtype=torch.bfloat16, buffer_names={"scale"})
    sent = {part.name: part.dtype for part in parts}
    assert sent == {"w": torch.bfloat16, "scale": torch.float32, "steps": torch.int64}


def test_flat_memory_holds_every_dtype_and_shape_bit_for_bit():
    state_dict = {
        "odd": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "half": torch.tensor([1.0, float("nan"), -0.0, 3e38], dtype=torch.bfloat16),
    }
    packed, num_bytes = lay_out(parts_of(state_dict))
    assert all(part.offset % 16 == 0 for part in packed)
    flat = torch.zeros(num_bytes, dtype=torch.uint8)
    for part, value in zip(packed, state_dict.values(), strict=True):
        part.view(flat).copy_(value)
    for part, value in zip(packed, state_dict.values(), strict=True):
        assert part.view(flat).dtype == value.dtype
        torch.testing.assert_close(part.view(flat), value, rtol=0, atol=0, equal_nan=True)


def test_boxes_that_two_ranks_sent_are_read_once():
    packed, _ = lay_out(parts_of({"w": torch.zeros(4, 3)}))
    reads = plan_reads(1, parts_of({"w": torch.zeros(4, 3)}), [packed, packed])
    assert [(number, len(some)) for number, some in reads.items()] == [(0, 1)]


def test_batches_stay_below_the_limit_except_for_one_large_part():
    parts = parts_of(
        {name: torch.zeros(size) for name, size in (("a", 2), ("b", 2), ("c", 9), ("d", 1), ("e", 3))}
    )
    (reads,) = plan_reads(1, parts, [lay_out(parts)[0]]).values()
    names = [[read.part.name for read in batch] for batch in batches(reads, max_bytes=16)]
    assert names == [["a", "b"], ["c"], ["d", "e"]]


SHAPES = [(), (3,), (0, 5), (PIECE_BYTES + 3,), (700, 3000), (3, 900, 1000), (5, 2, 3)]


def copy_of(source, destination):
    (part,) = parts_of({"w": source})
    return Copy(part=part, source=source, destination=destination)


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"state_dict_key": "a/b"}, "state_dict_key='a/b' must be the plain name of a folder"),
        ({"num_threads": 0}, "num_threads=0: must be at least 1"),
        ({"keep_versions": 0}, "keep_versions=0: must be at least 1"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        WeightStore.Config(**settings)
