"""Wire data as training samples, entry by entry, and losses against hand-computed formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from losses.types import LossInputs
from rl.tinker import datums
from rl.tinker.datums import make_loss, wire_samples
from rl.tinker.types import BaseModel, Datum, InvalidRequestError, LossCall
from tests.tinker.parts import datum

P = [-1.0, -2.0, -0.5, -3.0]
Q = [-1.5, -1.0, -0.5, -2.0]
A = [1.0, -2.0, 0.5, 1.5]
R = [math.exp(p - q) for p, q in zip(P, Q, strict=True)]


def summed(
    call: LossCall, *, weights: list[float] = A, ratio_mask: list[bool] | None = None
) -> tuple[float, list[float]]:
    """Return the loss of one sequence of four tokens, and its gradient with respect to P."""
    logprobs = torch.tensor(P, requires_grad=True)
    output = make_loss(call)(
        LossInputs(
            logprobs=logprobs,
            generator_logprobs=torch.tensor(Q),
            advantages=torch.tensor(weights),
            mask=torch.ones(4, dtype=torch.bool),
            sequence_ids=torch.zeros(4, dtype=torch.int64),
            num_sequences=1,
            ratio_mask=None if ratio_mask is None else torch.tensor(ratio_mask),
        )
    )
    assert output.denominator is None
    output.loss_sum.backward()
    assert logprobs.grad is not None
    return output.loss_sum.item(), logprobs.grad.tolist()


def clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def test_cross_entropy_is_a_weighted_sum_with_weights_of_any_sign():
    loss, gradient = summed(LossCall(name="cross_entropy"), weights=[0.5, -1.0, 2.0, 0.0])
    assert loss == pytest.approx(-(0.5 * -1.0 + -1.0 * -2.0 + 2.0 * -0.5))
    assert gradient == pytest.approx([-0.5, 1.0, -2.0, 0.0])


def test_importance_sampling_weights_advantages_by_the_ratio():
    loss, gradient = summed(LossCall(name="importance_sampling"))
    terms = [r * a for r, a in zip(R, A, strict=True)]
    assert loss == pytest.approx(-sum(terms))
    assert gradient == pytest.approx([-term for term in terms])


@pytest.mark.parametrize(
    ("settings", "low", "high"),
    [({}, 0.8, 1.2), ({"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}, 0.5, 2.0)],
    ids=["defaults", "given"],
)
def test_ppo_takes_the_smaller_of_plain_and_clipped(settings, low, high):
    loss, gradient = summed(LossCall(name="ppo", settings=settings))
    plain = [r * a for r, a in zip(R, A, strict=True)]
    clipped = [clamp(r, low, high) * a for r, a in zip(R, A, strict=True)]
    assert loss == pytest.approx(-sum(map(min, plain, clipped)))
    assert gradient == pytest.approx([-p if p <= c else 0.0 for p, c in zip(plain, clipped, strict=True)])


@pytest.mark.parametrize(
    ("settings", "low", "high"),
    [({}, 0.0, 4.0), ({"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, 0.9, 1.1)],
    ids=["defaults", "given"],
)
def test_cispo_keeps_the_gradient_of_clipped_ratios(settings, low, high):
    loss, gradient = summed(LossCall(name="cispo", settings=settings))
    weights = [clamp(r, low, high) * a for r, a in zip(R, A, strict=True)]
    assert loss == pytest.approx(-sum(w * p for w, p in zip(weights, P, strict=True)))
    assert gradient == pytest.approx([-w for w in weights])


@pytest.mark.parametrize(("settings", "beta"), [({}, 0.05), ({"beta": 0.5}, 0.5)], ids=["default", "given"])
def test_dro_adds_a_square_of_the_difference(settings, beta):
    loss, gradient = summed(LossCall(name="dro", settings=settings))
    terms = [p * a - 0.5 * beta * (p - q) ** 2 for p, q, a in zip(P, Q, A, strict=True)]
    assert loss == pytest.approx(-sum(terms))
    assert gradient == pytest.approx([-(a - beta * (p - q)) for p, q, a in zip(P, Q, A, strict=True)])


@pytest.mark.parametrize("ratio_mask", [None, [False, True, True, False]], ids=["all tokens", "masked"])
def test_gspo_uses_the_mean_ratio_of_the_sequence(ratio_mask):
    settings = {"clip_low_threshold": 0.2, "clip_high_threshold": 5.0}
    loss, gradient = summed(LossCall(name="gspo", settings=settings), ratio_mask=ratio_mask)
    counted = [i for i in range(4) if ratio_mask is None or ratio_mask[i]]
    ratio = math.exp(sum(P[i] - Q[i] for i in counted) / len(counted))
    assert loss == pytest.approx(-sum(ratio * a for a in A))
    assert gradient == pytest.approx([-ratio * a for a in A])


def test_gspo_clips_at_its_thresholds():
    settings = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    loss, gradient = summed(LossCall(name="gspo", settings=settings))
    ratio = math.exp(sum(p - q for p, q in zip(P, Q, strict=True)) / 4)
    assert ratio < 0.9
    assert loss == pytest.approx(-sum(min(ratio * a, 0.9 * a) for a in A))
    assert gradient == pytest.approx([-ratio * a if a > 0 else 0.0 for a in A])


def test_unknown_loss_is_refused():
    with pytest.raises(InvalidRequestError, match=r"loss_fn='custom': must be one of cross_entropy, .*gspo"):
        make_loss(LossCall(name="custom"))


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("ppo", {"beta": 0.1}, "'beta', unknown to ppo: its settings are clip_low_threshold, clip_"),
        ("cross_entropy", {"beta": 0.1}, "'beta', unknown to cross_entropy: it has none"),
        ("ppo", {"clip_low_threshold": 1.5}, "clip_low_threshold=1.5: must be a finite number from 0 to 1"),
        ("ppo", {"clip_high_threshold": 0.5}, "clip_high_threshold=0.5: must be a finite number of at least"),
        ("cispo", {"clip_high_threshold": math.inf}, "clip_high_threshold=inf: must be a finite number"),
        ("dro", {"beta": math.nan}, "beta=nan: must be a finite number of at least 0"),
        ("dro", {"beta": -1.0}, "beta=-1.0: must be a finite number of at least 0"),
    ],
)
def test_invalid_setting_of_a_loss_is_named(name, settings, says):
    with pytest.raises(InvalidRequestError) as error:
        make_loss(LossCall(name=name, settings=settings))
    assert says in str(error.value)


# Data

RULES = BaseModel(name="tiny", architecture="none", max_context_length=9, vocab_size=100, tokenizer_folder="")
CROSS_ENTROPY = LossCall(name="cross_entropy")


def test_next_token_targets_make_a_plain_sample():
    (sample,) = wire_samples([datum([3, 4, 5], weights=[0, 0.5, -1])], CROSS_ENTROPY, RULES).samples
    assert sample.token_ids.tolist() == [3, 4, 5, 7]
    assert sample.targets is None
    assert sample.mask.tolist() == [False, False, True, True]
    assert sample.advantages.tolist() == [0, 0, 0.5, -1]
    assert sample.temperature == 1.0


def test_other_targets_are_set_for_all_samples_of_the_call():
    data = [datum([3, 4, 5]), datum([3, 4], [9, 8])]
    samples = wire_samples(data, CROSS_ENTROPY, RULES).samples
    assert [s.targets.tolist() for s in samples if s.targets is not None] == [[0, 4, 5, 7], [0, 9, 8]]


def test_missing_weights_are_one():
    (sample,) = wire_samples([datum([3, 4])], CROSS_ENTROPY, RULES).samples
    assert sample.advantages.tolist() == [0, 1, 1]
    assert sample.mask.tolist() == [False, True, True]


def test_targets_of_different_widths_are_padded_and_cut_again():
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


def test_one_wide_datum_does_not_enlarge_all_others(monkeypatch):
    data = [datum([3, 4]), datum([5], [[1, 2, 3]])]
    monkeypatch.setattr(datums, "MAX_TARGETS", 9)
    assert wire_samples(data, CROSS_ENTROPY, RULES).widths == (None, 3)
    monkeypatch.setattr(datums, "MAX_TARGETS", 8)
    with pytest.raises(InvalidRequestError, match=r"data: 3 tokens, .* data\[1\].* each 3 targets"):
        wire_samples(data, CROSS_ENTROPY, RULES)


def test_policy_losses_train_tokens_with_an_advantage():
    one = datum([3, 4, 5], logprobs=[0, -1, -2], advantages=[0, 0.5, 0])
    (sample,) = wire_samples([one], LossCall(name="ppo"), RULES).samples
    assert sample.mask.tolist() == [False, False, True, False]
    assert sample.generator_logprobs.tolist() == [0, 0, -1, -2]
    assert sample.ratio_mask is None


def test_dro_counts_every_token():
    one = datum([3, 4], logprobs=[-1, -2], advantages=[0, 0])
    (sample,) = wire_samples([one], LossCall(name="dro"), RULES).samples
    assert sample.mask.tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("given", "expected"), [({}, [0, 1, 0]), ({"sequence_ratio_mask": [0, 1, 1]}, [0, 1, 1])]
)
def test_gspo_ratio_covers_its_mask_or_the_tokens_with_advantages(given, expected):
    one = datum([3, 4, 5], logprobs=[0, -1, -2], advantages=[0, 1, 0], **given)
    (sample,) = wire_samples([one], LossCall(name="gspo"), RULES).samples
    assert sample.ratio_mask is not None
    assert sample.ratio_mask.tolist() == [False, *map(bool, expected)]
    assert sample.mask.tolist() == [False, False, True, False]


def with_inputs(**inputs: Any) -> list[Datum]:
    """Return a valid datum, and one of tokens 3 and 4 with these inputs."""
    return [datum([1]), Datum(tokens=np.array([3, 4], np.int32), loss_inputs=inputs)]


TARGETS = np.array([4, 5])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([datum([])], "data[0].model_input: has shape [0]: must be 1 to 8 tokens"),
        ([datum(list(range(9)))], "data[0].model_input: has shape [9]: must be 1 to 8 tokens"),
        ([datum([1]), datum([1, 100])], "data[1].model_input: has token id 100: must be 0 to 99"),
        ([datum([-1])], "data[0].model_input: has token id -1: must be 0 to 99"),
        (with_inputs(), "data[1].loss_fn_inputs: has no 'target_tokens', which cross_entropy needs"),
        (
            with_inputs(target_tokens=TARGETS, logprobs=np.zeros(2)),
            "data[1].loss_fn_inputs: has 'logprobs', which cross_entropy does not read: it reads target",
        ),
        (with_inputs(target_tokens=np.array([4])), "data[1].target_tokens: has shape [1]: must be [2] or ["),
        (with_inputs(target_tokens=np.zeros((2, 0), int)), "data[1].target_tokens: has shape [2, 0]: must"),
        (with_inputs(target_tokens=np.array([4, 100])), "data[1].target_tokens: has token id 100: must be 0"),
        (with_inputs(target_tokens=np.array([4.0, 5.0])), "data[1].target_tokens: has dtype float64: must be"),
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
            "data[1].weights: has dtype <U1: must be numbers",
        ),
    ],
)  # fmt: skip
def test_invalid_datum_is_named_with_its_field(data, says):
    with pytest.raises(InvalidRequestError) as error:
        wire_samples(data, CROSS_ENTROPY, RULES)
    assert says in str(error.value)


def test_policy_losses_take_one_target_per_token():
    one = datum([3], [[1, 2]], logprobs=[[0, 0]], advantages=[[0, 0]])
    with pytest.raises(
        InvalidRequestError, match=r"data\[0\].target_tokens: has shape \[1, 2\]: must be \[1\] "
    ):
        wire_samples([one], LossCall(name="ppo"), RULES)


def test_ratio_mask_is_binary():
    one = datum([3], logprobs=[0], advantages=[0], sequence_ratio_mask=[0.5])
    with pytest.raises(InvalidRequestError, match=r"sequence_ratio_mask: has 0.5: must be 0 or 1"):
        wire_samples([one], LossCall(name="gspo"), RULES)
