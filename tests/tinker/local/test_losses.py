"""The losses of the wire give the sums of their formulas, worked out by hand here, and their gradients."""

from __future__ import annotations

import math

import pytest
import torch

from losses.types import LossInputs
from rl.tinker.errors import InvalidRequestError
from rl.tinker.local.losses import LOSSES, make_loss
from rl.tinker.messages import LossCall

P = [-1.0, -2.0, -0.5, -3.0]
Q = [-1.5, -1.0, -0.5, -2.0]
A = [1.0, -2.0, 0.5, 1.5]
R = [math.exp(p - q) for p, q in zip(P, Q, strict=True)]


def summed(
    call: LossCall, *, weights: list[float] = A, ratio_mask: list[bool] | None = None
) -> tuple[float, list[float]]:
    """The loss of one sequence of four tokens, and its gradient with respect to P."""
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


def test_cross_entropy_is_the_weighted_sum_with_weights_of_any_sign():
    loss, gradient = summed(LossCall(name="cross_entropy"), weights=[0.5, -1.0, 2.0, 0.0])
    assert loss == pytest.approx(-(0.5 * -1.0 + -1.0 * -2.0 + 2.0 * -0.5))
    assert gradient == pytest.approx([-0.5, 1.0, -2.0, 0.0])


def test_importance_sampling_weighs_advantages_by_the_ratio():
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
def test_cispo_goes_on_giving_gradient_where_the_ratio_is_cut(settings, low, high):
    loss, gradient = summed(LossCall(name="cispo", settings=settings))
    weights = [clamp(r, low, high) * a for r, a in zip(R, A, strict=True)]
    assert loss == pytest.approx(-sum(w * p for w, p in zip(weights, P, strict=True)))
    assert gradient == pytest.approx([-w for w in weights])


@pytest.mark.parametrize(("settings", "beta"), [({}, 0.05), ({"beta": 0.5}, 0.5)], ids=["default", "given"])
def test_dro_holds_the_logprob_near_the_sampler_by_a_square(settings, beta):
    loss, gradient = summed(LossCall(name="dro", settings=settings))
    terms = [p * a - 0.5 * beta * (p - q) ** 2 for p, q, a in zip(P, Q, A, strict=True)]
    assert loss == pytest.approx(-sum(terms))
    assert gradient == pytest.approx([-(a - beta * (p - q)) for p, q, a in zip(P, Q, A, strict=True)])


@pytest.mark.parametrize("ratio_mask", [None, [False, True, True, False]], ids=["all tokens", "masked"])
def test_gspo_has_the_sequences_mean_ratio_in_every_token(ratio_mask):
    settings = {"clip_low_threshold": 0.2, "clip_high_threshold": 5.0}
    loss, gradient = summed(LossCall(name="gspo", settings=settings), ratio_mask=ratio_mask)
    counted = [i for i in range(4) if ratio_mask is None or ratio_mask[i]]
    ratio = math.exp(sum(P[i] - Q[i] for i in counted) / len(counted))
    assert loss == pytest.approx(-sum(ratio * a for a in A))
    assert gradient == pytest.approx([-ratio * a for a in A])


def test_gspo_stops_at_its_thresholds():
    settings = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    loss, gradient = summed(LossCall(name="gspo", settings=settings))
    ratio = math.exp(sum(p - q for p, q in zip(P, Q, strict=True)) / 4)
    assert ratio < 0.9
    assert loss == pytest.approx(-sum(min(ratio * a, 0.9 * a) for a in A))
    assert gradient == pytest.approx([-ratio * a if a > 0 else 0.0 for a in A])


def test_an_unknown_loss_is_refused_with_those_that_there_are():
    with pytest.raises(InvalidRequestError, match=r"loss_fn='custom': must be one of cross_entropy, .*gspo"):
        make_loss(LossCall(name="custom"))


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("ppo", {"beta": 0.1}, "'beta', which ppo does not know: its settings are clip_low_threshold, clip_"),
        ("cross_entropy", {"beta": 0.1}, "'beta', which cross_entropy does not know: it has none"),
        ("ppo", {"clip_low_threshold": 1.5}, "clip_low_threshold=1.5: must be a finite number from 0 to 1"),
        ("ppo", {"clip_high_threshold": 0.5}, "clip_high_threshold=0.5: must be a finite number of at least"),
        ("cispo", {"clip_high_threshold": math.inf}, "clip_high_threshold=inf: must be a finite number"),
        ("dro", {"beta": math.nan}, "beta=nan: must be a finite number of at least 0"),
        ("dro", {"beta": -1.0}, "beta=-1.0: must be a finite number of at least 0"),
    ],
)
def test_a_setting_that_cannot_be_is_named_with_what_can(name, settings, says):
    with pytest.raises(InvalidRequestError) as error:
        make_loss(LossCall(name=name, settings=settings))
    assert says in str(error.value)


def test_every_loss_needs_targets():
    assert all(loss.required[0] == "target_tokens" for loss in LOSSES.values())
