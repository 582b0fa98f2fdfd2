"""Boxes and their copies without a store; a fake process group plays each of four ranks in turn."""

import asyncio
import threading
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from rl.weights.boxes import Box, assign_offsets, list_parts, plan_reads, split_reads
from rl.weights.checksum import checksum
from rl.weights.copies import PIECE_BYTES, Copier, Copy, send_whole_rows
from rl.weights.store import WeightStore, write_file
from rl.weights.types import WeightStoreError

WORLD_SIZE = 4


@contextmanager
def rank_of_four(rank):
    dist.init_process_group("fake", rank=rank, world_size=WORLD_SIZE, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("placement", [Partial(), _StridedShard(0, split_factor=2)])
def test_shard_that_is_no_box_is_rejected_by_name(placement):
    with rank_of_four(0):
        mesh = init_device_mesh("cpu", (4,))
        tensor = DTensor.from_local(
            torch.zeros(2, 5),
            mesh,
            [placement],
            run_check=False,
            shape=torch.Size((8, 5)),
            stride=(5, 1),
        )
        with pytest.raises(
            ValueError, match=r"state_dict\['layers.0.w'\] has placements .* contiguous box"
        ):
            list_parts({"layers.0.w": tensor})


def test_ranks_outside_the_mesh_have_no_part():
    with rank_of_four(3):
        mesh = dist.device_mesh.DeviceMesh("cpu", [0, 1])
        tensor = DTensor.from_local(torch.zeros(2, 5), mesh, [Shard(0)], run_check=False)
        assert list_parts({"w": tensor}) == []


def test_flat_memory_holds_every_dtype_and_shape_bit_for_bit():
    state_dict = {
        "odd": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "half": torch.tensor([1.0, float("nan"), -0.0, 3e38], dtype=torch.bfloat16),
    }
    packed, num_bytes = assign_offsets(list_parts(state_dict))
    assert all(part.offset % 16 == 0 for part in packed)
    flat = torch.zeros(num_bytes, dtype=torch.uint8)
    for part, value in zip(packed, state_dict.values(), strict=True):
        part.view(flat).copy_(value)
    for part, value in zip(packed, state_dict.values(), strict=True):
        assert part.view(flat).dtype == value.dtype
        torch.testing.assert_close(part.view(flat), value, rtol=0, atol=0, equal_nan=True)


def test_view_of_a_stored_box_is_the_inner_box_alone():
    whole = torch.arange(24).reshape(4, 6)
    stored = Box(offsets=(1, 2), shape=(3, 4), global_shape=(4, 6))
    inner = Box(offsets=(1, 3), shape=(2, 2), global_shape=(4, 6))
    view = stored.slice_inner(whole[1:4, 2:6], inner=inner)
    assert view.tolist() == whole[1:3, 3:5].tolist()


def test_boxes_have_the_elements_in_common_that_both_hold():
    left = Box(offsets=(0, 0), shape=(3, 4), global_shape=(4, 6))
    right = Box(offsets=(2, 3), shape=(2, 3), global_shape=(4, 6))
    assert left.intersect(right) == Box(offsets=(2, 3), shape=(1, 1), global_shape=(4, 6))
    below = Box(offsets=(3, 0), shape=(1, 6), global_shape=(4, 6))
    assert left.intersect(below) is None
    scalar = Box(offsets=(), shape=(), global_shape=())
    assert scalar.intersect(scalar) == scalar


def test_batches_stay_below_the_limit_except_for_one_large_part():
    parts = list_parts(
        {
            name: torch.zeros(size)
            for name, size in (("a", 2), ("b", 2), ("c", 9), ("d", 1), ("e", 3))
        }
    )
    (reads,) = plan_reads(1, parts, [assign_offsets(parts)[0]]).values()
    names = [[read.part.name for read in batch] for batch in split_reads(reads, max_bytes=16)]
    assert names == [["a", "b"], ["c"], ["d", "e"]]


SHAPES = [(), (3,), (0, 5), (PIECE_BYTES + 3,), (700, 3000), (3, 900, 1000), (5, 2, 3)]


def copy_of(source, destination):
    (part,) = list_parts({"w": source})
    return Copy(part=part, source=source, destination=destination)


def test_tensors_are_cast_and_their_sums_are_those_of_the_destinations():
    sources = [torch.randn(shape) for shape in SHAPES]
    destinations = [torch.zeros(shape, dtype=torch.bfloat16) for shape in SHAPES]
    # Into a part of a larger tensor, from a transposed one.
    sources.append(torch.randn(800, 600).t())
    destinations.append(torch.zeros(900, 1000)[100:700, 50:850])
    before, copier = set(threading.enumerate()), Copier(num_threads=2)
    sums = asyncio.run(
        copier.run([copy_of(s, d) for s, d in zip(sources, destinations, strict=True)])
    )
    for source, destination, box in zip(sources, destinations, sums, strict=True):
        assert torch.equal(destination, source.to(destination.dtype))
        assert box.value == checksum(
            destination, global_shape=source.shape, offsets=(0,) * source.dim()
        )
    with pytest.raises(RuntimeError, match="must match"):
        asyncio.run(
            copier.run(
                [copy_of(torch.ones(3), torch.zeros(3)), copy_of(torch.ones(3), torch.zeros(4))]
            )
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


def test_whole_rows_are_the_part_of_a_box_that_was_asked_for():
    box_EIO = torch.arange(2 * 6 * 8.0).reshape(2, 6, 8)
    for part in (
        box_EIO[0, 1:3],
        box_EIO[0, :, 2:5],
        box_EIO[:, 2:4],
        box_EIO[1:, :, 7:],
        box_EIO[:, 1:5, 3:7],
    ):
        assert torch.equal(send_whole_rows(part, device=torch.device("cpu")), part)


@pytest.mark.parametrize("field", ["num_threads", "keep_versions"])
def test_invalid_settings_are_refused(field):
    settings: dict[str, Any] = {field: 0}
    with pytest.raises(ValueError, match=f"{field}=0: must be at least 1"):
        WeightStore.Config(**settings)


def test_file_on_a_host_without_the_shared_folder_is_an_error(tmp_path):
    file = tmp_path / "weights" / "v1" / "rank0.bin"
    with pytest.raises(
        WeightStoreError, match=rf"not written to {file}: .*No such file or directory"
    ):
        asyncio.run(write_file(file, np.zeros(3, dtype=np.uint8)))
    assert not file.parent.parent.exists()
