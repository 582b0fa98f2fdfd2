"""Hand-computed weights, losses and gradients of the importance correction, alone and within GRPO.

Most tests use one sequence of three tokens and one of two, then padding, all sampled with
probability 0.25. The ratios of p_prox to q are 4, 1/2, 1/8 (product 1/4) and 2, 2 (product 4).
"""

import math
from dataclasses import replace

import pytest
import torch

from losses.correction import ImportanceCorrection, effective_sample_share
from losses.ops import drawn_tokens
from losses.policy import GRPOLoss
from losses.types import LossInputs
from tests.losses.parts import loss_and_gradient

NAN = math.nan
RATIOS = [4.0, 0.5, 0.125, 2.0, 2.0]
ADVANTAGES = [1.0, 1.0, -1.0, 2.0, -2.0]
PRODUCTS = [0.25] * 3 + [4.0] * 2
MEANS = [0.25 ** (1 / 3)] * 3 + [2.0] * 2


def make_inputs(*, given=True, ratios=RATIOS, advantages=ADVANTAGES, ids=(0, 0, 0, 1, 1)):
    """Make inputs with the given `ratios` of p, which is also p_prox, to q; padding holds NaN."""
    padding = 2
    num_tokens, num_sequences = len(ratios), max(ids) + 1

    def padded(values, fill=NAN):
        return torch.cat((torch.as_tensor(values), torch.full((padding,), fill)))

    generator = torch.full((num_tokens,), math.log(0.25))
    proximal = generator + torch.tensor(ratios).log()
    return LossInputs(
        logprobs=padded(proximal).requires_grad_(),
        generator_logprobs=padded(generator),
        advantages=padded(advantages),
        mask=torch.tensor([True] * num_tokens + [False] * padding),
        sequence_ids=torch.tensor([*ids, *[num_sequences] * padding]),
        num_sequences=num_sequences,
        proximal_logprobs=padded(proximal) if given else None,
    )


def corrected(correction, inputs):
    valid = drawn_tokens(mask_T=inputs.mask, generator_logprobs_T=inputs.generator_logprobs)
    return correction(inputs, valid)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({"level": "token", "high": math.inf}, RATIOS),
        ({"level": "token", "high": 2.5}, [2.5, 0.5, 0.125, 2.0, 2.0]),
        ({"level": "token", "mode": "mask", "low": 0.3, "high": 3.0}, [0.0, 0.5, 0.0, 2.0, 2.0]),
        ({"level": "token", "mode": "mask", "high": 3.0}, [0.0, 0.5, 0.125, 2.0, 2.0]),
        ({"level": "sequence", "high": math.inf}, PRODUCTS),
        ({"level": "sequence", "high": 3.0}, [0.25] * 3 + [3.0] * 2),
        ({"level": "sequence", "mode": "mask", "low": 0.1, "high": 3.0}, [0.25] * 3 + [0.0] * 2),
        ({"level": "sequence", "mode": "mask", "low": 0.3, "high": 5.0}, [0.0] * 3 + [4.0] * 2),
        ({"level": "sequence_mean", "high": math.inf}, MEANS),
        ({"level": "sequence_mean", "high": 1.5}, [MEANS[0]] * 3 + [1.5] * 2),
        (
            {"level": "sequence_mean", "mode": "mask", "low": 0.7, "high": 2.5},
            [0.0] * 3 + [2.0] * 2,
        ),
    ],
)
def test_weights_loss_gradient_and_shares_by_hand(settings, weights, given):
    correction = ImportanceCorrection(**settings)
    inputs = make_inputs(given=given)
    assert corrected(correction, inputs).weights.tolist()[:5] == pytest.approx(weights)
    output, gradient = loss_and_gradient(GRPOLoss(correction=correction), inputs)
    # p is p_prox, so r = 1 and the token loss is -w A, its gradient too.
    terms = [-w * a for w, a in zip(weights, ADVANTAGES, strict=True)]
    assert output.loss_sum.item() == pytest.approx(sum(terms))
    assert gradient == pytest.approx([*terms, 0.0, 0.0])
    assert output.denominator is not None
    assert (output.denominator.item(), output.num_tokens.item()) == (5, 5)
    metrics = {name: value.item() for name, value in output.metric_sums.items()}
    rho = {"token": RATIOS, "sequence": PRODUCTS, "sequence_mean": MEANS}[correction.level]
    num_changed = sum(w != r for w, r in zip(weights, rho, strict=True))
    assert metrics == pytest.approx(
        {
            "ratio": 5.0,
            "clipped_fraction": 0.0,
            "correction_weight": sum(weights),
            "correction_weight_squared": sum(w * w for w in weights),
            f"correction_{'masked' if correction.mode == 'mask' else 'truncated'}": num_changed,
            # Tokens are drawn from q: log(q / p_prox), and p_prox / q - 1 - log(p_prox / q).
            "generator_kl_k1": -sum(math.log(r) for r in RATIOS),
            "generator_kl_k3": sum(r - 1 - math.log(r) for r in RATIOS),
        }
    )
    assert not any(value.requires_grad for value in output.metric_sums.values())


@pytest.mark.parametrize("weighted", [False, True])
def test_masked_tokens_lose_kl_and_entropy_and_weights_multiply_only_the_weighted_kl(weighted):
    inputs = make_inputs()
    inputs = replace(
        inputs,
        reference_logprobs=inputs.logprobs.detach() - math.log(2),
        entropy=torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, NAN, NAN]),
    )
    mask = ImportanceCorrection(
        level="token", mode="mask", low=0.3, high=3.0
    )  # weights 0, 1/2, 0, 2, 2
    loss = GRPOLoss(
        kl_coef=0.1,
        kl_estimator="k1",
        kl_importance_weighted=weighted,
        entropy_coef=0.01,
        correction=mask,
    )
    output, _ = loss_and_gradient(loss, inputs)
    kl = math.log(2) * (0.5 + 2.0 + 2.0 if weighted else 3)
    assert output.loss_sum.item() == pytest.approx(-0.5 + 0.1 * kl - 0.01 * (2 + 4 + 5))


def test_ratio_on_a_bound_is_inside():
    inputs = make_inputs(ratios=[1.0, 1.0], advantages=[1.0, 1.0], ids=(0, 0))
    for level in ("token", "sequence", "sequence_mean"):
        correction = ImportanceCorrection(level=level, mode="mask", low=1.0, high=1.0)
        said = corrected(correction, inputs)
        assert said.weights.tolist()[:2] == [1.0, 1.0]
        assert said.metric_sums["correction_masked"].item() == 0


def test_ratio_of_a_long_sequence_is_exact_despite_cancellation():
    # 1000 tokens of +5.123 and then 1000 of -5.123 nats: in float32 the sum of them misses 0 in its
    # digits.
    ratios = [math.exp(5.123)] * 1000 + [math.exp(-5.123)] * 1000
    inputs = make_inputs(ratios=ratios, advantages=[1.0] * 2000, ids=(0,) * 2000)
    inputs = replace(
        inputs,
        proximal_logprobs=inputs.generator_logprobs + torch.tensor([*ratios, NAN, NAN]).log(),
    )
    log_ratios = (inputs.proximal_logprobs - inputs.generator_logprobs)[:2000]
    exact = math.exp(math.fsum(log_ratios.tolist()))
    weights = corrected(ImportanceCorrection(level="sequence", high=math.inf), inputs).weights
    assert weights[0].item() == pytest.approx(exact, rel=1e-6)


def test_extreme_ratios_are_finite_and_masked_before_the_clamp():
    far = make_inputs(ratios=[1.0, 1.0], advantages=[1.0, 1.0], ids=(0, 1))
    far = replace(
        far, proximal_logprobs=far.proximal_logprobs + torch.tensor([200.0, -200.0, 0.0, 0.0])
    )
    weights = corrected(ImportanceCorrection(high=math.inf), far).weights
    assert weights.tolist()[:2] == pytest.approx([math.exp(20.0), math.exp(-20.0)])
    # Bounds wider than +-20 nats.
    said = corrected(ImportanceCorrection(mode="mask", low=1e-30, high=1e30), far)
    assert said.metric_sums["correction_masked"].item() == 2


def test_effective_sample_share_by_hand():
    assert effective_sample_share(mean_weight=2.0, mean_squared_weight=4.0) == 1.0  # all alike
    assert (
        effective_sample_share(mean_weight=0.25, mean_squared_weight=0.25) == 0.25
    )  # one of four has all
    assert effective_sample_share(mean_weight=0.0, mean_squared_weight=0.0) == 0.0


# Exact expectation of the corrected gradient: two tokens of a vocabulary of three give nine
# sequences. The policies p, p_prox and q are tables of logits; q changes between the two tokens, as
# when weights change during generation. Each sequence has its own advantage, multiplied by the
# sequence's probability under q; as the loss is linear in the advantage, the gradient over all nine
# sequences is that of the expected loss.
FIRST = torch.arange(3).repeat_interleave(3)
SECOND = torch.arange(3).repeat(3)


def table(seed):
    """Make logits: row 0 for the first token, rows 1 to 3 for the second after each first token."""
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def logprobs(first, second):
    """Return the logprobs of each token of each sequence, [9, 2]."""
    at_first = first.log_softmax(-1)[0]
    at_second = second.log_softmax(-1)[1:]
    return torch.stack((at_first[FIRST], at_second[FIRST, SECOND]), dim=1)


NINE_ADVANTAGES = torch.tensor(
    [1.0, -2.0, 0.5, 3.0, -1.0, 0.0, 2.0, -0.5, 1.5], dtype=torch.float64
)
P = table(0)
Q = logprobs(table(2), table(3))
"""Logprobs under q, with another version for each of the two tokens."""


def gradient_under(probabilities):
    """Return the gradient of minus the expected advantage, by scores, under given probabilities,
    [9].
    """
    logits = P.clone().requires_grad_()
    scores = logprobs(logits, logits).sum(1)
    return torch.autograd.grad(-(probabilities * NINE_ADVANTAGES * scores).sum(), logits)[0]


def expected_gradient(correction):
    """Return the expected gradient of the loss on sequences sampled from q."""
    logits = P.clone().requires_grad_()
    advantages = Q.sum(1).exp() * NINE_ADVANTAGES
    inputs = LossInputs(
        logprobs=logprobs(logits, logits).flatten(),
        generator_logprobs=Q.flatten(),
        advantages=advantages.repeat_interleave(2),
        mask=torch.ones(18, dtype=torch.bool),
        sequence_ids=torch.arange(9).repeat_interleave(2),
        num_sequences=9,
    )
    return torch.autograd.grad(GRPOLoss(correction=correction)(inputs).loss_sum, logits)[0]


def gap(actual, expected):
    return (torch.linalg.norm(actual - expected) / torch.linalg.norm(expected)).item()


@pytest.mark.parametrize(
    ("settings", "bounded"),
    [
        ({"high": math.inf}, lambda p, q: p),
        ({"high": 1.5}, lambda p, q: torch.minimum(p, 1.5 * q)),
        (
            {"mode": "mask", "low": 0.5, "high": 1.5},
            lambda p, q: torch.where((p / q >= 0.5) & (p / q <= 1.5), p, 0.0),
        ),
    ],
    ids=["unbounded", "truncated", "masked"],
)
def test_sequence_ratio_gives_the_on_policy_gradient_under_bounded_probabilities(settings, bounded):
    p, q = logprobs(P, P).sum(1).exp(), Q.sum(1).exp()
    assert 0 < ((p / q >= 0.5) & (p / q <= 1.5)).sum() < 9
    correction = ImportanceCorrection(level="sequence", **settings)
    assert gap(expected_gradient(correction), gradient_under(bounded(p, q))) < 1e-12


@pytest.mark.parametrize("level", [None, "token", "sequence_mean"])
def test_other_ratios_are_biased(level):
    correction = None if level is None else ImportanceCorrection(level=level, high=math.inf)
    assert gap(expected_gradient(correction), gradient_under(logprobs(P, P).sum(1).exp())) > 0.1
