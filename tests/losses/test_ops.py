import math

import pytest
import torch

from losses.ops import kl_k1, kl_k2, kl_k3


def test_k3_is_precise_for_small_differences_and_finite_for_large_ones():
    p, reference = torch.tensor([-1.0, -100.0]), torch.tensor([-1.001, 0.0])
    small, large = kl_k3(logprobs_T=p, reference_logprobs_T=reference).tolist()
    assert small == pytest.approx(0.001**2 / 2, rel=1e-2)
    assert large == pytest.approx(math.exp(20) - 1 - 20)


def exact_kl(*, forward=False, estimate=None, weighted=False):
    """Return KL(p || ref), its forward form or an estimate's mean over p, and the gradient in p's logits."""
    logits = torch.tensor([0.3, -0.2, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.9, 0.4, -0.5], dtype=torch.float64).log_softmax(-1)
    p = logits.log_softmax(-1)
    if estimate is not None:
        values = estimate(logprobs_T=p, reference_logprobs_T=reference)
        weights = (p - p.detach()).exp() if weighted else 1.0
        mean = (p.detach().exp() * weights * values).sum()
    else:
        mean = (reference.exp() * (reference - p)).sum() if forward else (p.exp() * (p - reference)).sum()
    return mean.item(), torch.autograd.grad(mean, logits)[0]


def test_means_of_k1_and_k3_are_the_kl_divergence():
    kl, _ = exact_kl()
    for estimate in (kl_k1, kl_k3):
        assert exact_kl(estimate=estimate)[0] == pytest.approx(kl)


def test_mean_gradients_are_those_in_the_docstrings():
    reverse, forward = exact_kl()[1], exact_kl(forward=True)[1]
    torch.testing.assert_close(exact_kl(estimate=kl_k1)[1], torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(exact_kl(estimate=kl_k2)[1], reverse)
    torch.testing.assert_close(exact_kl(estimate=kl_k3)[1], forward)
    for estimate in (kl_k1, kl_k3):
        torch.testing.assert_close(exact_kl(estimate=estimate, weighted=True)[1], reverse)
