import pytest

from rl.distributed.mesh import DataRank, Degrees, ParallelismConfig, build_mesh


def test_shard_degree_takes_what_is_left():
    config = ParallelismConfig(data_parallel_replicate_degree=2, tensor_parallel_degree=4)
    assert config.degrees(24) == Degrees(dp_replicate=2, dp_shard=3, tp=4)
    assert config.degrees(24).dp == 6


def test_degrees_that_do_not_multiply_to_the_world_size_are_refused():
    config = ParallelismConfig(data_parallel_shard_degree=2, tensor_parallel_degree=2)
    expected = (
        r"data_parallel_replicate_degree=1 .*data_parallel_shard_degree=2 .*tensor_parallel_degree=2 "
        r".*world size of 6 processes"
    )
    with pytest.raises(ValueError, match=expected):
        config.degrees(6)


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_is_left_must_be_whole(world_size):
    with pytest.raises(ValueError, match="tensor_parallel_degree=2"):
        ParallelismConfig(tensor_parallel_degree=2).degrees(world_size)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data_parallel_replicate_degree", 0),
        ("tensor_parallel_degree", -1),
        ("data_parallel_shard_degree", 0),
        ("data_parallel_shard_degree", -2),
        ("expert_parallel_degree", 0),
        ("expert_tensor_parallel_degree", 0),
    ],
)
def test_degree_out_of_range_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}={value}"):
        ParallelismConfig(**{field: value}).degrees(1)


def test_experts_take_their_ranks_among_the_shards():
    config = ParallelismConfig(
        data_parallel_replicate_degree=2,
        tensor_parallel_degree=2,
        expert_parallel_degree=4,
        expert_tensor_parallel_degree=2,
    )
    assert config.degrees(32) == Degrees(dp_replicate=2, dp_shard=8, tp=2, ep=4, etp=2)
    with pytest.raises(ValueError, match="expert_parallel_degree=4 does not divide the 6 ranks"):
        config.degrees(24)


def test_an_expert_is_split_over_all_tensor_parallel_ranks_or_none():
    config = ParallelismConfig(tensor_parallel_degree=4, expert_tensor_parallel_degree=2)
    with pytest.raises(
        ValueError, match="expert_tensor_parallel_degree=2: must be 1 or tensor_parallel_degree=4"
    ):
        config.degrees(4)


def test_single_process_needs_no_mesh():
    assert build_mesh(ParallelismConfig().degrees(1), device_type="cpu") is None
    assert DataRank.of(None) == DataRank(index=0, count=1, speaks=True)
