"""Hand-computed weights, losses and gradients of the importance correction, on its own and within GRPO.

The data of most tests is one sequence of three tokens and one of two, then padding, all drawn with
probability 0.25. Their ratios of p_prox to q are 4, 1/2, 1/8 (product 1/4) and 2, 2 (product 4).
"""

import math

import pytest
import torch

from losses.correction import ImportanceCorrection, effective_sample_share
from losses.cross_entropy import CrossEntropyLoss
from losses.grpo import GRPOLoss
from losses.ops import drawn_tokens
from losses.types import LossInputs, uses_proximal_logprobs

NAN = math.nan
RATIOS = [4.0, 0.5, 0.125, 2.0, 2.0]
ADVANTAGES = [1.0, 1.0, -1.0, 2.0, -2.0]
IDS = (0, 0, 0, 1, 1)
PRODUCTS = [0.25] * 3 + [4.0] * 2
MEANS = [0.25 ** (1 / 3)] * 3 + [2.0] * 2


def make_inputs(
    *, steps=None, given=True, padding=2, ratios=RATIOS, advantages=ADVANTAGES, ids=(0, 0, 0, 1, 1)
):
    """`ratios` of p_prox to q; `steps` those of p to p_prox. Padding holds NaN wherever it can."""
    num_tokens, num_sequences = len(ratios), max(ids) + 1

    def padded(values, fill=NAN):
        return torch.cat((torch.as_tensor(values), torch.full((padding,), fill)))

    generator = torch.full((num_tokens,), math.log(0.25))
    proximal = generator + torch.tensor(ratios).log()
    logprobs = proximal if steps is None else proximal + torch.tensor(steps).log()
    return LossInputs(
        logprobs=padded(logprobs).requires_grad_(),
        generator_logprobs=padded(generator),
        advantages=padded(advantages),
        mask=torch.tensor([True] * num_tokens + [False] * padding),
        sequence_ids=torch.tensor([*ids, *[num_sequences] * padding]),
        num_sequences=num_sequences,
        proximal_logprobs=padded(proximal) if given else None,
    )


def replaced(inputs, **values):
    return LossInputs(**({name: getattr(inputs, name) for name in LossInputs.__slots__} | values))


def corrected(correction, inputs):
    valid = drawn_tokens(mask_T=inputs.mask, generator_logprobs_T=inputs.generator_logprobs)
    return correction(inputs, valid)


def loss_and_gradient(loss, inputs):
    output = loss(inputs)
    (gradient,) = torch.autograd.grad(output.loss_sum, inputs.logprobs)
    return output, gradient.tolist()


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


def test_a_ratio_on_a_bound_is_inside():
    inputs = make_inputs(ratios=[1.0, 1.0], advantages=[1.0, 1.0], ids=(0, 0))
    for level in ("token", "sequence", "sequence_mean"):
        correction = ImportanceCorrection(level=level, mode="mask", low=1.0, high=1.0)
        said = corrected(correction, inputs)
        assert said.weights.tolist()[:2] == [1.0, 1.0]
        assert not said.outside.any()


def test_surrogate_is_clipped_around_the_proximal_policy_and_then_weighted():
    # r = 1.5 and 0.5 for A = 1 and -1: clipped at 1.2 and 0.8, without a gradient; r = 0.5, 1.5, 1 are not.
    inputs = make_inputs(steps=[1.5, 0.5, 0.5, 1.5, 1.0], advantages=[1.0, 1.0, -1.0, -1.0, 2.0])
    correction = ImportanceCorrection(high=2.5)
    output, gradient = loss_and_gradient(GRPOLoss(correction=correction), inputs)
    terms = [-2.5 * 1.2, -0.5 * 0.5, 0.125 * 0.8, 2.0 * 1.5, -2.0 * 2.0]
    assert output.loss_sum.item() == pytest.approx(sum(terms))
    assert gradient == pytest.approx([0.0, terms[1], 0.0, terms[3], terms[4], 0.0, 0.0])
    assert output.metric_sums["ratio"].item() == pytest.approx(5.0)
    assert output.metric_sums["clipped_fraction"].item() == 2


def test_without_a_correction_ratio_and_metrics_are_of_the_generators_logprobs():
    inputs = make_inputs(steps=[1.5, 0.5, 0.5, 1.5, 1.0])
    output, gradient = loss_and_gradient(GRPOLoss(), inputs)
    bare, bare_gradient = loss_and_gradient(GRPOLoss(), replaced(inputs, proximal_logprobs=None))
    assert set(output.metric_sums) == {"ratio", "clipped_fraction"}
    assert output.metric_sums["ratio"].item() == pytest.approx(6.0 + 0.25 + 0.0625 + 3.0 + 2.0)
    assert (output.loss_sum.item(), gradient) == (bare.loss_sum.item(), bare_gradient)


def before_there_was_a_correction(inputs):
    """GRPO with bounds of 0.2, operation by operation, as it was."""
    valid = inputs.mask & torch.isfinite(inputs.generator_logprobs)
    log_ratios = torch.where(valid, inputs.logprobs - inputs.generator_logprobs, 0.0)
    ratios = log_ratios.clamp(-20.0, 20.0).exp()
    plain = ratios * inputs.advantages
    clipped = ratios.clamp(0.8, 1.2) * inputs.advantages
    return -torch.where(valid, torch.minimum(plain, clipped), 0.0).sum()


def random_inputs(seed, *, spread=1.0, num_tokens=64):
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(num_tokens, generator=generator)

    drawn_from = normal() - 2.0
    ids = torch.arange(num_tokens) // 10
    proximal = drawn_from + spread * normal()
    return LossInputs(
        logprobs=(proximal + 0.3 * normal()).requires_grad_(),
        generator_logprobs=drawn_from,
        advantages=normal(),
        mask=(torch.rand(num_tokens, generator=generator) < 0.8) & (ids < num_tokens // 10),
        sequence_ids=ids,
        num_sequences=num_tokens // 10,
        proximal_logprobs=proximal,
    )


@pytest.mark.parametrize("seed", range(3))
def test_without_a_correction_loss_and_gradient_are_the_same_bits_as_ever(seed):
    inputs = random_inputs(seed)
    output, gradient = loss_and_gradient(GRPOLoss(), inputs)
    expected = before_there_was_a_correction(inputs)
    assert output.loss_sum.item() == expected.item() != 0.0
    assert gradient == torch.autograd.grad(expected, inputs.logprobs)[0].tolist()


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
@pytest.mark.parametrize("given", [True, False])
def test_on_policy_weights_are_one_and_the_gradient_that_without_correction(given, level, mode):
    random = random_inputs(7)
    on_policy = random.generator_logprobs
    inputs = replaced(
        random,
        logprobs=on_policy.clone().requires_grad_(),
        proximal_logprobs=on_policy if given else None,
    )
    loss = GRPOLoss(correction=ImportanceCorrection(level=level, mode=mode))
    assert corrected(loss.correction, inputs).weights.tolist() == [1.0] * 64
    output, gradient = loss_and_gradient(loss, inputs)
    plain, plain_gradient = loss_and_gradient(GRPOLoss(), inputs)
    assert (output.loss_sum.item(), gradient) == (plain.loss_sum.item(), plain_gradient)
    assert output.metric_sums["generator_kl_k1"].item() == output.metric_sums["generator_kl_k3"].item() == 0.0


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
@pytest.mark.parametrize("high", [1.0, 1.7, 5.0])
def test_no_weight_is_above_the_bound_nor_any_masked_one_within_it(level, high):
    reached = 0
    for seed in range(20):
        inputs = random_inputs(seed, spread=3.0)
        truncated = corrected(ImportanceCorrection(level=level, high=high), inputs)
        masked = corrected(ImportanceCorrection(level=level, mode="mask", high=high), inputs)
        assert truncated.weights.min() > 0.0
        assert truncated.weights.max() <= high
        assert torch.equal(truncated.outside, masked.outside)
        assert (truncated.weights[truncated.outside] == high).all()
        assert (masked.weights[masked.outside] == 0.0).all()
        inside = ~truncated.outside
        assert torch.equal(truncated.weights[inside], masked.weights[inside])
        reached += int(truncated.outside.sum())
    assert reached > 20


def test_masked_sequence_keeps_its_tokens_in_the_denominator_and_has_no_gradient_at_all():
    correction = ImportanceCorrection(level="sequence", mode="mask", low=0.3, high=3.0)
    loss = GRPOLoss(correction=correction, kl_coef=0.5, kl_estimator="k2")
    inputs = replaced(make_inputs(), reference_logprobs=torch.full((7,), -3.0))
    output, gradient = loss_and_gradient(loss, inputs)  # products 1/4 and 4: both are masked
    assert gradient == [0.0] * 7
    assert output.loss_sum.item() == 0.0
    assert output.denominator.item() == 5
    assert output.metric_sums["correction_masked"].item() == 5


def test_kl_term_is_weighted_only_if_it_asks_for_the_whole_ratio():
    # r = 1; p is -log 4 + log of the ratios, of which the first is masked.
    inputs = replaced(make_inputs(advantages=[0.0] * 5), reference_logprobs=torch.full((7,), math.log(0.25)))
    correction = ImportanceCorrection(mode="mask", low=0.125, high=3.0)
    logs = [math.log(r) for r in RATIOS]
    for weighted in (False, True):
        loss = GRPOLoss(
            correction=correction, kl_coef=0.1, kl_estimator="k1", kl_importance_weighted=weighted
        )
        output, gradient = loss_and_gradient(loss, inputs)
        weights = [0.0, *RATIOS[1:]] if weighted else [0.0, 1.0, 1.0, 1.0, 1.0]
        expected = 0.1 * sum(w * d for w, d in zip(weights, logs, strict=True))
        assert output.loss_sum.item() == pytest.approx(expected)
        assert output.metric_sums["kl"].item() == pytest.approx(sum(logs))
        # Of r k1 the derivative is r (k1 + 1).
        slopes = [w * (d + 1 if weighted else 1) for w, d in zip(weights, logs, strict=True)]
        assert gradient == pytest.approx([0.1 * slope for slope in slopes] + [0.0, 0.0])


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
def test_nan_outside_the_mask_reaches_neither_loss_nor_gradient_nor_its_sequence(level):
    loss = GRPOLoss(correction=ImportanceCorrection(level=level, high=100.0))
    alone = make_inputs(ratios=RATIOS[:2], advantages=ADVANTAGES[:2], ids=(0, 0), padding=0)
    expected, expected_gradient = loss_and_gradient(loss, alone)
    # In the same sequence: a token that is not trained on, NaN in everything, and one that was not drawn.
    inputs = make_inputs(
        ratios=[*RATIOS[:2], NAN, 8.0], advantages=[*ADVANTAGES[:2], NAN, 1.0], ids=(0, 0, 0, 0)
    )
    drawn = inputs.generator_logprobs.clone()
    drawn[3] = NAN
    mask = inputs.mask.clone()
    mask[2] = False
    output, gradient = loss_and_gradient(loss, replaced(inputs, generator_logprobs=drawn, mask=mask))
    assert output.loss_sum.item() == expected.loss_sum.item()
    assert gradient == [*expected_gradient, 0.0, 0.0, 0.0, 0.0]
    assert output.num_tokens.item() == 2
    assert {name: value.item() for name, value in output.metric_sums.items()} == {
        name: value.item() for name, value in expected.metric_sums.items()
    }


def test_nan_in_a_valid_token_is_not_hidden():
    for mode in ("truncate", "mask"):
        proximal = make_inputs().proximal_logprobs.clone()
        proximal[1] = NAN
        loss = GRPOLoss(correction=ImportanceCorrection(mode=mode))
        assert math.isnan(loss(replaced(make_inputs(), proximal_logprobs=proximal)).loss_sum.item())


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
def test_no_valid_token_and_padding_alone_give_finite_zeros(level):
    loss = GRPOLoss(correction=ImportanceCorrection(level=level))
    undrawn = replaced(make_inputs(), generator_logprobs=torch.full((7,), NAN))
    padding = replaced(
        make_inputs(),
        mask=torch.zeros(7, dtype=torch.bool),
        sequence_ids=torch.zeros(7, dtype=torch.int64),
        num_sequences=0,
    )
    for inputs in (undrawn, padding):
        output, gradient = loss_and_gradient(loss, inputs)
        assert gradient == [0.0] * 7
        assert {output.loss_sum.item(), *(value.item() for value in output.metric_sums.values())} == {0.0}


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
def test_packed_equals_unpacked(level, mode):
    packed = random_inputs(3)
    loss = GRPOLoss(correction=ImportanceCorrection(level=level, mode=mode, high=1.5))
    output, gradient = loss_and_gradient(loss, packed)
    gradients, sums = [], []
    for s in range(packed.num_sequences + 1):  # the last are the four tokens of the padding
        here = packed.sequence_ids == s
        tensors = {
            n: v[here] for n in LossInputs.__slots__ if isinstance(v := getattr(packed, n), torch.Tensor)
        }
        logprobs = tensors["logprobs"].detach().requires_grad_()
        ids = torch.zeros_like(tensors["sequence_ids"])
        single = replaced(
            packed, **(tensors | {"logprobs": logprobs, "sequence_ids": ids, "num_sequences": 1})
        )
        if s == packed.num_sequences:
            single = replaced(single, num_sequences=0)
        one, one_gradient = loss_and_gradient(loss, single)
        gradients += one_gradient
        sums.append({"loss": one.loss_sum, "denominator": one.denominator, **one.metric_sums})
    assert gradient == gradients
    whole = {"loss": output.loss_sum, "denominator": output.denominator, **output.metric_sums}
    for name, value in whole.items():
        assert value.item() == pytest.approx(sum(part[name].item() for part in sums), rel=1e-5, abs=1e-5), (
            name
        )


def test_ratio_of_a_long_sequence_is_exact_though_its_terms_cancel():
    # 1000 tokens of +5.123 and then 1000 of -5.123 nats: in float32 the sum of them misses 0 in its digits.
    ratios = [math.exp(5.123)] * 1000 + [math.exp(-5.123)] * 1000
    inputs = make_inputs(ratios=ratios, advantages=[1.0] * 2000, ids=(0,) * 2000)
    inputs = replaced(
        inputs, proximal_logprobs=inputs.generator_logprobs + torch.tensor([*ratios, NAN, NAN]).log()
    )
    log_ratios = (inputs.proximal_logprobs - inputs.generator_logprobs)[:2000]
    exact = math.exp(math.fsum(log_ratios.tolist()))
    weights = corrected(ImportanceCorrection(level="sequence", high=math.inf), inputs).weights
    assert weights[0].item() == pytest.approx(exact, rel=1e-6)


def test_far_ratios_are_finite_and_masks_are_decided_before_the_clamp():
    far = make_inputs(ratios=[1.0, 1.0], advantages=[1.0, 1.0], ids=(0, 1))
    far = replaced(far, proximal_logprobs=far.proximal_logprobs + torch.tensor([200.0, -200.0, 0.0, 0.0]))
    weights = corrected(ImportanceCorrection(high=math.inf), far).weights
    assert weights.tolist()[:2] == pytest.approx([math.exp(20.0), math.exp(-20.0)])
    # Bounds wider than +-20 nats.
    said = corrected(ImportanceCorrection(mode="mask", low=1e-30, high=1e30), far)
    assert said.outside.tolist() == [True, True, False, False]


def test_effective_sample_share_is_kongs():
    assert effective_sample_share(mean_weight=2.0, mean_squared_weight=4.0) == 1.0  # all alike
    assert effective_sample_share(mean_weight=0.25, mean_squared_weight=0.25) == 0.25  # one of four has all
    assert effective_sample_share(mean_weight=0.0, mean_squared_weight=0.0) == 0.0


def test_a_loss_says_whether_it_needs_proximal_logprobs():
    assert uses_proximal_logprobs(GRPOLoss(correction=ImportanceCorrection()))
    assert not uses_proximal_logprobs(GRPOLoss())
    assert not uses_proximal_logprobs(CrossEntropyLoss())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"high": 0.9}, r"high=0\.9: must be at least 1"),
        ({"high": NAN}, "high=nan: must be at least 1"),
        ({"mode": "mask", "low": 1.1}, r"low=1\.1: must be between 0 and 1"),
        ({"mode": "mask", "low": -0.1}, r"low=-0\.1: must be between 0 and 1"),
        ({"low": 0.5}, r"low=0\.5 has no effect with mode='truncate': must be 0, or mode 'mask'"),
    ],
)
def test_bounds_that_cannot_be_are_refused_when_made_and_when_edited(settings, says):
    with pytest.raises(ValueError, match=says):
        ImportanceCorrection(**settings)
    loss = GRPOLoss(correction=ImportanceCorrection())
    for name, value in settings.items():
        setattr(loss.correction, name, value)
    with pytest.raises(ValueError, match=says):
        loss(make_inputs())
