"""Exact expectations: what the corrected gradient is on average, over every sequence that there is.

Two tokens of a vocabulary of three, the second's distribution depending on the first, so nine sequences. The
policies are tables of logits: p's, p_prox's, and q's, which for the second token is another version than for
the first, as when weights change while a sequence is drawn. Each sequence has an advantage of its own.
A sequence's probability under q multiplies its advantage, in which the loss is linear; so the gradient of the
loss over all nine is that of the expected loss.
"""

import math

import pytest
import torch

from losses.correction import ImportanceCorrection
from losses.grpo import GRPOLoss
from losses.types import LossInputs

FIRST = torch.arange(3).repeat_interleave(3)
SECOND = torch.arange(3).repeat(3)
NO_CLIP = {"clip_low": 1.0, "clip_high": math.inf}


def table(seed):
    """Logits of the first token in row 0, of the second after each first token in rows 1 to 3."""
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def logprobs(first, second):
    """[9, 2] of each token of each sequence."""
    at_first = first.log_softmax(-1)[0]
    at_second = second.log_softmax(-1)[1:]
    return torch.stack((at_first[FIRST], at_second[FIRST, SECOND]), dim=1)


ADVANTAGES = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0, 0.0, 2.0, -0.5, 1.5], dtype=torch.float64)
P = table(0)
PROXIMAL = table(1)
Q = logprobs(table(2), table(3))
"""The two tokens are of two versions."""


def on_policy_gradient(*, num_tokens=2):
    """Of minus the expected advantage under p, summed over all sequences; of the first token alone with 1."""
    logits = P.clone().requires_grad_()
    probabilities = logprobs(logits, logits)[:, :num_tokens].sum(1).exp()
    advantages = ADVANTAGES
    if num_tokens == 1:  # what the first token is worth: one sequence for each is enough
        keep = SECOND == 0
        probabilities, advantages = probabilities[keep], advantages[keep]
    return torch.autograd.grad(-(probabilities * advantages).sum(), logits)[0]


def expected_gradient(correction, *, num_tokens=2, proximal=None, **settings):
    """Of the loss on sequences drawn from q."""
    logits = P.clone().requires_grad_()
    keep = torch.ones(9, dtype=torch.bool) if num_tokens == 2 else SECOND == 0
    p, q = (values[keep, :num_tokens] for values in (logprobs(logits, logits), Q))
    advantages = q.sum(1).exp() * ADVANTAGES[keep]
    num_sequences = int(keep.sum())
    ids = torch.arange(num_sequences).repeat_interleave(num_tokens)
    old = None if proximal is None else logprobs(proximal, proximal)[keep, :num_tokens].flatten()
    inputs = LossInputs(
        logprobs=p.flatten(),
        generator_logprobs=q.flatten(),
        advantages=advantages.repeat_interleave(num_tokens),
        mask=torch.ones(len(ids), dtype=torch.bool),
        sequence_ids=ids,
        num_sequences=num_sequences,
        proximal_logprobs=old,
    )
    loss = GRPOLoss(correction=correction, **settings)
    return torch.autograd.grad(loss(inputs).loss_sum, logits)[0]


def gap(actual, expected):
    return (torch.linalg.norm(actual - expected) / torch.linalg.norm(expected)).item()


def unbounded(level):
    return ImportanceCorrection(level=level, high=math.inf)


def test_sequence_ratio_makes_the_on_policy_gradient_of_data_of_two_older_versions():
    assert gap(expected_gradient(unbounded("sequence")), on_policy_gradient()) < 1e-12


def test_token_ratio_makes_the_on_policy_gradient_where_a_sequence_is_one_token():
    assert gap(expected_gradient(unbounded("token"), num_tokens=1), on_policy_gradient(num_tokens=1)) < 1e-12


def test_weight_and_step_ratio_together_make_it_whatever_the_proximal_policy():
    gradient = expected_gradient(unbounded("token"), num_tokens=1, proximal=PROXIMAL, **NO_CLIP)
    assert gap(gradient, on_policy_gradient(num_tokens=1)) < 1e-12


def test_without_correction_clip_alone_does_not():
    assert gap(expected_gradient(None), on_policy_gradient()) > 0.1


@pytest.mark.parametrize("level", ["token", "sequence_mean"])
def test_ratios_of_less_than_the_sequence_are_biased_where_it_has_two_tokens(level):
    assert gap(expected_gradient(unbounded(level)), on_policy_gradient()) > 0.1


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_bounded_sequence_ratio_makes_the_gradient_under_bounded_probabilities(mode):
    """w q is min(p, high q), or p where p / q is within bounds and else nothing."""
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


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_mean_weight_is_one_and_the_kl_estimates_are_the_divergence(level):
    """Under q, of one sequence: the sequence's ratio, and each token's given those before."""
    p, probabilities = logprobs(P, P), Q.sum(1).exp()
    inputs = LossInputs(
        logprobs=p.flatten(),
        generator_logprobs=Q.flatten(),
        advantages=torch.zeros(18, dtype=torch.float64),
        mask=torch.ones(18, dtype=torch.bool),
        sequence_ids=torch.arange(9).repeat_interleave(2),
        num_sequences=9,
    )
    weights = unbounded(level)(inputs, inputs.mask).weights.view(9, 2)
    assert (probabilities[:, None] * weights).sum(0).tolist() == pytest.approx([1.0, 1.0])
    # One sequence a micro-batch, weighted with its probability: KL(q || p_prox) of the sequence.
    kl = (probabilities * (Q - p).sum(1)).sum().item()
    sums = {"generator_kl_k1": 0.0, "generator_kl_k3": 0.0}
    for s in range(9):
        here = slice(2 * s, 2 * s + 2)
        single = LossInputs(
            logprobs=inputs.logprobs[here],
            generator_logprobs=inputs.generator_logprobs[here],
            advantages=inputs.advantages[here],
            mask=inputs.mask[here],
            sequence_ids=torch.zeros(2, dtype=torch.int64),
            num_sequences=1,
        )
        metrics = unbounded(level)(single, single.mask).metric_sums
        for name in sums:
            sums[name] += probabilities[s].item() * metrics[name].item()
    assert sums == pytest.approx({"generator_kl_k1": kl, "generator_kl_k3": kl})
