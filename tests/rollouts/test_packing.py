from dataclasses import replace

import numpy as np
import pytest
import torch

from rl.models.attention import Segments, SequenceLayout
from rl.rollouts.packing import OPTIONAL_LOGPROBS, pack, plan_micro_batches
from rl.types import TrainingSample


def make_sample(token_ids, *, temperature=1.0):
    """Entry t of each array tells of which token it is: 10 times the id, and so on."""
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
    (batch,) = pack([make_sample([1, 2, 3]), make_sample([4, 5, 6, 8], temperature=0.5)], max_tokens=9)
    # Longer samples first.
    assert batch.input_ids.tolist() == [4, 5, 6, 1, 2]
    assert batch.targets.tolist() == [5, 6, 8, 2, 3]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1]
    assert batch.mask.tolist() == [False, True, True, True, False]
    assert batch.advantages.tolist() == [50, 60, 80, 20, 30]
    assert batch.generator_logprobs.tolist() == pytest.approx([-0.5, -0.6, -0.8, -0.2, -0.3])
    assert batch.temperatures.tolist() == [0.5, 0.5, 0.5, 1.0, 1.0]
    assert batch.sequence_ids.tolist() == [0, 0, 0, 1, 1]
    assert (batch.num_sequences, batch.sample_indices, batch.lengths) == (2, (1, 0), (3, 2))
    assert isinstance(batch.sequences, SequenceLayout)
    assert batch.sequences.offsets.tolist() == [0, 3, 5]


def test_padding_is_a_sequence_of_its_own_under_no_mask():
    (batch,) = pack([make_sample([2, 4, 6])], max_tokens=9, pad_multiple=4)
    assert batch.input_ids.tolist() == [2, 4, 0, 0]
    assert batch.mask.tolist() == [True, True, False, False]
    assert batch.positions.tolist() == [0, 1, 0, 1]
    assert batch.sequence_ids.tolist() == [0, 0, 1, 1]
    assert batch.num_sequences == 1
    assert isinstance(batch.sequences, SequenceLayout)
    assert batch.sequences.offsets.tolist() == [0, 2, 4]
    assert torch.isnan(batch.generator_logprobs[2:]).all()
    assert batch.temperatures.tolist() == [1.0] * 4


@pytest.mark.parametrize("name", OPTIONAL_LOGPROBS)
def test_logprobs_of_another_policy_are_packed_where_samples_bring_them(name):
    ids = [np.asarray([1, 2, 3]), np.asarray([4, 5, 6, 8])]
    samples = [replace(make_sample(i), **{name: (-i / 100).astype(np.float32)}) for i in ids]
    (batch,) = pack(samples, max_tokens=9, pad_multiple=3)
    assert getattr(batch, name).tolist() == pytest.approx([-0.05, -0.06, -0.08, -0.02, -0.03, 0.0])
    (empty,) = pack(samples[:1], max_tokens=9, pad_multiple=2, rank=1, num_ranks=2)
    assert getattr(empty, name).tolist() == [0.0, 0.0]
    others = set(OPTIONAL_LOGPROBS) - {name}
    assert {getattr(batch, other) for other in others} == {None}
    with pytest.raises(ValueError, match=f"{name} must be there in all .* or in none: sample 1 has none"):
        pack([samples[0], make_sample([4, 5])], max_tokens=9)


def test_targets_of_their_own_are_packed_with_what_is_said_of_them():
    def sample(ids):
        columns = np.asarray([[10 * i, 10 * i + 1] for i in ids])
        values = {name: (columns / 2).astype(np.float32) for name in ("advantages", "generator_logprobs")}
        return replace(make_sample(ids), targets=columns, mask=columns % 4 == 0, **values)

    (batch,) = pack([sample([1, 2]), sample([4, 5, 6])], max_tokens=9, pad_multiple=4)
    assert batch.input_ids.tolist() == [4, 5, 1, 0]
    assert batch.targets.tolist() == [[50, 51], [60, 61], [20, 21], [0, 0]]
    assert batch.mask.tolist() == [[False, False], [True, False], [True, False], [False, False]]
    assert batch.advantages.tolist() == [[25.0, 25.5], [30.0, 30.5], [10.0, 10.5], [0.0, 0.0]]
    assert torch.isnan(batch.generator_logprobs[3]).all()
    assert batch.sequence_ids.tolist() == [0, 0, 1, 2]
    values = batch.scatter(batch.advantages.numpy())
    assert values[0].tolist() == [[0.0, 0.0], [10.0, 10.5]]
    assert values[1].tolist() == [[0.0, 0.0], [25.0, 25.5], [30.0, 30.5]]
    (empty,) = pack([sample([1, 2])], max_tokens=9, pad_multiple=2, rank=1, num_ranks=2)
    assert empty.targets.tolist() == [[0, 0], [0, 0]]
    assert not empty.mask.any()


def test_a_ratio_mask_is_packed_without_the_padding():
    samples = [
        replace(make_sample(ids), ratio_mask=np.asarray([i % 2 == 0 for i in ids]))
        for ids in ([1, 2], [4, 6, 7])
    ]
    (batch,) = pack(samples, max_tokens=9, pad_multiple=4)
    assert batch.ratio_mask is not None
    assert batch.ratio_mask.tolist() == [True, False, True, False]
    (plain,) = pack([make_sample([1, 2])], max_tokens=9)
    assert plain.ratio_mask is None
    with pytest.raises(
        ValueError, match="ratio_mask must be there in all samples or in none: sample 1 has none"
    ):
        pack([samples[0], make_sample([4, 5])], max_tokens=9)


def test_rank_without_samples_gets_padding_alone():
    samples = [make_sample([1, 2, 3])]
    (batch,) = pack(samples, max_tokens=9, pad_multiple=2, rank=1, num_ranks=2)
    assert (batch.num_sequences, batch.sample_indices) == (0, ())
    assert batch.input_ids.tolist() == [0, 0]
    assert not batch.mask.any()
    assert batch.sequence_ids.tolist() == [0, 0]


def test_no_padding_where_the_length_fits():
    (batch,) = pack([make_sample([1, 2, 3])], max_tokens=9, pad_multiple=2)
    assert batch.input_ids.tolist() == [1, 2]


def test_plan_is_first_fit_longest_first():
    plan = plan_micro_batches([3, 9, 5, 2, 1], max_tokens=10, num_ranks=1)
    assert plan == [[[1, 4], [2, 0, 3]]]


def test_plan_opens_a_micro_batch_where_one_has_its_number_of_samples():
    plan = plan_micro_batches([3, 9, 5, 2, 1], max_tokens=10, max_sequences=1, num_ranks=1)
    assert plan == [[[1], [2], [0], [3], [4]]]
    plan = plan_micro_batches([3, 9, 5, 2, 1], max_tokens=10, max_sequences=2, num_ranks=1)
    assert plan == [[[1, 4], [2, 0], [3]]]


def test_every_rank_gets_equally_many_micro_batches_and_every_sample_once():
    lengths = np.random.default_rng(0).integers(1, 20, 53).tolist()
    plan = plan_micro_batches(lengths, max_tokens=40, num_ranks=4)
    assert len({len(micro_batches) for micro_batches in plan}) == 1
    assert sorted(i for rank in plan for micro_batch in rank for i in micro_batch) == list(range(53))
    for micro_batch in (m for rank in plan for m in rank):
        assert sum(lengths[i] for i in micro_batch) <= 40


def test_ranks_get_balanced_tokens():
    lengths = [100, 1, 1, 1, 50, 50, 25, 25, 47]
    plan = plan_micro_batches(lengths, max_tokens=100, num_ranks=3)
    loads = [sum(lengths[i] for micro_batch in rank for i in micro_batch) for rank in plan]
    assert sorted(loads) == [100, 100, 100]


def test_scattered_values_line_up_with_the_samples():
    samples = [make_sample([1, 2, 3]), make_sample([4, 5, 6, 7])]
    (batch,) = pack(samples, max_tokens=9, pad_multiple=4)
    parts = batch.scatter(batch.targets.numpy())
    assert {index: part.tolist() for index, part in parts.items()} == {0: [0, 2, 3], 1: [0, 5, 6, 7]}


PROMPT = [1, 3, 5]
GROUP = [[*PROMPT, 2, 4], [7, 8, 10], [*PROMPT, 6], [*PROMPT, 8, 2, 4]]
"""The first, the third and the last have a prompt in common; targets that are even are trained on."""


def test_samples_of_a_prompt_have_it_in_common_but_for_its_last_token():
    samples = [make_sample(ids) for ids in GROUP]
    (batch,) = pack(samples, max_tokens=20, pad_multiple=5, share_prompts=True)
    # The prompt, what follows it in samples 3, 0 and 2, sample 1.
    assert batch.sample_indices == (3, 0, 2, 1)
    assert batch.input_ids.tolist() == [1, 3, 5, 8, 2, 5, 2, 5, 7, 8]
    assert batch.targets.tolist()[:10] == [3, 5, 8, 2, 4, 2, 4, 6, 8, 10]
    assert batch.positions.tolist()[:10] == [0, 1, 2, 3, 4, 2, 3, 2, 0, 1]
    assert batch.mask.tolist()[:10] == [False, False, *[True] * 8]
    assert batch.sequence_ids.tolist() == [0, 0, 0, 0, 0, 1, 1, 2, 3, 3]
    assert isinstance(batch.sequences, Segments)
    assert batch.sequences.query_offsets.tolist() == [0, 2, 5, 7, 8, 10]
    assert batch.sequences.key_rows.tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 5, 6, 0, 1, 7, 8, 9]
    parts = batch.scatter(batch.targets.numpy())
    assert {i: part.tolist()[1:] for i, part in parts.items()} == {i: ids[1:] for i, ids in enumerate(GROUP)}


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(make_sample([1, 3, 9, 4]), id="another last token"),
        pytest.param(make_sample([1, 3, 5, 4], temperature=0.5), id="another temperature"),
        pytest.param(make_sample([1, 3, 5, 7, 4]), id="a longer prompt"),
    ],
)
def test_what_differs_is_not_shared(other):
    samples = [make_sample([1, 3, 5, 2]), other]
    (batch,) = pack(samples, max_tokens=20, share_prompts=True)
    assert batch.input_ids.numel() == sum(len(sample.token_ids) - 1 for sample in samples)


def test_a_prompt_that_is_hardly_anything_of_a_micro_batch_is_not_shared():
    long = [[1, 3, 2, *[5, 4] * half] for half in (10, 9)]
    (batch,) = pack([make_sample(ids) for ids in long], max_tokens=60, share_prompts=True)
    assert batch.input_ids.numel() == sum(len(ids) - 1 for ids in long) == 42
    (batch,) = pack([make_sample(ids[:9]) for ids in long], max_tokens=60, share_prompts=True)
    assert batch.input_ids.numel() == 2 * 8 - 1


def test_samples_of_a_prompt_go_together_as_far_as_they_fit():
    lengths, groups = [8, 5, 8, 5, 8, 5, 5], [[0, 2, 4], [1, 3, 5, 6]]
    plan = plan_micro_batches(lengths, families=groups, max_tokens=16, num_ranks=1)
    assert plan == [[[0, 2], [4, 1], [3, 5, 6]]]


def test_samples_of_a_prompt_are_divided_where_ranks_would_be_unequal():
    plan = plan_micro_batches([5] * 32, families=[list(range(32))], max_tokens=40, num_ranks=2)
    assert [sum(map(len, rank)) for rank in plan] == [16, 16]
    assert sorted(i for rank in plan for micro_batch in rank for i in micro_batch) == list(range(32))


def test_scatter_of_padding_alone_is_empty():
    (batch,) = pack([make_sample([1, 2])], max_tokens=9, rank=1, num_ranks=2)
    assert batch.scatter(batch.targets.numpy()) == {}


def test_sample_that_does_not_fit_is_refused_with_its_length():
    with pytest.raises(ValueError, match=r"sample 1 .*length of 4 .*max_tokens_per_microbatch=3"):
        pack([make_sample([1, 2]), make_sample([1, 2, 3, 4, 5])], max_tokens=3)


def test_sample_of_more_tokens_than_asked_for_is_refused():
    short, long = make_sample([1, 2, 3]), make_sample([1, 2, 3, 4])
    pack([short], max_tokens=9, max_length=3)
    with pytest.raises(ValueError, match="sample 1 has 4 tokens, more than max_sequence_length=3"):
        pack([short, long], max_tokens=9, max_length=3)


def test_sample_without_a_target_is_refused():
    with pytest.raises(ValueError, match="sample 0 has 1 tokens"):
        pack([make_sample([1])], max_tokens=3)


def test_arrays_of_another_length_are_refused():
    sample = make_sample([1, 2, 3])
    bad = TrainingSample(
        token_ids=sample.token_ids,
        mask=sample.mask[:2],
        generator_logprobs=sample.generator_logprobs,
        advantages=sample.advantages,
        policy_versions=sample.policy_versions,
    )
    with pytest.raises(ValueError, match="mask has 2 entries for 3 tokens"):
        pack([bad], max_tokens=3)
