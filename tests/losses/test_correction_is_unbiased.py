"""Exact expectation of the corrected gradient, summed over all possible sequences.

Two tokens of a vocabulary of three, the second distribution depending on the first token, give nine sequences. The
policies p, p_prox and q are tables of logits; q changes between the two tokens, as when weights change during
generation. Each sequence has its own advantage, multiplied by the sequence's probability under q; as the loss is
linear in the advantage, the gradient over all nine sequences is that of the expected loss.
"""

import math

import pytest
import torch

from losses.correction import ImportanceCorrection
from losses.policy import GRPOLoss
from losses.types import LossInputs

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


ADVANTAGES = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0, 0.0, 2.0, -0.5, 1.5], dtype=torch.float64)
P = table(0)
Q = logprobs(table(2), table(3))
"""Logprobs under q, with another version for each of the two tokens."""


def on_policy_gradient():
    """Return the gradient of minus the expected advantage under p."""
    logits = P.clone().requires_grad_()
    probabilities = logprobs(logits, logits).sum(1).exp()
    return torch.autograd.grad(-(probabilities * ADVANTAGES).sum(), logits)[0]


def expected_gradient(correction):
    """Return the expected gradient of the loss on sequences sampled from q."""
    logits = P.clone().requires_grad_()
    advantages = Q.sum(1).exp() * ADVANTAGES
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


def unbounded(level):
    return ImportanceCorrection(level=level, high=math.inf)


def test_only_the_sequence_ratio_gives_the_on_policy_gradient():
    expected = on_policy_gradient()
    assert gap(expected_gradient(unbounded("sequence")), expected) < 1e-12
    for biased in (None, unbounded("token"), unbounded("sequence_mean")):
        assert gap(expected_gradient(biased), expected) > 0.1


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_bounded_sequence_ratio_gives_the_gradient_under_bounded_probabilities(mode):
    # w q is min(p, high q) with truncation, and p within the bounds or else 0 with masking.
    low, high = (0.5, 1.5) if mode == "mask" else (0.0, 1.5)
    p, q = logprobs(P, P).sum(1).exp(), Q.sum(1).exp()
    inside = (p / q >= low) & (p / q <= high)
    assert 0 < inside.sum() < 9
    measure = torch.minimum(p, high * q) if mode == "truncate" else torch.where(inside, p, 0.0)
    logits = P.clone().requires_grad_()
    score = (measure * ADVANTAGES * logprobs(logits, logits).sum(1)).sum()
    expected = torch.autograd.grad(-score, logits)[0]
    correction = ImportanceCorrection(level="sequence", mode=mode, low=low, high=high)
    assert gap(expected_gradient(correction), expected) < 1e-12
