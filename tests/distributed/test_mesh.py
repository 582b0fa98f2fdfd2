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
        ("context_parallel_degree", 0),
        ("data_parallel_shard_degree", 0),
        ("data_parallel_shard_degree", -2),
        ("expert_parallel_degree", 0),
        ("expert_tensor_parallel_degree", 0),
    ],
)
def test_degree_out_of_range_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}={value}"):
        ParallelismConfig(**{field: value}).degrees(1)


def test_context_parallel_ranks_are_a_part_of_the_world():
    config = ParallelismConfig(data_parallel_replicate_degree=2, context_parallel_degree=3)
    degrees = config.degrees(24)
    assert degrees == Degrees(dp_replicate=2, dp_shard=4, cp=3, tp=1)
    assert degrees.dp == 8  # ranks of one group of context parallelism see the same samples
    assert degrees.fsdp == 12  # and are shards
    with pytest.raises(ValueError, match=r"context_parallel_degree=3 .*world size of 8"):
        config.degrees(8)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pipeline_parallel_degree", 2),
        ("pipeline_parallel_schedule", "GPipe"),
        ("pipeline_parallel_schedule_csv", "schedule.csv"),
        ("pipeline_parallel_microbatch_size", 2),
        ("pipeline_parallel_layers_per_stage", 4),
        ("module_fqns_per_model_part", ("embed_tokens,layers.0", "layers.1,norm,lm_head")),
        ("pipeline_parallel_first_stage_less_layers", 0),
        ("pipeline_parallel_last_stage_less_layers", 2),
    ],
)
def test_pipeline_parallelism_is_refused_with_its_reason(field, value):
    with pytest.raises(ValueError, match=rf"{field}=.*: must be .*: pipeline parallelism is not supported"):
        ParallelismConfig(**{field: value})
    config = ParallelismConfig()
    setattr(config, field, value)
    with pytest.raises(ValueError, match=field):
        config.degrees(1)


def test_rotation_of_keys_is_refused_with_its_reason():
    with pytest.raises(ValueError, match="context_parallel_rotation='alltoall': must be 'allgather': "):
        ParallelismConfig(context_parallel_rotation="alltoall")


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
