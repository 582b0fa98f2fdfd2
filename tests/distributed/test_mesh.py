import re

import pytest

from rl.distributed.context_parallel import ContextParallel
from rl.distributed.mesh import DataRank, Degrees, ParallelismConfig, build_mesh
from rl.models.layers.attention import SequenceLayout


def test_remaining_ranks_hold_shards_and_share_the_experts():
    config = ParallelismConfig(data_parallel_replicate_degree=2, tensor_parallel_degree=4)
    assert config.resolve_degrees(24) == Degrees(dp_replicate=2, dp_shard=3, tp=4)
    degrees = ParallelismConfig(
        data_parallel_replicate_degree=2, context_parallel_degree=3
    ).resolve_degrees(24)
    assert degrees == Degrees(dp_replicate=2, dp_shard=4, cp=3, tp=1)
    # The ranks of a context-parallel group see the same samples and hold different shards.
    assert degrees.fsdp == 12
    config = ParallelismConfig(
        tensor_parallel_degree=2, expert_parallel_degree=4, expert_tensor_parallel_degree=2
    )
    assert config.resolve_degrees(16) == Degrees(dp_replicate=1, dp_shard=8, tp=2, ep=4, etp=2)


SHARD, TP, CP = "data_parallel_shard_degree", "tensor_parallel_degree", "context_parallel_degree"
EXPERT_TP = "expert_tensor_parallel_degree"


@pytest.mark.parametrize(
    ("settings", "world_size", "message"),
    [
        ({SHARD: 2, TP: 2}, 6, f"{SHARD}=2 .*{TP}=2 .*world size of 6"),
        ({CP: 3}, 8, f"{CP}=3 .*world size of 8"),
        (
            {TP: 2, "expert_parallel_degree": 4},
            12,
            "expert_parallel_degree=4 does not divide the 6 ranks",
        ),
        ({TP: 4, EXPERT_TP: 2}, 4, f"{EXPERT_TP}=2: must be 1 or {TP}=4"),
    ],
)
def test_degrees_that_do_not_fit_the_world_are_rejected(settings, world_size, message):
    config = ParallelismConfig(**settings)
    with pytest.raises(ValueError, match=message):
        config.resolve_degrees(world_size)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("data_parallel_replicate_degree", 0, ""),
        (SHARD, 0, ""),
        ("expert_parallel_degree", 0, ""),
        ("pipeline_parallel_degree", 0, "at least 1"),
        ("pipeline_parallel_layers_per_stage", 0, "at least 1"),
        ("pipeline_parallel_microbatch_size", 0, "at least 1"),
        ("pipeline_parallel_last_stage_less_layers", -1, "at least 0"),
    ],
)
def test_invalid_or_unsupported_setting_is_rejected(field, value, message):
    with pytest.raises(ValueError, match=rf"{field}={re.escape(repr(value))}.*{message}"):
        ParallelismConfig(**{field: value})


def test_single_process_needs_no_mesh():
    assert build_mesh(ParallelismConfig().resolve_degrees(1), device_type="cpu") is None
    assert DataRank.of(None) == DataRank(index=0, count=1, speaks=True)


def ranks(count):
    return [ContextParallel(rank=rank, num_ranks=count, group="none") for rank in range(count)]


@pytest.mark.parametrize(("tensor_parallel", "multiple"), [(1, 4), (2, 4), (3, 12), (4, 8)])
def test_padding_gives_equal_pieces_divisible_by_tensor_parallelism(tensor_parallel, multiple):
    assert ranks(2)[0].pad_multiple(tensor_parallel) == multiple


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_share_a_long_sequence_equally(count):
    work = []
    for context in ranks(count):
        share = SequenceLayout.of_rank([64 * count], context=context)
        queries, keys = share.query_offsets.diff(), share.key_offsets.diff()
        # The last of q queries sees k keys, the one before k - 1, ...
        work.append(int((queries * keys - queries * (queries - 1) // 2).sum()))
    assert len(set(work)) == 1
    assert sum(work) == 64 * count * (64 * count + 1) // 2
