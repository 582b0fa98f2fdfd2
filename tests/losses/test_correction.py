"""Hand-computed weights, losses and gradients of the importance correction, alone and within GRPO.

Most tests use one sequence of three tokens and one of two, then padding, all sampled with probability 0.25. The
ratios of p_prox to q are 4, 1/2, 1/8 (product 1/4) and 2, 2 (product 4).
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
        ({"level": "sequence_mean", "mode": "mask", "low": 0.7, "high": 2.5}, [0.0] * 3 + [2.0] * 2),
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


def test_ratio_on_a_bound_is_inside():
    inputs = make_inputs(ratios=[1.0, 1.0], advantages=[1.0, 1.0], ids=(0, 0))
    for level in ("token", "sequence", "sequence_mean"):
        correction = ImportanceCorrection(level=level, mode="mask", low=1.0, high=1.0)
        said = corrected(correction, inputs)
        assert said.weights.tolist()[:2] == [1.0, 1.0]
        assert said.metric_sums["correction_masked"].item() == 0


def test_ratio_of_a_long_sequence_is_exact_despite_cancellation():
    # 1000 tokens of +5.123 and then 1000 of -5.123 nats: in float32 the sum of them misses 0 in its digits.
    ratios = [math.exp(5.123)] * 1000 + [math.exp(-5.123)] * 1000
    inputs = make_inputs(ratios=ratios, advantages=[1.0] * 2000, ids=(0,) * 2000)
    inputs = replace(
        inputs, proximal_logprobs=inputs.generator_logprobs + torch.tensor([*ratios, NAN, NAN]).log()
    )
    log_ratios = (inputs.proximal_logprobs - inputs.generator_logprobs)[:2000]
    exact = math.exp(math.fsum(log_ratios.tolist()))
    weights = corrected(ImportanceCorrection(level="sequence", high=math.inf), inputs).weights
    assert weights[0].item() == pytest.approx(exact, rel=1e-6)


def test_extreme_ratios_are_finite_and_masked_before_the_clamp():
    far = make_inputs(ratios=[1.0, 1.0], advantages=[1.0, 1.0], ids=(0, 1))
    far = replace(far, proximal_logprobs=far.proximal_logprobs + torch.tensor([200.0, -200.0, 0.0, 0.0]))
    weights = corrected(ImportanceCorrection(high=math.inf), far).weights
    assert weights.tolist()[:2] == pytest.approx([math.exp(20.0), math.exp(-20.0)])
    # Bounds wider than +-20 nats.
    said = corrected(ImportanceCorrection(mode="mask", low=1e-30, high=1e30), far)
    assert said.metric_sums["correction_masked"].item() == 2


def test_effective_sample_share_by_hand():
    assert effective_sample_share(mean_weight=2.0, mean_squared_weight=4.0) == 1.0  # all alike
    assert effective_sample_share(mean_weight=0.25, mean_squared_weight=0.25) == 0.25  # one of four has all
    assert effective_sample_share(mean_weight=0.0, mean_squared_weight=0.0) == 0.0
