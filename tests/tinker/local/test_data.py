"""Data of the wire as training samples, entry by entry; what cannot be is named by datum and field."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rl.tinker.errors import InvalidRequestError
from rl.tinker.local.data import DataRules, check_data, wire_samples
from rl.tinker.messages import Datum, LossCall
from tests.tinker.local.data_parts import datum

RULES = DataRules(vocab_size=100, max_tokens=8)
CROSS_ENTROPY = LossCall(name="cross_entropy")


def test_targets_that_follow_make_a_plain_sample():
    (sample,) = wire_samples([datum([3, 4, 5], weights=[0, 0.5, -1])], CROSS_ENTROPY, RULES).samples
    assert sample.token_ids.tolist() == [3, 4, 5, 7]
    assert sample.targets is None
    assert sample.mask.tolist() == [False, False, True, True]
    assert sample.advantages.tolist() == [0, 0, 0.5, -1]
    assert sample.temperature == 1.0


def test_other_targets_are_said_for_all_samples_of_the_call():
    data = [datum([3, 4, 5]), datum([3, 4], [9, 8])]
    samples = wire_samples(data, CROSS_ENTROPY, RULES).samples
    assert [s.targets.tolist() for s in samples if s.targets is not None] == [[0, 4, 5, 7], [0, 9, 8]]


def test_weights_are_one_where_a_datum_brings_none():
    (sample,) = wire_samples([datum([3, 4])], CROSS_ENTROPY, RULES).samples
    assert sample.advantages.tolist() == [0, 1, 1]
    assert sample.mask.tolist() == [False, True, True]


def test_targets_of_several_widths_are_filled_up_and_cut_again():
    data = [datum([3, 4], [[1, 2], [3, 4]], weights=[[1, 0], [0.5, 2]]), datum([5, 6])]
    found = wire_samples(data, CROSS_ENTROPY, RULES)
    first, second = found.samples
    assert first.targets is not None
    assert second.targets is not None
    assert first.targets.tolist() == [[0, 0], [1, 2], [3, 4]]
    assert first.mask.tolist() == [[False, False], [True, False], [True, True]]
    assert second.targets.tolist() == [[0, 0], [6, 0], [7, 0]]
    assert second.mask.tolist() == [[False, False], [True, False], [True, False]]
    values = [np.arange(6, dtype=np.float32).reshape(3, 2), np.arange(6, dtype=np.float32).reshape(3, 2)]
    wide, narrow = found.logprobs(values)
    assert wide.tolist() == [[2, 3], [4, 5]]
    assert narrow.tolist() == [2, 4]


def test_one_wide_datum_does_not_blow_up_all_others():
    data = [datum([3, 4]), datum([5], [[1, 2, 3]])]
    for max_targets, is_taken in ((9, True), (8, False)):
        rules = DataRules(vocab_size=100, max_tokens=8, max_targets=max_targets)
        if is_taken:
            assert wire_samples(data, CROSS_ENTROPY, rules).widths == (None, 3)
        else:
            with pytest.raises(InvalidRequestError, match=r"data: 3 tokens, .* data\[1\].* each 3 targets"):
                check_data(data, CROSS_ENTROPY, rules)


def test_policy_losses_train_where_there_is_an_advantage():
    one = datum([3, 4, 5], logprobs=[0, -1, -2], advantages=[0, 0.5, 0])
    (sample,) = wire_samples([one], LossCall(name="ppo"), RULES).samples
    assert sample.mask.tolist() == [False, False, True, False]
    assert sample.generator_logprobs.tolist() == [0, 0, -1, -2]
    assert sample.ratio_mask is None


def test_dro_counts_every_token_because_its_square_does():
    one = datum([3, 4], logprobs=[-1, -2], advantages=[0, 0])
    (sample,) = wire_samples([one], LossCall(name="dro"), RULES).samples
    assert sample.mask.tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("given", "expected"), [({}, [0, 1, 0]), ({"sequence_ratio_mask": [0, 1, 1]}, [0, 1, 1])]
)
def test_gspo_takes_the_ratio_over_the_mask_and_else_where_there_are_advantages(given, expected):
    one = datum([3, 4, 5], logprobs=[0, -1, -2], advantages=[0, 1, 0], **given)
    (sample,) = wire_samples([one], LossCall(name="gspo"), RULES).samples
    assert sample.ratio_mask is not None
    assert sample.ratio_mask.tolist() == [False, *map(bool, expected)]
    assert sample.mask.tolist() == [False, False, True, False]


def with_inputs(**inputs: Any) -> list[Datum]:
    """A datum of tokens 3 and 4, after one that is right."""
    return [datum([1]), Datum(tokens=np.array([3, 4], np.int32), loss_inputs=inputs)]


TARGETS = np.array([4, 5])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "data: must have at least one datum"),
        ([datum([])], "data[0].model_input: has shape [0]: must be 1 to 8 tokens"),
        ([datum(list(range(9)))], "data[0].model_input: has shape [9]: must be 1 to 8 tokens"),
        ([datum([1]), datum([1, 100])], "data[1].model_input: has token id 100: must be 0 to 99"),
        ([datum([-1])], "data[0].model_input: has token id -1: must be 0 to 99"),
        (with_inputs(), "data[1].loss_fn_inputs has no 'target_tokens', which cross_entropy needs"),
        (
            with_inputs(target_tokens=TARGETS, logprobs=np.zeros(2)),
            "data[1].loss_fn_inputs has 'logprobs', which cross_entropy does not read: it reads target",
        ),
        (with_inputs(target_tokens=np.array([4])), "data[1].target_tokens: has shape [1]: must be [2] or ["),
        (with_inputs(target_tokens=np.zeros((2, 0), int)), "data[1].target_tokens: has shape [2, 0]: must"),
        (with_inputs(target_tokens=np.array([4, 100])), "data[1].target_tokens: has token id 100: must be 0"),
        (with_inputs(target_tokens=np.array([4.0, 5.0])), "data[1].target_tokens: is of float64: must be in"),
        (
            with_inputs(target_tokens=TARGETS, weights=np.zeros((2, 1), np.float32)),
            "data[1].weights: has shape [2, 1]: must be [2], as target_tokens",
        ),
        (
            with_inputs(target_tokens=TARGETS, weights=np.array([1.0, np.nan])),
            "data[1].weights: has nan: must be finite numbers",
        ),
        (
            with_inputs(target_tokens=TARGETS, weights=np.array([1.0, 1e39])),
            "data[1].weights: has 1e+39: must be finite numbers of float32",
        ),
        (
            with_inputs(target_tokens=TARGETS, weights=np.array(["1", "2"])),
            "data[1].weights: is of <U1: must be numbers",
        ),
    ],
)  # fmt: skip
def test_a_datum_that_cannot_be_is_named_with_its_field(data, says):
    for check in (check_data, wire_samples):
        with pytest.raises(InvalidRequestError) as error:
            check(data, CROSS_ENTROPY, RULES)
        assert says in str(error.value)


def test_policy_losses_have_one_target_a_token():
    one = datum([3], [[1, 2]], logprobs=[[0, 0]], advantages=[[0, 0]])
    with pytest.raises(
        InvalidRequestError, match=r"data\[0\].target_tokens: has shape \[1, 2\]: must be \[1\] "
    ):
        check_data([one], LossCall(name="ppo"), RULES)


def test_a_ratio_mask_is_of_zeros_and_ones():
    one = datum([3], logprobs=[0], advantages=[0], sequence_ratio_mask=[0.5])
    with pytest.raises(InvalidRequestError, match=r"sequence_ratio_mask: has 0.5: must be 0 or 1"):
        check_data([one], LossCall(name="gspo"), RULES)
