import pytest

from rl.distributed.context_parallel import ContextParallel
from rl.models.attention import SequenceLayout


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
