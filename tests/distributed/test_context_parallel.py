"""Which tokens of a packed micro-batch each rank takes."""

import pytest
import torch

from rl.distributed.context_parallel import ContextParallel
from rl.models.attention import SequenceShare


def ranks(count):
    return [ContextParallel(rank=rank, num_ranks=count, group="none") for rank in range(count)]


def test_a_rank_takes_an_early_and_a_late_piece():
    assert [context.pieces(24) for context in ranks(3)] == [
        [(0, 4), (20, 24)],
        [(4, 8), (16, 20)],
        [(8, 16)],  # they meet
    ]
    assert ranks(2)[0].token_indices(8).tolist() == [0, 1, 6, 7]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_tokens_of_all_ranks_come_back_in_order(count):
    num_tokens = 4 * count
    one_after_another = torch.cat([context.token_indices(num_tokens) for context in ranks(count)])
    for context in ranks(count):
        assert one_after_another[context.places(num_tokens)].tolist() == list(range(num_tokens))


def test_padding_makes_equal_pieces_that_tensor_parallelism_divides():
    (context, _) = ranks(2)
    assert context.pad_multiple(1) == 4
    assert context.pad_multiple(2) == 4  # 2 tokens on each rank, 1 for each of its tensor-parallel ranks
    assert context.pad_multiple(4) == 8
    assert context.pad_multiple(3) == 12


def test_each_query_sees_its_sequence_up_to_itself():
    # Sequences of 5, 1 and 2 tokens; rank 0 has tokens 0, 1 and 6, 7, and rank 1 tokens 2 to 5.
    first, second = (SequenceShare.from_lengths([5, 1, 2], context=context) for context in ranks(2))
    assert first.query_offsets.tolist() == [0, 2, 4]
    assert first.key_offsets.tolist() == [0, 2, 4]
    # The ranks' tokens one after another are 0, 1, 6, 7, 2, 3, 4, 5.
    assert first.key_rows.tolist() == [0, 1, 2, 3]
    assert (first.max_queries, first.max_keys) == (2, 2)
    assert second.query_offsets.tolist() == [0, 3, 4]
    assert second.key_offsets.tolist() == [0, 5, 6]
    assert second.key_rows.tolist() == [0, 1, 4, 5, 6, 7]
    assert (second.max_queries, second.max_keys) == (3, 5)
    assert second.query_slots.tolist() == [0, 1, 2, 3]
    assert second.key_slots.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_have_the_same_work_in_a_long_sequence(count):
    work = []
    for context in ranks(count):
        share = SequenceShare.from_lengths([64 * count], context=context)
        queries, keys = share.query_offsets.diff(), share.key_offsets.diff()
        # The last of q queries sees k keys, the one before k - 1, ...
        work.append(int((queries * keys - queries * (queries - 1) // 2).sum()))
    assert len(set(work)) == 1
    assert sum(work) == 64 * count * (64 * count + 1) // 2
