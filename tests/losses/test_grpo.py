import math

import pytest
import torch

from losses.grpo import GRPOLoss
from losses.types import LossInputs

NAN = math.nan


def make_inputs(*, ratios, advantages, mask=None, drawn=None):
    """Tokens whose policy is `ratios` times as sure as the generator, which said 0.25."""
    ratios = torch.tensor(ratios)
    num_tokens = len(ratios)
    generator = torch.full((num_tokens,), math.log(0.25))
    if drawn is not None:
        generator = torch.where(torch.tensor(drawn), generator, NAN)
    return LossInputs(
        logprobs=(math.log(0.25) + ratios.log()).requires_grad_(),
        generator_logprobs=generator,
        advantages=torch.tensor(advantages),
        mask=torch.tensor(mask if mask is not None else [True] * num_tokens),
        sequence_ids=torch.zeros(num_tokens, dtype=torch.int64),
        num_sequences=1,
    )


def gradient(loss, inputs):
    (grad,) = torch.autograd.grad(loss(inputs).loss_sum, inputs.logprobs)
    return grad


def test_value_is_the_clipped_surrogate():
    # r A, clip(r) A, loss:  1.5*2=3, 1.2*2=2.4 -> -2.4;  0.5*2=1, 0.8*2=1.6 -> -1;
    #                        -0.5, -0.8 -> 0.8;  -1.5, -1.2 -> 1.5.
    output = GRPOLoss()(make_inputs(ratios=[1.5, 0.5, 0.5, 1.5], advantages=[2.0, 2.0, -1.0, -1.0]))
    assert output.loss_sum.item() == pytest.approx(-2.4 - 1.0 + 0.8 + 1.5)
    assert output.denominator is not None
    assert output.denominator.item() == 4
    assert output.num_tokens.item() == 4


def test_clip_stops_gradient_above_upper_bound_and_below_lower_bound():
    grad = gradient(GRPOLoss(), make_inputs(ratios=[1.5, 0.5, 0.5, 1.5], advantages=[2.0, 2.0, -1.0, -1.0]))
    # d/dp of -r A is -r A: 0 where clipped, else -0.5*2 and 1.5.
    torch.testing.assert_close(grad, torch.tensor([0.0, -1.0, 0.0, 1.5]))


def test_bounds_are_separate():
    inputs = make_inputs(ratios=[1.25, 0.75], advantages=[1.0, -1.0])
    wide_above = GRPOLoss(clip_low=0.2, clip_high=0.3)(inputs)
    assert wide_above.loss_sum.item() == pytest.approx(-1.25 + 0.8)
    wide_below = GRPOLoss(clip_low=0.3, clip_high=0.2)(inputs)
    assert wide_below.loss_sum.item() == pytest.approx(-1.2 + 0.75)


def test_on_policy_gradient_is_minus_the_advantage():
    inputs = make_inputs(ratios=[1.0, 1.0, 1.0], advantages=[0.5, -2.0, 0.0])
    torch.testing.assert_close(gradient(GRPOLoss(), inputs), torch.tensor([-0.5, 2.0, 0.0]))


def test_masked_and_undrawn_tokens_count_for_nothing():
    inputs = make_inputs(
        ratios=[0.5, 0.5, 0.5],
        advantages=[2.0, 2.0, 2.0],
        mask=[True, False, True],
        drawn=[True, True, False],
    )
    output = GRPOLoss()(inputs)
    assert output.loss_sum.item() == pytest.approx(-1.0)
    assert output.num_tokens.item() == 1
    assert output.metric_sums["ratio"].item() == pytest.approx(0.5)
    # Exactly 0: a NaN in the generator's logprobs must not reach the gradient as 0 * NaN.
    assert gradient(GRPOLoss(), inputs).tolist() == pytest.approx([-1.0, 0.0, 0.0])


def test_no_valid_token_gives_zero_with_a_zero_gradient():
    inputs = make_inputs(ratios=[0.5], advantages=[2.0], drawn=[False])
    output = GRPOLoss()(inputs)
    assert (output.loss_sum.item(), output.num_tokens.item()) == (0.0, 0.0)
    assert gradient(GRPOLoss(), inputs).tolist() == [0.0]


def test_log_ratio_is_clamped_at_20_nats():
    inputs = make_inputs(ratios=[1.0], advantages=[-1.0])
    far = torch.tensor([inputs.generator_logprobs.item() + 50.0]).requires_grad_()
    inputs = LossInputs(**{name: getattr(inputs, name) for name in LossInputs.__slots__} | {"logprobs": far})
    assert GRPOLoss()(inputs).loss_sum.item() == pytest.approx(math.exp(20.0))
    assert gradient(GRPOLoss(), inputs).tolist() == [0.0]


def test_metrics_are_sums_over_tokens():
    output = GRPOLoss()(make_inputs(ratios=[1.5, 0.5, 0.5, 1.1], advantages=[2.0, 2.0, -1.0, -1.0]))
    assert output.metric_sums["ratio"].item() == pytest.approx(3.6)
    assert output.metric_sums["clipped_fraction"].item() == 2


def test_nan_in_a_valid_token_is_not_hidden():
    output = GRPOLoss()(make_inputs(ratios=[0.5], advantages=[NAN]))
    assert math.isnan(output.loss_sum.item())


def test_bound_out_of_range_is_refused_when_made_and_when_edited():
    with pytest.raises(ValueError, match=r"clip_low=1\.5"):
        GRPOLoss(clip_low=1.5)
    loss = GRPOLoss()
    loss.clip_high = -0.1
    with pytest.raises(ValueError, match=r"clip_high=-0\.1"):
        loss(make_inputs(ratios=[1.0], advantages=[1.0]))


def with_reference(inputs, *, reference):
    values = {name: getattr(inputs, name) for name in LossInputs.__slots__}
    return LossInputs(**(values | {"reference_logprobs": torch.tensor(reference)}))


LOG2 = math.log(2)
# The policy says 0.25, the reference 0.5, 0.125 and, where it does not count, nothing.
REFERENCE = [math.log(0.5), math.log(0.125), NAN]
ON_POLICY = {"ratios": [1.0, 1.0, 1.0], "advantages": [0.5, -1.0, 3.0], "mask": [True, True, False]}


@pytest.mark.parametrize(
    ("estimator", "values", "slopes"),
    [
        ("k1", [-LOG2, LOG2], [1.0, 1.0]),
        ("k2", [LOG2**2 / 2, LOG2**2 / 2], [-LOG2, LOG2]),
        ("k3", [1 - LOG2, -0.5 + LOG2], [-1.0, 0.5]),
    ],
)
def test_kl_is_added_with_its_weight_and_reported(estimator, values, slopes):
    inputs = with_reference(make_inputs(**ON_POLICY), reference=REFERENCE)
    loss = GRPOLoss(kl_coef=0.1, kl_estimator=estimator)
    output = loss(inputs)
    assert output.loss_sum.item() == pytest.approx(-0.5 + 1.0 + 0.1 * sum(values))
    assert output.metric_sums["kl"].item() == pytest.approx(sum(values))
    assert not output.metric_sums["kl"].requires_grad
    assert output.num_tokens.item() == 2
    expected = [-0.5 + 0.1 * slopes[0], 1.0 + 0.1 * slopes[1], 0.0]
    assert gradient(loss, inputs).tolist() == pytest.approx(expected)


def test_importance_weighted_kl_is_multiplied_by_the_ratio():
    # r = 2 on the first token, where p = log 0.5 and p_ref = log 0.25: k1 = log 2, of which r k1 is taken.
    inputs = with_reference(make_inputs(ratios=[2.0], advantages=[0.0]), reference=[math.log(0.25)])
    loss = GRPOLoss(kl_coef=0.5, kl_estimator="k1", kl_importance_weighted=True)
    assert loss(inputs).loss_sum.item() == pytest.approx(0.5 * 2 * LOG2)
    assert gradient(loss, inputs).tolist() == pytest.approx([0.5 * 2 * (LOG2 + 1)])


def test_reference_without_weight_is_measured_and_changes_nothing():
    plain = make_inputs(**ON_POLICY)
    watched = with_reference(plain, reference=REFERENCE)
    output = GRPOLoss()(watched)
    assert output.metric_sums["kl"].item() == pytest.approx(0.5)  # k3: 1 - log 2 - 0.5 + log 2
    assert output.loss_sum.item() == GRPOLoss()(plain).loss_sum.item()
    assert gradient(GRPOLoss(), watched).tolist() == gradient(GRPOLoss(), plain).tolist()
    assert "kl" not in GRPOLoss()(plain).metric_sums


def test_weight_without_a_reference_is_refused():
    with pytest.raises(ValueError, match=r"kl_coef=0\.1: needs the logprobs of a reference policy"):
        GRPOLoss(kl_coef=0.1)(make_inputs(ratios=[1.0], advantages=[1.0]))
    with pytest.raises(ValueError, match=r"kl_coef=-0\.1: must be"):
        GRPOLoss(kl_coef=-0.1)
