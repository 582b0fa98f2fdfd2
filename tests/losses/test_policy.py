"""Properties of every loss: masks, packing, normalization, entropy, KL and correction."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from losses.correction import ImportanceCorrection
from losses.ops import NormalizedLoss, kl_k1, kl_k2, kl_k3
from losses.policy import DrGRPOLoss, DROLoss, GRPOLoss
from losses.types import LossInputs, uses_proximal_logprobs
from tests.losses.parts import (
    LOSSES,
    POLICY_LOSSES,
    loss_and_gradient,
    packed,
    random_batch,
    value_and_gradients,
)

NAN = math.nan
NORMALIZATIONS: list[dict[str, Any]] = [
    {"normalization": "token_mean", "tokens_per_sequence": None},
    {"normalization": "sequence_mean", "tokens_per_sequence": None},
    {"normalization": "constant", "tokens_per_sequence": 7.0},
    {"normalization": "none", "tokens_per_sequence": None},
]
EVERYTHING = {"kl_coef": 0.3, "kl_importance_weighted": True, "entropy_coef": 0.2}


def edited(value: Any, **changes: Any) -> Any:
    return dataclasses.replace(value, **changes)


def with_terms(name):
    """Return the loss with KL, entropy and, if allowed, a correction that masks a few tokens."""
    loss = POLICY_LOSSES[name]
    masking = ImportanceCorrection(level="token", mode="mask", low=0.9, high=1.3)
    return edited(loss, correction=None if isinstance(loss, DROLoss) else masking, **EVERYTHING)


CORRECTED = {
    f"grpo corrected by {level}": GRPOLoss(correction=ImportanceCorrection(level=level, high=1.5))
    for level in ("sequence", "sequence_mean")
}
ALL = LOSSES | CORRECTED | {f"{name} with all terms": with_terms(name) for name in POLICY_LOSSES}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("normalization", NORMALIZATIONS, ids=lambda n: n["normalization"])
def test_packed_equals_unpacked_in_any_order(name, normalization):
    loss = edited(ALL[name], **normalization)
    batch = random_batch(1, by_token=True)
    whole = packed(batch)
    value, of_logprobs, of_entropy = value_and_gradients(loss, whole)
    order = [3, 0, 4, 2, 1]
    shuffled = value_and_gradients(loss, packed(batch, rows=order, padding=0))
    singles = [value_and_gradients(loss, packed(batch, rows=[row])) for row in range(5)]
    torch.testing.assert_close(shuffled[0], value)
    torch.testing.assert_close(torch.stack([v for v, _, _ in singles]).sum(), value)
    for index, gradient in ((1, of_logprobs), (2, of_entropy)):
        joined = torch.cat([single[index][:-3] for single in singles])
        torch.testing.assert_close(joined, gradient[:-3])
    denominators = [loss(packed(batch, rows=[row])).denominator for row in range(5)]
    if normalization["normalization"] == "none":
        assert denominators == [None] * 5
        assert loss(whole).denominator is None
    else:
        assert sum(denominators).item() == loss(whole).denominator.item()


@pytest.mark.parametrize("name", ALL)
def test_invalid_tokens_have_no_effect_and_no_gradient(name):
    loss, batch = ALL[name], random_batch(2)
    given = packed(batch)  # NaN wherever the mask is not
    value, of_logprobs, of_entropy = value_and_gradients(loss, given)
    assert torch.isfinite(value)
    assert torch.isfinite(of_logprobs).all()
    assert not of_logprobs[~given.mask].any()
    assert not of_entropy[~given.mask].any()
    numbers = {
        field: torch.where(given.mask, getattr(given, field).detach(), -1.5)
        for field in (
            "logprobs",
            "advantages",
            "reference_logprobs",
            "proximal_logprobs",
            "entropy",
        )
    }
    for field in ("logprobs", "entropy"):
        numbers[field].requires_grad_()
    filled = value_and_gradients(loss, edited(given, **numbers))
    for ours, theirs in zip(filled, (value, of_logprobs, of_entropy), strict=True):
        assert torch.equal(ours, theirs)
    if name.endswith("cross_entropy"):
        return  # Cross-entropy does not read the generator's logprobs.
    drawn = given.mask & (torch.arange(len(given.mask)) % 2 == 0)
    undrawn = edited(given, generator_logprobs=torch.where(drawn, given.generator_logprobs, NAN))
    masked = edited(given, mask=drawn)
    for ours, theirs in zip(
        value_and_gradients(loss, undrawn), value_and_gradients(loss, masked), strict=True
    ):
        assert torch.equal(ours, theirs)


def empty(num_sequences):
    """Make a micro-batch without valid tokens: padding alone, or masked sequences."""
    given = packed(random_batch(3), rows=list(range(num_sequences)))
    return edited(given, mask=torch.zeros_like(given.mask))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("normalization", NORMALIZATIONS, ids=lambda n: n["normalization"])
def test_micro_batch_without_a_valid_token_gives_zeros(name, normalization):
    loss = edited(ALL[name], **normalization)
    for num_sequences in (0, 2):
        output = loss(empty(num_sequences))
        value, of_logprobs, of_entropy = value_and_gradients(loss, empty(num_sequences))
        assert (value.item(), output.num_tokens.item()) == (0.0, 0.0)
        assert not of_logprobs.any()
        assert not of_entropy.any()
        assert all(metric.item() == 0.0 for metric in output.metric_sums.values())
        expected = {
            "token_mean": 0.0,
            "sequence_mean": num_sequences,
            "constant": 7.0 * num_sequences,
        }
        if output.denominator is not None:
            assert output.denominator.item() == expected[normalization["normalization"]]


@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES if name != "dro"])
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
def test_correction_multiplies_the_surrogate_against_the_proximal_policy(name, level):
    batch, loss = random_batch(4), POLICY_LOSSES[name]
    given = packed(batch)
    correction = ImportanceCorrection(level=level, mode="mask", low=0.8, high=1.5)
    corrected = edited(loss, correction=correction)
    assert uses_proximal_logprobs(corrected)
    assert not uses_proximal_logprobs(loss)
    weights = correction(given, given.mask).weights
    assert ((weights == 0) & given.mask).any()
    # Surrogates are linear in advantages times weights of at least 0.
    against = edited(
        given,
        generator_logprobs=given.proximal_logprobs,
        advantages=torch.where(given.mask, weights * given.advantages, NAN),
    )
    for ours, theirs in zip(
        value_and_gradients(corrected, given), value_and_gradients(loss, against), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


REFUSED: list[tuple[type[NormalizedLoss | ImportanceCorrection], dict[str, Any], str]] = [
    (
        GRPOLoss,
        {"normalization": "constant"},
        "tokens_per_sequence=None: must be a finite number above 0",
    ),
    (
        DrGRPOLoss,
        {"tokens_per_sequence": 0.0},
        r"tokens_per_sequence=0\.0: must be a finite number above 0",
    ),
    (
        GRPOLoss,
        {"tokens_per_sequence": 8.0},
        "has no effect with normalization='token_mean': must be None",
    ),
    (GRPOLoss, {"clip_low": 1.5}, r"clip_low=1\.5: must be between 0 and 1"),
    (GRPOLoss, {"clip_high": -0.1}, r"clip_high=-0\.1: must be at least 0"),
    (GRPOLoss, {"kl_coef": -0.1}, r"kl_coef=-0\.1: must be a finite number"),
    (GRPOLoss, {"entropy_coef": -0.1}, r"entropy_coef=-0\.1: must be a finite number"),
    (ImportanceCorrection, {"high": 0.9}, r"high=0\.9: must be at least 1"),
    (ImportanceCorrection, {"high": NAN}, "high=nan: must be at least 1"),
    (ImportanceCorrection, {"mode": "mask", "low": 1.1}, r"low=1\.1: must be between 0 and 1"),
    (ImportanceCorrection, {"mode": "mask", "low": -0.1}, r"low=-0\.1: must be between 0 and 1"),
    (
        ImportanceCorrection,
        {"low": 0.5},
        r"low=0\.5 has no effect with mode='truncate': must be 0, or mode",
    ),
    (DROLoss, {"beta": math.inf}, "beta=inf: must be a finite number"),
    (DROLoss, {"correction": ImportanceCorrection()}, "correction: must be None with DRO"),
]


@pytest.mark.parametrize(("kind", "settings", "message"), REFUSED)
def test_setting_out_of_range_is_rejected(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        kind(**settings)


def test_missing_entropy_or_reference_is_rejected():
    given = packed(random_batch(0))
    with pytest.raises(ValueError, match=r"entropy_coef=0\.1: needs the inputs' entropy"):
        GRPOLoss(entropy_coef=0.1)(edited(given, entropy=None))
    with pytest.raises(ValueError, match=r"kl_coef=0\.1: needs the logprobs of a reference policy"):
        GRPOLoss(kl_coef=0.1)(edited(given, reference_logprobs=None))


def tokens(advantages, **values):
    """Make on-policy tokens of one sequence, each with probability 1/4."""
    logprobs = torch.full((len(advantages),), math.log(0.25))
    defaults: dict[str, Any] = {
        "logprobs": logprobs.clone().requires_grad_(),
        "generator_logprobs": logprobs,
        "advantages": torch.tensor(advantages),
        "mask": torch.ones(len(advantages), dtype=torch.bool),
        "sequence_ids": torch.zeros(len(advantages), dtype=torch.int64),
        "num_sequences": 1,
    }
    return LossInputs(**(defaults | values))


def test_log_ratio_is_clamped_at_20_nats():
    far = torch.tensor([math.log(0.25) + 50.0], requires_grad=True)
    output, gradient = loss_and_gradient(GRPOLoss(), tokens([-1.0], logprobs=far))
    assert output.loss_sum.item() == pytest.approx(math.exp(20.0))
    assert gradient == [0.0]


def test_nan_in_a_valid_token_is_not_hidden():
    assert math.isnan(GRPOLoss()(tokens([NAN])).loss_sum.item())


LOG2 = math.log(2)
# Reference probabilities 1/2 and 1/8, then a masked token.
MEASURED = {
    "reference_logprobs": torch.tensor([math.log(0.5), math.log(0.125), NAN]),
    "mask": torch.tensor([True, True, False]),
}


@pytest.mark.parametrize(
    ("estimator", "values", "slopes"),
    [
        ("k1", [-LOG2, LOG2], [1.0, 1.0]),
        ("k2", [LOG2**2 / 2, LOG2**2 / 2], [-LOG2, LOG2]),
        ("k3", [1 - LOG2, -0.5 + LOG2], [-1.0, 0.5]),
    ],
)
def test_kl_is_added_with_its_weight_and_reported(estimator, values, slopes):
    inputs = tokens([0.5, -1.0, 3.0], **MEASURED)
    output, gradient = loss_and_gradient(GRPOLoss(kl_coef=0.1, kl_estimator=estimator), inputs)
    assert output.loss_sum.item() == pytest.approx(-0.5 + 1.0 + 0.1 * sum(values))
    assert output.metric_sums["kl"].item() == pytest.approx(sum(values))
    assert not output.metric_sums["kl"].requires_grad
    assert output.num_tokens.item() == 2
    assert gradient == pytest.approx([-0.5 + 0.1 * slopes[0], 1.0 + 0.1 * slopes[1], 0.0])


def test_entropy_bonus_lowers_the_loss():
    entropy = torch.tensor([0.4, 0.9, NAN], requires_grad=True)
    inputs = tokens([0.5, -1.0, 3.0], mask=MEASURED["mask"], entropy=entropy)
    output = GRPOLoss(entropy_coef=0.1)(inputs)
    assert output.loss_sum.item() == pytest.approx(-0.5 + 1.0 - 0.1 * 1.3)
    output.loss_sum.backward()
    assert entropy.grad is not None
    assert entropy.grad.tolist() == pytest.approx([-0.1, -0.1, 0.0])


@pytest.mark.parametrize(
    ("weighted", "kl", "slopes"),
    [(False, [LOG2, 0.0], [1, 1]), (True, [2 * LOG2, 0.0], [2 * LOG2 + 2, 2])],
)
def test_kl_may_be_weighted_by_the_ratio(weighted, kl, slopes):
    # r is 2, and p twice and once the reference's probability.
    inputs = tokens(
        [0.0, 0.0],
        logprobs=torch.full((2,), math.log(0.5), requires_grad=True),
        reference_logprobs=torch.tensor([math.log(0.25), math.log(0.5)]),
    )
    loss = GRPOLoss(kl_coef=0.1, kl_estimator="k1", kl_importance_weighted=weighted)
    output, gradient = loss_and_gradient(loss, inputs)
    assert output.loss_sum.item() == pytest.approx(0.1 * sum(kl))
    assert gradient == pytest.approx([0.1 * slope for slope in slopes])


def test_k3_is_precise_for_small_differences_and_finite_for_large_ones():
    p, reference = torch.tensor([-1.0, -100.0]), torch.tensor([-1.001, 0.0])
    small, large = kl_k3(logprobs_T=p, reference_logprobs_T=reference).tolist()
    assert small == pytest.approx(0.001**2 / 2, rel=1e-2)
    assert large == pytest.approx(math.exp(20) - 1 - 20)


def test_means_and_mean_gradients_of_the_estimators_are_those_in_the_docstrings():
    logits = torch.tensor([0.3, -0.2, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.9, 0.4, -0.5], dtype=torch.float64).log_softmax(-1)
    p = logits.log_softmax(-1)

    def gradient(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    def estimated(estimate, weights=1.0):
        return (
            p.detach().exp() * weights * estimate(logprobs_T=p, reference_logprobs_T=reference)
        ).sum()

    kl = (p.exp() * (p - reference)).sum()
    reverse, forward = gradient(kl), gradient((reference.exp() * (reference - p)).sum())
    for estimate, expected in (
        (kl_k1, torch.zeros_like(reverse)),
        (kl_k2, reverse),
        (kl_k3, forward),
    ):
        torch.testing.assert_close(gradient(estimated(estimate)), expected)
    for estimate in (kl_k1, kl_k3):
        assert estimated(estimate).item() == pytest.approx(kl.item())
        weighted = estimated(estimate, weights=(p - p.detach()).exp())
        torch.testing.assert_close(gradient(weighted), reverse)
