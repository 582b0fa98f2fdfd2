"""Boxes and messages without a store; a fake process group plays each of four ranks in turn."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from rl.weights.plan import Message, batches, outgoing_parts, parts_of

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
    assert [box.coordinates for box in boxes] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def sharded(local, mesh, placements, shape):
    stride = (shape[1], 1)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def test_replicas_hold_equal_boxes():
    def parts():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        tensor = DTensor.from_local(torch.zeros(3, 5), mesh, [Replicate(), Shard(0)], run_check=False)
        return only_part(tensor).box, only_part(torch.zeros(2)).box

    found = []
    for rank in range(WORLD_SIZE):
        with rank_of_four(rank):
            found.append(parts())
    # Coordinates are those on the axes that shard.
    boxes = [sharded_box for sharded_box, _ in found]
    assert [(box.coordinates, box.mesh_shape) for box in boxes] == [((0,), (2,)), ((1,), (2,))] * 2
    assert all(plain == found[0][1] for _, plain in found)


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


def test_a_message_carries_every_dtype_and_shape_bit_for_bit():
    state_dict = {
        "odd": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "half": torch.tensor([1.0, float("nan"), -0.0, 3e38], dtype=torch.bfloat16),
    }
    message = Message.empty(parts_of(state_dict))
    assert all(part.offset % 16 == 0 for part in message.parts)
    for tensor, value in zip(message.tensors(), state_dict.values(), strict=True):
        tensor.copy_(value)
    for tensor, value in zip(message.tensors(), state_dict.values(), strict=True):
        assert tensor.dtype == value.dtype
        torch.testing.assert_close(tensor, value, rtol=0, atol=0, equal_nan=True)


def test_batches_stay_below_the_limit_except_for_one_large_part():
    sizes = {"a": 2, "b": 2, "c": 9, "d": 1, "e": 3}
    parts = parts_of({name: torch.zeros(size) for name, size in sizes.items()})
    names = [[part.name for part in batch] for batch in batches(parts, max_bytes=16)]
    assert names == [["a", "b"], ["c"], ["d", "e"]]
