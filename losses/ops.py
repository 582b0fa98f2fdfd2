"""Pieces that several losses share. Shape legend: T packed tokens of one micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Nats; exp of more than this is no ratio to train on and overflows soon after."""


def drawn_tokens(*, mask_T: Tensor, generator_logprobs_T: Tensor) -> Tensor:
    """[T] bool, the trained-on tokens that a generator drew: mask and a finite logprob."""
    return mask_T & torch.isfinite(generator_logprobs_T)


def importance_ratios(*, logprobs_T: Tensor, generator_logprobs_T: Tensor, valid_T: Tensor) -> Tensor:
    """[T] exp(p - q), the log clamped to +-20 nats; 1 without gradient where not valid.

    Invalid tokens are replaced before the exponential, so that a NaN there reaches neither
    the value nor, as 0 * NaN, the gradient.
    """
    log_ratios_T = torch.where(valid_T, logprobs_T - generator_logprobs_T, 0.0)
    return log_ratios_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def masked_sum(values_T: Tensor, valid_T: Tensor) -> Tensor:
    """[] sum over valid tokens; the others give exactly 0, to the gradient too."""
    return torch.where(valid_T, values_T, 0.0).sum()
