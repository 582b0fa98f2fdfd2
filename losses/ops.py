"""Pieces that several losses share.

Shape legend: T packed tokens of one micro-batch, S its sequences and the padding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from losses.types import LossInputs

MAX_LOG_RATIO = 20.0
"""Nats; exp of more than this is no ratio to train on and overflows soon after."""


def drawn_tokens(*, mask_T: Tensor, generator_logprobs_T: Tensor) -> Tensor:
    """[T] bool, the trained-on tokens that a generator drew: mask and a finite logprob."""
    return mask_T & torch.isfinite(generator_logprobs_T)


def importance_ratios(*, logprobs_T: Tensor, old_logprobs_T: Tensor, valid_T: Tensor) -> Tensor:
    """[T] exp(p - p_old), the log clamped to +-20 nats; 1 without gradient where not valid.

    Invalid tokens are replaced before the exponential, so that a NaN there reaches neither
    the value nor, as 0 * NaN, the gradient.
    """
    log_ratios_T = torch.where(valid_T, logprobs_T - old_logprobs_T, 0.0)
    return log_ratios_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def masked_sum(values_T: Tensor, valid_T: Tensor) -> Tensor:
    """[] sum over valid tokens; the others give exactly 0, to the gradient too."""
    return torch.where(valid_T, values_T, 0.0).sum()


def over_sequences(
    values_T: Tensor, valid_T: Tensor, *, inputs: LossInputs, mean: bool, to_T: Tensor | None = None
) -> Tensor:
    """[T] each token's sequence's sum of values over its valid tokens, or their mean; 0 where not valid, or
    with `to_T` ([T] bool) where that is False.

    `values_T` is 0 where not valid. Summed in float64, so that a sequence's ratio hardly depends on how
    it is packed, nor on the order in which a GPU adds. Differentiable.
    """
    sums_S = _sum_by_sequence(values_T.double(), inputs)
    if mean:
        sums_S = sums_S / _sum_by_sequence(valid_T.double(), inputs).clamp(min=1.0)
    return torch.where(valid_T if to_T is None else to_T, sums_S[inputs.sequence_ids].to(values_T.dtype), 0.0)


def token_shares(valid_T: Tensor, *, inputs: LossInputs) -> Tensor:
    """[T] one over the valid tokens of a token's sequence; 0 where not valid."""
    counts_S = _sum_by_sequence(valid_T.double(), inputs).clamp(min=1.0)
    return torch.where(valid_T, counts_S.reciprocal()[inputs.sequence_ids], 0.0).to(inputs.logprobs.dtype)


def _sum_by_sequence(values_T: Tensor, inputs: LossInputs) -> Tensor:
    """[S]; the padding is the last."""
    return values_T.new_zeros(inputs.num_sequences + 1).index_add(0, inputs.sequence_ids, values_T)


def kl_k1(*, logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """[T] estimate k1 of KL(policy || reference), from one token each: p - p_ref.

    Of tokens drawn from the policy its mean is the KL, but the mean of its gradient is 0: as a
    term of a loss it needs the importance ratio as a factor.

    k1, k2 and k3 are those of Schulman, "Approximating KL divergence" (2020),
    http://joschu.net/blog/kl-approx.html; what their gradients estimate is worked out by Tang and
    Munos, "On a few pitfalls in KL divergence gradient estimation for RL" (arXiv:2506.09477).
    """
    return logprobs_T - reference_logprobs_T


def kl_k2(*, logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """[T] estimate k2: (p - p_ref)^2 / 2, biased, of low variance, never negative.

    Of tokens drawn from the policy its gradient (p - p_ref) dp is an unbiased one of
    KL(policy || reference).
    """
    return 0.5 * (logprobs_T - reference_logprobs_T).square()


def kl_k3(*, logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """[T] estimate k3: exp(d) - 1 - d with d = p_ref - p, clamped to +-20 nats; never negative.

    Unbiased, of lower variance than k1. Its gradient (1 - exp(d)) dp is, of tokens drawn from the
    policy, an unbiased one of the other direction, KL(reference || policy); with the importance
    ratio as a factor it is one of KL(policy || reference).
    """
    d_T = (reference_logprobs_T - logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(d_T) - d_T


KL_ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
