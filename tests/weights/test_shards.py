"""Boxes and messages, without a store: a fake process group stands for each of four ranks in turn."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from rl.weights.shards import Outgoing, batches, empty_message, parts_of, within_box

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
    """The rows that place `index` of two gets, as `torch.chunk` cuts."""
    size = -(-len(rows) // 2)
    return rows[index * size : (index + 1) * size]


def fsdp_over_tp_rows(num_rows):
    """Of each rank of a (dp, tp) mesh: TP cuts first, FSDP cuts what is left."""
    ranks = [(dp, tp) for dp in range(2) for tp in range(2)]
    return [chunk(chunk(list(range(num_rows)), tp), dp) for dp, tp in ranks]


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 6, 7, 9, 11, 16])
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


def test_two_sharded_dims_by_hand():
    """FSDP cuts 7 rows to 4 and 3, TP 5 columns to 3 and 2."""
    shapes = [(4, 3), (4, 2), (3, 3), (3, 2)]

    def make_tensor():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return sharded(torch.zeros(shapes[dist.get_rank()]), mesh, [Shard(0), Shard(1)], (7, 5))

    boxes = boxes_of_all_ranks(make_tensor)
    assert [(box.offsets, box.local_shape) for box in boxes] == list(
        zip([(0, 0), (0, 3), (4, 0), (4, 3)], shapes, strict=True)
    )


def sharded(local, mesh, placements, shape):
    stride = (shape[1], 1)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def test_replicas_have_the_same_coordinates_on_the_axes_that_shard():
    def make_tensor():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return DTensor.from_local(torch.zeros(3, 5), mesh, [Replicate(), Shard(0)], run_check=False)

    boxes = boxes_of_all_ranks(make_tensor)
    assert [(box.coordinates, box.mesh_shape) for box in boxes] == [((0,), (2,)), ((1,), (2,))] * 2


def test_a_plain_tensor_is_one_box_without_coordinates():
    part = only_part(torch.zeros(2, 3))
    assert (part.box.offsets, part.box.coordinates, part.box.local_shape) == ((0, 0), (), (2, 3))
    assert (part.box.global_shape, part.box.mesh_shape) == ((2, 3), ())


@pytest.mark.parametrize("placement", [Partial(), _StridedShard(0, split_factor=2)])
def test_what_is_no_box_is_refused_by_name(placement):
    with rank_of_four(0):
        mesh = init_device_mesh("cpu", (4,))
        tensor = DTensor.from_local(
            torch.zeros(2, 5), mesh, [placement], run_check=False, shape=torch.Size((8, 5)), stride=(5, 1)
        )
        with pytest.raises(
            ValueError, match=r"state_dict\['layers.0.w'\] has placements .* one contiguous box"
        ):
            parts_of({"layers.0.w": tensor})


def test_ranks_outside_the_mesh_have_no_part():
    with rank_of_four(3):
        mesh = dist.device_mesh.DeviceMesh("cpu", [0, 1])
        tensor = DTensor.from_local(torch.zeros(2, 5), mesh, [Shard(0)], run_check=False)
        assert parts_of({"w": tensor}) == []


def test_parameters_are_cast_and_buffers_and_integers_are_not():
    state_dict = {"w": torch.ones(2), "scale": torch.ones(2), "steps": torch.ones(2, dtype=torch.int64)}
    sent = {p.name: p.dtype_to_send(torch.bfloat16, buffer_names={"scale"}) for p in parts_of(state_dict)}
    assert sent == {"w": torch.bfloat16, "scale": torch.float32, "steps": torch.int64}


def items(state_dict, dtypes):
    parts = zip(parts_of(state_dict), dtypes, strict=True)
    return [Outgoing(key=part.name, box=part.box, local=part.local, dtype=dtype) for part, dtype in parts]


def test_a_message_carries_every_dtype_and_shape_bit_for_bit():
    state_dict = {
        "odd": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "half": torch.tensor([1.0, float("nan"), -0.0, 3e38]),
    }
    dtypes = [torch.uint8, torch.float64, torch.float32, torch.float32, torch.bfloat16]
    message = empty_message(items(state_dict, dtypes))
    assert all(part.offset % 16 == 0 for part in message.parts)
    for part, tensor in message.tensors():
        tensor.copy_(state_dict[part.key])
    received = {part.key: tensor for part, tensor in message.tensors()}
    for (name, value), dtype in zip(state_dict.items(), dtypes, strict=True):
        assert received[name].dtype == dtype
        assert received[name].shape == value.shape
        torch.testing.assert_close(received[name], value.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_tensors_of_a_message_are_views_of_it():
    message = empty_message(items({"w": torch.zeros(4)}, [torch.float32]))
    ((_, tensor),) = message.tensors()
    tensor.fill_(1)
    assert message.data.view(np.float32).tolist() == [1, 1, 1, 1]


def test_batches_stay_below_the_limit_except_for_one_large_part():
    state_dict = {name: torch.zeros(size) for name, size in {"a": 2, "b": 2, "c": 9, "d": 1, "e": 3}.items()}
    parts = items(state_dict, [torch.float32] * 5)
    names = [[part.key for part in batch] for batch in batches(parts, max_bytes=16)]
    assert names == [["a", "b"], ["c"], ["d", "e"]]


def test_the_first_of_the_ranks_that_hold_a_box_sends_it():
    def make_tensor():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return DTensor.from_local(torch.zeros(3, 5), mesh, [Replicate(), Shard(0)], run_check=False)

    first = []
    for rank in range(WORLD_SIZE):
        with rank_of_four(rank):
            first.append((only_part(make_tensor()).is_first, only_part(torch.zeros(2)).is_first))
    assert first == [(True, True), (True, False), (False, False), (False, False)]


def test_within_box_is_the_view_where_the_inner_box_lies():
    outer = only_part(torch.zeros(4, 5)).box
    inner = only_part(torch.zeros(2, 2)).box
    outer.offsets, inner.offsets = (10, 20), (11, 22)
    tensor = torch.arange(20).reshape(4, 5)
    view = within_box(tensor, outer, inner)
    assert view.tolist() == [[7, 8], [12, 13]]
    view.fill_(-1)
    assert tensor[1, 2] == -1
