"""Wire data as training samples, entry by entry, and losses; tests/losses has their numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from losses.cross_entropy import CrossEntropyLoss
from losses.policy import CISPOLoss, DROLoss, GSPOLoss, ImportanceSamplingLoss, PPOLoss
from rl.tinker.types import BaseModelInfo, Datum, InvalidRequestError
from rl.tinker.wire import datums
from rl.tinker.wire.datums import find_loss, make_samples
from tests.tinker.parts import datum


def around_one(low: float, high: float) -> dict[str, Any]:
    """Return relay's settings for thresholds of the ratio."""
    return {"normalization": "none", "clip_low": 1.0 - low, "clip_high": high - 1.0}


@pytest.mark.parametrize(
    ("name", "thresholds", "loss"),
    [
        ("cross_entropy", None, CrossEntropyLoss(normalization="none", weights="advantages")),
        ("importance_sampling", None, ImportanceSamplingLoss(normalization="none")),
        ("ppo", None, PPOLoss(**around_one(0.8, 1.2))),
        ("ppo", (0.5, 2.0), PPOLoss(**around_one(0.5, 2.0))),
        ("cispo", None, CISPOLoss(**around_one(0.0, 4.0))),
        ("dro", None, DROLoss(normalization="none", beta=0.05)),
        ("gspo", (0.9, 1.1), GSPOLoss(level="token", **around_one(0.9, 1.1))),
    ],
)
def test_losses_of_the_api_are_those_of_the_library_without_division(name, thresholds, loss):
    settings = dict(
        zip(("clip_low_threshold", "clip_high_threshold"), thresholds or (), strict=False)
    )
    assert find_loss(name).build(settings) == loss


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        (
            "ppo",
            {"beta": 0.1},
            "'beta', unknown to ppo: its settings are clip_low_threshold, clip_",
        ),
        ("ppo", {"clip_low_threshold": 1.5}, "clip_low_threshold=1.5: must be 0.0 to 1.0"),
        (
            "cispo",
            {"clip_high_threshold": math.inf},
            "clip_high_threshold=inf: must be 1.0 to 1e+30",
        ),
        ("dro", {"beta": math.nan}, "beta=nan: must be 0.0 to 1e+30"),
    ],
)
def test_invalid_setting_of_a_loss_is_named(name, settings, says):
    with pytest.raises(InvalidRequestError) as error:
        find_loss(name).build(settings)
    assert says in str(error.value)
    with pytest.raises(
        InvalidRequestError, match=r"loss_fn='custom': must be one of cross_entropy, .*gspo"
    ):
        find_loss("custom")
    says = (
        r"loss_fn='stable_reinforce': its formula is not public, set loss_fn=importance_sampling "
        r"or ppo: must be one of cross_entropy, "
    )
    with pytest.raises(InvalidRequestError, match=says):
        find_loss("stable_reinforce")


# Data

RULES = BaseModelInfo(
    name="tiny", architecture="none", max_context_length=9, vocab_size=100, tokenizer_folder=""
)
CROSS_ENTROPY = find_loss("cross_entropy")


def test_next_token_targets_make_a_plain_sample():
    data = [datum([3, 4, 5], weights=[0, 0.5, -1]), datum([3, 4])]
    sample, unweighted = make_samples(data, CROSS_ENTROPY, RULES).samples
    assert (unweighted.advantages.tolist(), unweighted.mask.tolist()) == (
        [0, 1, 1],
        [False, True, True],
    )
    assert sample.token_ids.tolist() == [3, 4, 5, 7]
    assert sample.targets is None
    assert sample.mask.tolist() == [False, False, True, True]
    assert sample.advantages.tolist() == [0, 0, 0.5, -1]


def test_targets_of_different_widths_are_padded_and_cut_again():
    data = [datum([3, 4], [[1, 2], [3, 4]], weights=[[1, 0], [0.5, 2]]), datum([5, 6])]
    found: Any = make_samples(data, CROSS_ENTROPY, RULES)
    first, second = found.samples
    assert first.targets.tolist() == [[0, 0], [1, 2], [3, 4]]
    assert first.mask.tolist() == [[False, False], [True, False], [True, True]]
    assert second.targets.tolist() == [[0, 0], [6, 0], [7, 0]]
    assert second.mask.tolist() == [[False, False], [True, False], [True, False]]
    wide, narrow = found.split_logprobs([np.arange(6).reshape(3, 2)] * 2)
    assert wide.tolist() == [[2, 3], [4, 5]]
    assert narrow.tolist() == [2, 4]


def test_one_wide_datum_does_not_enlarge_all_others(monkeypatch):
    data = [datum([3, 4]), datum([5], [[1, 2, 3]])]
    monkeypatch.setattr(datums, "MAX_TARGETS", 9)
    assert make_samples(data, CROSS_ENTROPY, RULES).widths == (None, 3)
    monkeypatch.setattr(datums, "MAX_TARGETS", 8)
    with pytest.raises(InvalidRequestError, match=r"data: 3 tokens, .* data\[1\].* each 3 targets"):
        make_samples(data, CROSS_ENTROPY, RULES)


@pytest.mark.parametrize(
    ("name", "given", "mask", "ratio_mask"),
    [
        ("ppo", {"advantages": [0, 0.5, 0]}, [0, 0, 1, 0], None),
        ("dro", {"advantages": [0, 0, 0]}, [0, 1, 1, 1], None),
        ("gspo", {"advantages": [0, 1, 0]}, [0, 0, 1, 0], [0, 0, 1, 0]),
        (
            "gspo",
            {"advantages": [0, 1, 0], "sequence_ratio_mask": [0, 1, 1]},
            [0, 0, 1, 0],
            [0, 0, 1, 1],
        ),
    ],
)
def test_policy_losses_train_tokens_with_an_advantage_and_dro_all(name, given, mask, ratio_mask):
    one = datum([3, 4, 5], logprobs=[0, -1, -2], **given)
    (sample,) = make_samples([one], find_loss(name), RULES).samples
    assert sample.mask.tolist() == mask
    assert sample.generator_logprobs.tolist() == [0, 0, -1, -2]
    assert (None if sample.ratio_mask is None else sample.ratio_mask.tolist()) == ratio_mask


def with_inputs(**inputs: Any) -> list[Datum]:
    """Return a valid datum, and one of tokens 3 and 4 with these inputs."""
    return [datum([1]), Datum(tokens=np.array([3, 4], np.int32), loss_inputs=inputs)]


TARGETS = np.array([4, 5])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([datum([])], "data[0].model_input: has 0 tokens: must be 1 to 8"),
        ([datum(list(range(9)))], "data[0].model_input: has 9 tokens: must be 1 to 8"),
        ([datum([1]), datum([1, 100])], "data[1].model_input: has token id 100: must be 0 to 99"),
        (
            with_inputs(),
            "data[1].loss_fn_inputs: has no 'target_tokens', which cross_entropy needs",
        ),
        (
            with_inputs(target_tokens=TARGETS, logprobs=np.zeros(2)),
            "data[1].loss_fn_inputs: has 'logprobs', which cross_entropy does not read: it reads "
            "target",
        ),
        (with_inputs(target_tokens=np.array([4])), "data[1].target_tokens: has shape [1]: must be "
                                                   "[2] or ["),
        (with_inputs(target_tokens=np.array([4, 100])), "data[1].target_tokens: has token id 100: "
                                                        "must be 0"),
        (with_inputs(target_tokens=np.array([4.0, 5.0])), "data[1].target_tokens: has dtype "
                                                          "float64: must be"),
        (
            with_inputs(target_tokens=TARGETS, weights=np.zeros((2, 1), np.float32)),
            "data[1].weights: has shape [2, 1]: must be [2], as target_tokens",
        ),
        (
            with_inputs(target_tokens=TARGETS, weights=np.array([1.0, np.nan])),
            "data[1].weights: has nan: must be finite numbers",
        ),
    ],
)  # fmt: skip
def test_invalid_datum_is_named_with_its_field(data, says):
    with pytest.raises(InvalidRequestError) as error:
        make_samples(data, CROSS_ENTROPY, RULES)
    assert says in str(error.value)


def test_policy_losses_take_one_target_per_token():
    many = datum([3], [[1, 2]], logprobs=[[0, 0]], advantages=[[0, 0]])
    with pytest.raises(
        InvalidRequestError, match=r"data\[0\].target_tokens: has shape \[1, 2\]: must be \[1\] "
    ):
        make_samples([many], find_loss("ppo"), RULES)
