"""What holds of every loss: masks, packing, parts, normalisation, entropy, and what is refused."""

import math
from typing import Any

import pytest
import torch

from losses.correction import ImportanceCorrection
from losses.cross_entropy import CrossEntropyLoss
from losses.dr_grpo import DrGRPOLoss
from losses.dro import DROLoss
from losses.grpo import GRPOLoss
from losses.types import LossInputs, uses_entropy, uses_proximal_logprobs
from tests.losses.parts import (
    LOSSES,
    POLICY_LOSSES,
    by_name,
    packed,
    random_batch,
    replaced,
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


def edited(loss, **changes):
    return type(loss)(**(by_name(loss) | changes))


def with_terms(name):
    """The loss with KL, entropy and, where it may have one, a correction that masks a few tokens."""
    loss = POLICY_LOSSES[name]
    masking = ImportanceCorrection(level="token", mode="mask", low=0.9, high=1.3)
    return edited(loss, correction=None if isinstance(loss, DROLoss) else masking, **EVERYTHING)


ALL = LOSSES | {f"{name} with all terms": with_terms(name) for name in POLICY_LOSSES}


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_advantages_of_zero_give_no_gradient(name):
    batch = random_batch(0)
    on_policy = replaced(packed(batch), generator_logprobs=packed(batch).logprobs.detach())
    given = replaced(on_policy, advantages=torch.zeros_like(on_policy.advantages))
    value, gradient, _ = value_and_gradients(POLICY_LOSSES[name], given)
    assert value.item() == 0.0
    assert not gradient.any()
    if name != "dro":  # which pulls towards what drew the tokens
        given = replaced(packed(batch), advantages=torch.zeros_like(on_policy.advantages))
        assert not value_and_gradients(POLICY_LOSSES[name], given)[1].any()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("normalization", NORMALIZATIONS, ids=lambda n: n["normalization"])
def test_packed_sums_are_those_of_single_sequences_in_any_order(name, normalization):
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
def test_only_valid_tokens_are_seen_and_moved(name):
    """Whatever else the tensors hold there, NaN or a number."""
    loss, batch = ALL[name], random_batch(2)
    given = packed(batch)  # NaN wherever the mask is not
    value, of_logprobs, of_entropy = value_and_gradients(loss, given)
    assert torch.isfinite(value)
    assert torch.isfinite(of_logprobs).all()
    assert not of_logprobs[~given.mask].any()
    assert not of_entropy[~given.mask].any()
    numbers = {
        field: torch.where(given.mask, getattr(given, field).detach(), -1.5)
        for field in ("logprobs", "advantages", "reference_logprobs", "proximal_logprobs", "entropy")
    }
    for field in ("logprobs", "entropy"):
        numbers[field].requires_grad_()
    filled = value_and_gradients(loss, replaced(given, **numbers))
    for ours, theirs in zip(filled, (value, of_logprobs, of_entropy), strict=True):
        assert torch.equal(ours, theirs)
    if name.endswith("cross_entropy"):
        return  # What was drawn is nothing to it.
    drawn = given.mask & (torch.arange(len(given.mask)) % 2 == 0)
    undrawn = replaced(given, generator_logprobs=torch.where(drawn, given.generator_logprobs, NAN))
    masked = replaced(given, mask=drawn)
    for ours, theirs in zip(
        value_and_gradients(loss, undrawn), value_and_gradients(loss, masked), strict=True
    ):
        assert torch.equal(ours, theirs)


def empty(num_sequences):
    """A micro-batch without a valid token: of padding alone, or of sequences that are masked."""
    ids = [min(i, num_sequences) for i in range(4)]
    nothing = torch.full((4,), NAN)
    return LossInputs(
        logprobs=torch.full((4,), -1.0).requires_grad_(),
        generator_logprobs=nothing,
        advantages=torch.zeros(4),
        mask=torch.zeros(4, dtype=torch.bool),
        sequence_ids=torch.tensor(ids),
        num_sequences=num_sequences,
        reference_logprobs=nothing,
        proximal_logprobs=nothing,
        entropy=torch.full((4,), 1.0).requires_grad_(),
    )


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
        expected = {"token_mean": 0.0, "sequence_mean": num_sequences, "constant": 7.0 * num_sequences}
        if output.denominator is not None:
            assert output.denominator.item() == expected[normalization["normalization"]]


def test_normalizations_by_hand():
    # On policy with A = 1 the gradient of a token is minus its share: two sequences, of three tokens and one.
    given = LossInputs(
        logprobs=torch.full((5,), -1.0).requires_grad_(),
        generator_logprobs=torch.full((5,), -1.0),
        advantages=torch.ones(5),
        mask=torch.tensor([True, True, False, True, True]),
        sequence_ids=torch.tensor([0, 0, 0, 0, 1]),
        num_sequences=2,
    )
    expected: dict[str, tuple[list[float], float | None]] = {
        "token_mean": ([-1.0, -1.0, 0.0, -1.0, -1.0], 4.0),
        "sequence_mean": ([-1 / 3, -1 / 3, 0.0, -1 / 3, -1.0], 2.0),
        "constant": ([-1.0, -1.0, 0.0, -1.0, -1.0], 14.0),
        "none": ([-1.0, -1.0, 0.0, -1.0, -1.0], None),
    }
    for normalization in NORMALIZATIONS:
        for kind in (GRPOLoss, CrossEntropyLoss):
            output = kind(**normalization)(given)
            gradient, denominator = expected[normalization["normalization"]]
            (actual,) = torch.autograd.grad(output.loss_sum, given.logprobs)
            assert actual.tolist() == pytest.approx(gradient)
            # -r A is -1 of each token, and -p is 1.
            value = sum(gradient) if kind is GRPOLoss else -sum(gradient)
            assert output.loss_sum.item() == pytest.approx(value)
            actual_denominator = None if output.denominator is None else output.denominator.item()
            assert actual_denominator == denominator


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_entropy_bonus_is_the_entropy_with_its_weight_in_the_same_normalization(name):
    batch = random_batch(3)
    plain, given = POLICY_LOSSES[name], packed(batch)
    bonus = edited(plain, entropy_coef=0.2)
    assert (uses_entropy(plain), uses_entropy(bonus)) == (False, True)
    before, after = value_and_gradients(plain, given), value_and_gradients(bonus, given)
    shares = torch.where(given.mask, 1.0, 0.0)
    if plain.normalization == "sequence_mean":
        counts = torch.bincount(given.sequence_ids[given.mask], minlength=6)
        shares = shares / counts[given.sequence_ids].clamp(min=1)
    assert given.entropy is not None
    entropy = torch.where(given.mask, given.entropy.detach(), 0.0)
    torch.testing.assert_close(after[0], before[0] - 0.2 * (shares * entropy).sum())
    assert torch.equal(after[1], before[1])
    torch.testing.assert_close(after[2], (-0.2 * shares).double())
    assert not before[2].any()


CORRECTABLE = [
    (name, level)
    for name in POLICY_LOSSES
    for level in ("token", "sequence", "sequence_mean")
    # Weights by token of a ratio by sequence are compared with TRL's, in test_trl.py.
    if name != "dro" and not (name.startswith(("gspo", "rloo")) and level == "token")
]


@pytest.mark.parametrize(("name", "level"), CORRECTABLE)
def test_correction_multiplies_the_surrogate_against_the_proximal_policy(name, level):
    """As a loss whose q is p_prox, with gradients, or where they are a sequence's advantages, multiplied."""
    batch, loss = random_batch(4), POLICY_LOSSES[name]
    given = packed(batch)
    correction = ImportanceCorrection(level=level, mode="mask", low=0.8, high=1.5)
    corrected = edited(loss, correction=correction)
    assert uses_proximal_logprobs(corrected)
    assert not uses_proximal_logprobs(loss)
    weights = correction(given, given.mask).weights
    assert ((weights == 0) & given.mask).any()
    against = replaced(given, generator_logprobs=given.proximal_logprobs)
    value, gradient, _ = value_and_gradients(corrected, given)
    if level == "token":
        unweighted = value_and_gradients(loss, against)[1]
        torch.testing.assert_close(gradient, torch.where(given.mask, weights, 0.0) * unweighted)
    else:
        against = replaced(against, advantages=torch.where(given.mask, weights * given.advantages, NAN))
        expected = value_and_gradients(loss, against)
        torch.testing.assert_close(gradient, expected[1])
        torch.testing.assert_close(value, expected[0])


def test_kl_and_entropy_are_left_out_where_the_correction_masks_a_token():
    batch = random_batch(5)
    given = packed(batch)
    correction = ImportanceCorrection(mode="mask", low=0.9, high=1.1)
    weights = correction(given, given.mask).weights
    loss = GRPOLoss(kl_coef=0.3, kl_estimator="k2", entropy_coef=0.2, correction=correction)
    silent = replaced(given, advantages=torch.zeros_like(given.advantages))
    _, of_logprobs, of_entropy = value_and_gradients(loss, silent)
    kept = given.mask & (weights != 0)
    assert kept.any()
    assert not torch.equal(kept, given.mask)
    assert given.reference_logprobs is not None
    d = torch.where(kept, given.logprobs.detach() - given.reference_logprobs, 0.0)
    torch.testing.assert_close(of_logprobs, 0.3 * d)
    torch.testing.assert_close(of_entropy, torch.where(kept, -0.2, 0.0).double())


@pytest.mark.parametrize("kind", [GRPOLoss, CrossEntropyLoss])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"normalization": "constant"}, "tokens_per_sequence=None: must be a finite number above 0"),
        (
            {"normalization": "constant", "tokens_per_sequence": 0.0},
            r"tokens_per_sequence=0\.0: must be a finite number above 0",
        ),
        ({"tokens_per_sequence": 8.0}, "has no effect with normalization='token_mean': must be None"),
    ],
)
def test_normalization_without_what_it_needs_is_refused(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        kind(**settings)
    loss = kind()
    for name, value in settings.items():
        setattr(loss, name, value)
    with pytest.raises(ValueError, match=message):
        loss(packed(random_batch(0)))


def test_settings_out_of_range_are_refused_when_made_and_when_edited():
    with pytest.raises(ValueError, match="tokens_per_sequence=None: must be"):
        DrGRPOLoss()
    with pytest.raises(ValueError, match=r"entropy_coef=-0\.1: must be a finite number"):
        GRPOLoss(entropy_coef=-0.1)
    with pytest.raises(ValueError, match="beta=inf: must be a finite number"):
        DROLoss(beta=math.inf)
    loss = DROLoss()
    loss.correction = ImportanceCorrection()
    with pytest.raises(ValueError, match="correction: must be None with DRO, which has no ratio to correct"):
        loss(packed(random_batch(0)))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_bonus_without_entropy_and_weight_without_reference_are_refused(name):
    given = packed(random_batch(0))
    with pytest.raises(ValueError, match=r"LossInputs\.entropy is None"):
        edited(POLICY_LOSSES[name], entropy_coef=0.1)(replaced(given, entropy=None))
    with pytest.raises(ValueError, match=r"kl_coef=0\.1: needs the logprobs of a reference policy"):
        edited(POLICY_LOSSES[name], kl_coef=0.1)(replaced(given, reference_logprobs=None))
