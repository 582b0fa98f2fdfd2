from dataclasses import replace

import numpy as np
import pytest
import torch

from rl.rollouts.packing import pack, plan_micro_batches
from rl.types import TrainingSample


def make_sample(token_ids, *, temperature=1.0):
    """Return a sample whose arrays are multiples of its token ids."""
    ids = np.asarray(token_ids, dtype=np.int32)
    return TrainingSample(
        token_ids=ids,
        mask=ids % 2 == 0,
        generator_logprobs=(-ids / 10).astype(np.float32),
        advantages=(ids * 10).astype(np.float32),
        policy_versions=np.zeros(len(ids), dtype=np.int32),
        temperature=temperature,
    )


def test_inputs_and_targets_are_shifted_and_positions_restart():
    (batch,) = pack(
        [make_sample([1, 2, 3]), make_sample([4, 5, 6, 8], temperature=0.5)], max_tokens=9
    )
    # Longer samples first.
    assert batch.input_ids.tolist() == [4, 5, 6, 1, 2]
    assert batch.targets.tolist() == [5, 6, 8, 2, 3]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1]
    assert batch.mask.tolist() == [False, True, True, True, False]
    assert batch.loss_rows.tolist() == [1, 2, 3]
    assert batch.advantages.tolist() == [50, 60, 80, 20, 30]
    assert batch.generator_logprobs.tolist() == pytest.approx([-0.5, -0.6, -0.8, -0.2, -0.3])
    assert batch.temperatures.tolist() == [0.5, 0.5, 0.5, 1.0, 1.0]
    assert batch.sequence_ids.tolist() == [0, 0, 0, 1, 1]
    assert (batch.num_sequences, batch.sample_indices, batch.lengths) == (2, (1, 0), (3, 2))
    assert batch.sequences.num_queries == batch.sequences.num_keys == (3, 2)


def test_padding_is_a_separate_sequence_without_mask():
    (batch,) = pack([make_sample([2, 4, 6])], max_tokens=9, pad_multiple=4)
    assert batch.input_ids.tolist() == [2, 4, 0, 0]
    assert batch.mask.tolist() == [True, True, False, False]
    assert batch.positions.tolist() == [0, 1, 0, 1]
    assert batch.sequence_ids.tolist() == [0, 0, 1, 1]
    assert batch.num_sequences == 1
    assert batch.sequences.num_queries == batch.sequences.num_keys == (2, 2)
    assert torch.isnan(batch.generator_logprobs[2:]).all()
    assert batch.temperatures.tolist() == [1.0] * 4


def test_a_pipeline_gets_enough_micro_batches_of_one_length():
    samples = [make_sample([2] * length) for length in (9, 5, 3, 3)]  # 16 inputs

    def numbers(num_micro_batches):
        """Allow even numbers from 4 up."""
        return max(4, num_micro_batches + num_micro_batches % 2)

    batches = pack(samples, max_tokens=100, pad_multiple=3, num_allowed=numbers)
    # None is larger than the longest sample needs: 8 inputs, padded to 9.
    assert [batch.input_ids.numel() for batch in batches] == [9] * 4
    assert [batch.lengths for batch in batches] == [(8,), (4, 2, 2), (), ()]
    assert batches[2].padding == (
        8,
        1,
    )  # No sequence of padding has more positions than the samples.
    assert batches[2].positions.max() == 7
    assert batches[2].all_lengths == [8, 1]
    assert (batches[2].sequence_ids == 0).all()
    assert not batches[2].mask.any()
    for rank in range(2):  # Equally many on each data-parallel rank.
        assert len(pack(samples, max_tokens=8, num_allowed=numbers, rank=rank, num_ranks=2)) == 4


def test_own_targets_are_packed_with_their_fields():
    def sample(ids):
        columns = np.asarray([[10 * i, 10 * i + 1] for i in ids])
        values = {
            name: (columns / 2).astype(np.float32) for name in ("advantages", "generator_logprobs")
        }
        return replace(make_sample(ids), targets=columns, mask=columns % 4 == 0, **values)

    (batch,) = pack([sample([1, 2]), sample([4, 5, 6])], max_tokens=9, pad_multiple=4)
    assert batch.input_ids.tolist() == [4, 5, 1, 0]
    assert batch.targets.tolist() == [[50, 51], [60, 61], [20, 21], [0, 0]]
    assert batch.mask.tolist() == [[False, False], [True, False], [True, False], [False, False]]
    assert batch.loss_rows.tolist() == [1, 2]
    assert batch.advantages.tolist() == [[25.0, 25.5], [30.0, 30.5], [10.0, 10.5], [0.0, 0.0]]
    assert torch.isnan(batch.generator_logprobs[3]).all()
    assert batch.sequence_ids.tolist() == [0, 0, 1, 2]
    values = batch.scatter(batch.advantages.numpy())
    assert values[0].tolist() == [[0.0, 0.0], [10.0, 10.5]]
    assert values[1].tolist() == [[0.0, 0.0], [25.0, 25.5], [30.0, 30.5]]
    (empty,) = pack([sample([1, 2])], max_tokens=9, pad_multiple=2, rank=1, num_ranks=2)
    assert empty.targets.tolist() == [[0, 0], [0, 0]]
    assert not empty.mask.any()
    assert empty.loss_rows.tolist() == [0]


def test_ratio_mask_is_packed_without_the_padding():
    samples = [
        replace(make_sample(ids), ratio_mask=np.asarray([i % 2 == 0 for i in ids]))
        for ids in ([1, 2], [4, 6, 7])
    ]
    (batch,) = pack(samples, max_tokens=9, pad_multiple=4)
    assert batch.ratio_mask is not None
    assert batch.ratio_mask.tolist() == [True, False, True, False]
    (plain,) = pack([make_sample([1, 2, 3])], max_tokens=9, pad_multiple=2)
    assert (plain.ratio_mask, plain.input_ids.tolist()) == (None, [1, 2])


@pytest.mark.parametrize(
    ("max_sequences", "plan"),
    [(None, [[1, 4], [2, 0, 3]]), (1, [[1], [2], [0], [3], [4]]), (2, [[1, 4], [2, 0], [3]])],
)
def test_plan_is_first_fit_longest_first_up_to_max_sequences(max_sequences, plan):
    found = plan_micro_batches(
        [3, 9, 5, 2, 1], max_tokens=10, max_sequences=max_sequences, num_ranks=1
    )
    assert found == [plan]


def test_every_rank_gets_equally_many_micro_batches_and_every_sample_once():
    lengths = np.random.default_rng(0).integers(1, 20, 53).tolist()
    plan = plan_micro_batches(lengths, max_tokens=40, num_ranks=4)
    assert len({len(micro_batches) for micro_batches in plan}) == 1
    assert sorted(i for rank in plan for micro_batch in rank for i in micro_batch) == list(
        range(53)
    )
    for micro_batch in (m for rank in plan for m in rank):
        assert sum(lengths[i] for i in micro_batch) <= 40


def test_ranks_get_balanced_tokens():
    lengths = [100, 1, 1, 1, 50, 50, 25, 25, 47]
    plan = plan_micro_batches(lengths, max_tokens=100, num_ranks=3)
    loads = [sum(lengths[i] for micro_batch in rank for i in micro_batch) for rank in plan]
    assert sorted(loads) == [100, 100, 100]


PROMPT = [1, 3, 5]
GROUP = [[*PROMPT, 2, 4], [7, 8, 10], [*PROMPT, 6], [*PROMPT, 8, 2, 4]]
"""The first, the third and the last have a prompt in common; targets that are even are trained on.
"""


def test_prompt_is_shared_except_for_its_last_token():
    samples = [make_sample(ids) for ids in GROUP]
    (batch,) = pack(samples, max_tokens=20, pad_multiple=5, share_prompts=True)
    # The prompt, what follows it in samples 3, 0 and 2, sample 1.
    assert batch.sample_indices == (3, 0, 2, 1)
    assert batch.input_ids.tolist() == [1, 3, 5, 8, 2, 5, 2, 5, 7, 8]
    assert batch.targets.tolist()[:10] == [3, 5, 8, 2, 4, 2, 4, 6, 8, 10]
    assert batch.positions.tolist()[:10] == [0, 1, 2, 3, 4, 2, 3, 2, 0, 1]
    assert batch.mask.tolist()[:10] == [False, False, *[True] * 8]
    assert batch.sequence_ids.tolist() == [0, 0, 0, 0, 0, 1, 1, 2, 3, 3]
    assert batch.sequences.num_queries == (2, 3, 2, 1, 2)
    assert batch.sequences.key_rows is not None
    assert batch.sequences.key_rows.tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 5, 6, 0, 1, 7, 8, 9]
    parts = batch.scatter(batch.targets.numpy())
    assert {i: part.tolist()[1:] for i, part in parts.items()} == {
        i: ids[1:] for i, ids in enumerate(GROUP)
    }


@pytest.mark.parametrize(
    "other",
    [
        make_sample([1, 3, 9, 4]),
        make_sample([1, 3, 5, 4], temperature=0.5),
        make_sample([1, 3, 5, 7, 4]),
    ],
    ids=["another last token", "another temperature", "a longer prompt"],
)
def test_different_beginnings_are_not_shared(other):
    samples = [make_sample([1, 3, 5, 2]), other]
    (batch,) = pack(samples, max_tokens=20, share_prompts=True)
    assert batch.input_ids.numel() == sum(len(sample.token_ids) - 1 for sample in samples)


def test_samples_of_a_prompt_go_together_if_they_fit():
    lengths, groups = [8, 5, 8, 5, 8, 5, 5], [[0, 2, 4], [1, 3, 5, 6]]
    plan = plan_micro_batches(lengths, families=groups, max_tokens=16, num_ranks=1)
    assert plan == [[[0, 2], [4, 1], [3, 5, 6]]]


SHORT = make_sample([1, 2])


@pytest.mark.parametrize(
    ("samples", "settings", "message"),
    [
        (
            [SHORT, make_sample([1, 2, 3, 4, 5])],
            {},
            r"sample 1 .*length of 4 .*max_tokens_per_microbatch=3",
        ),
        (
            [SHORT, make_sample([1, 2, 3])],
            {"max_length": 2},
            "has 3 tokens, more than max_sequence_length=2",
        ),
        ([make_sample([1])], {}, "sample 0 has 1 tokens"),
        ([replace(SHORT, mask=np.array([True]))], {}, r"mask has shape \[1\]: must be \[2\]"),
        (
            [replace(SHORT, ratio_mask=np.array([1, 1])), SHORT],
            {},
            "sample 1: ratio_mask must be set in all",
        ),
    ],
)
def test_sample_that_cannot_be_packed_is_refused(samples, settings, message):
    with pytest.raises(ValueError, match=message):
        pack(samples, max_tokens=3, **settings)
