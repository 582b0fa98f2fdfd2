import math

import pytest
import torch

from losses.ops import KL_ESTIMATORS, kl_k1, kl_k2, kl_k3


def of(estimate, p, reference):
    """Values and gradients with respect to p."""
    p = torch.tensor(p).requires_grad_()
    values = estimate(logprobs_T=p, reference_logprobs_T=torch.tensor(reference))
    (gradient,) = torch.autograd.grad(values.sum(), p)
    return values.tolist(), gradient.tolist()


P, REFERENCE = [math.log(0.5), math.log(0.25), -1.0], [math.log(0.25), math.log(0.5), -1.0]


def test_k1_is_the_difference_with_a_gradient_of_one():
    values, gradient = of(kl_k1, P, REFERENCE)
    assert values == pytest.approx([math.log(2), -math.log(2), 0.0])
    assert gradient == [1.0, 1.0, 1.0]


def test_k2_is_half_the_square_with_the_difference_as_gradient():
    values, gradient = of(kl_k2, P, REFERENCE)
    assert values == pytest.approx([math.log(2) ** 2 / 2, math.log(2) ** 2 / 2, 0.0])
    assert gradient == pytest.approx([math.log(2), -math.log(2), 0.0])


def test_k3_is_the_ratio_less_one_less_its_log():
    # Ratios reference / policy of 1/2, 2 and 1.
    values, gradient = of(kl_k3, P, REFERENCE)
    assert values == pytest.approx([0.5 - 1 + math.log(2), 2 - 1 - math.log(2), 0.0])
    assert gradient == pytest.approx([1 - 0.5, 1 - 2.0, 0.0])


def test_k3_is_precise_for_small_differences_and_finite_for_large_ones():
    values, _ = of(kl_k3, [-1.0, -100.0], [-1.001, 0.0])
    assert values[0] == pytest.approx(0.001**2 / 2, rel=1e-2)
    assert values[1] == pytest.approx(math.exp(20) - 1 - 20)


def expected(estimate, *, weighted):
    """Mean and gradient of the mean over tokens drawn from the policy, summed over a vocabulary of three.

    The gradient is with respect to the logits, tokens being drawn from the policy as it is.
    """
    logits = torch.tensor([0.3, -0.2, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.9, 0.4, -0.5], dtype=torch.float64).log_softmax(-1)
    p = logits.log_softmax(-1)
    drawn = p.detach().exp()
    values = estimate(logprobs_T=p, reference_logprobs_T=reference)
    if weighted:
        values = (p - p.detach()).exp() * values
    mean = (drawn * values).sum()
    return mean.item(), torch.autograd.grad(mean, logits)[0]


def kl_and_gradient(*, forward):
    logits = torch.tensor([0.3, -0.2, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.9, 0.4, -0.5], dtype=torch.float64).log_softmax(-1)
    p = logits.log_softmax(-1)
    kl = (reference.exp() * (reference - p)).sum() if forward else (p.exp() * (p - reference)).sum()
    return kl.item(), torch.autograd.grad(kl, logits)[0]


def test_means_of_k1_and_k3_are_the_kl_divergence():
    kl, _ = kl_and_gradient(forward=False)
    for name in ("k1", "k3"):
        assert expected(KL_ESTIMATORS[name], weighted=False)[0] == pytest.approx(kl)


def test_mean_gradients_are_those_that_the_docstrings_say():
    reverse, forward = (kl_and_gradient(forward=forward)[1] for forward in (False, True))
    torch.testing.assert_close(expected(kl_k1, weighted=False)[1], torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(expected(kl_k2, weighted=False)[1], reverse)
    torch.testing.assert_close(expected(kl_k3, weighted=False)[1], forward)
    for estimate in (kl_k1, kl_k3):
        torch.testing.assert_close(expected(estimate, weighted=True)[1], reverse)
