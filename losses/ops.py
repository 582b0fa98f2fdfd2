"""Building blocks of losses: masked sums, ratios, KL estimators and length normalization.

Shape legend: T packed tokens of one micro-batch, S its sequences plus one entry for padding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from losses.types import LossInputs, LossOutput

MAX_LOG_RATIO = 20.0
"""Nats; the exponential of a larger log ratio is useless for training and soon overflows."""


def drawn_tokens(*, mask_T: Tensor, generator_logprobs_T: Tensor) -> Tensor:
    """Return the trained tokens that a generator sampled, [T] bool."""
    # Tokens that no generator sampled, such as a tool's answer, have NaN: they have no ratio.
    return mask_T & torch.isfinite(generator_logprobs_T)


def bounded_exp(log_ratios_T: Tensor) -> Tensor:
    """Return the exponential, [T], of logs clamped to +-20 nats."""
    return log_ratios_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def masked_sum(values_T: Tensor, valid_T: Tensor, *, shares_T: Tensor | None = None) -> Tensor:
    """Return the sum over valid tokens, [], weighted by `shares_T`.

    Invalid tokens add 0, also to gradients.
    """
    weighted_T = values_T if shares_T is None else values_T * shares_T
    # A selection, not a product with the mask: 0 * NaN would be NaN.
    return torch.where(valid_T, weighted_T, 0.0).sum()


def over_sequences(
    values_T: Tensor, valid_T: Tensor, *, inputs: LossInputs, mean: bool, to_T: Tensor | None = None
) -> Tensor:
    """Return for each token its sequence's sum or mean of values over valid tokens, [T].

    Differentiable. Example: values (1, 3 | 5) of two sequences give sums (4, 4 | 5) and means
    (2, 2 | 5).

    Args:
        values_T: 0 for invalid tokens.
        to_T: [T] bool, the tokens that receive the result instead of the valid ones; all others get
            0.
    """
    # In float64, so that a ratio hardly depends on packing or on the order in which a GPU adds.
    sums_S = _sum_by_sequence(values_T.double(), inputs)
    if mean:
        # A sequence without valid tokens has the sum 0, and gets the mean 0.
        sums_S = sums_S / _sum_by_sequence(valid_T.double(), inputs).clamp(min=1.0)
    receives_T = valid_T if to_T is None else to_T
    return torch.where(receives_T, sums_S[inputs.sequence_ids].to(values_T.dtype), 0.0)


def _compute_shares(valid_T: Tensor, *, inputs: LossInputs) -> Tensor:
    """Return one over the number of valid tokens in each token's sequence, [T]; 0 if invalid."""
    counts_S = _sum_by_sequence(valid_T.double(), inputs).clamp(min=1.0)
    shares_T = torch.where(valid_T, counts_S.reciprocal()[inputs.sequence_ids], 0.0)
    return shares_T.to(inputs.logprobs.dtype)


def _sum_by_sequence(values_T: Tensor, inputs: LossInputs) -> Tensor:
    # The last entry is for padding, whose id is the number of sequences.
    return values_T.new_zeros(inputs.num_sequences + 1).index_add(0, inputs.sequence_ids, values_T)


# KL estimators k1, k2 and k3 of Schulman, "Approximating KL divergence" (2020),
# http://joschu.net/blog/kl-approx.html. Tang and Munos, "On a few pitfalls in KL divergence
# gradient estimation for RL" (arXiv:2506.09477), derive what their gradients estimate.


def kl_k1(*, logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """Return k1 = p - p_ref, [T].

    On the policy's samples it is an unbiased estimate of KL(policy || reference). The mean of its
    gradient is 0: a loss term needs the importance ratio as a factor.
    """
    return logprobs_T - reference_logprobs_T


def kl_k2(*, logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """Return k2 = (p - p_ref)^2 / 2, [T], a biased estimate with low variance, never negative.

    On the policy's samples its gradient is an unbiased estimate of the gradient of KL(policy ||
    reference).
    """
    return 0.5 * (logprobs_T - reference_logprobs_T).square()


def kl_k3(*, logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """Return k3 = exp(d) - 1 - d, [T], with d = p_ref - p clamped to +-20 nats; never negative.

    The value is unbiased, with lower variance than k1. On the policy's samples its gradient
    estimates that of the other direction, KL(reference || policy); the importance ratio as a factor
    restores KL(policy || reference).
    """
    # `expm1` keeps the digits of small d, where exp(d) - 1 cancels.
    d_T = (reference_logprobs_T - logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(d_T) - d_T


KL_ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}

Normalization = Literal["token_mean", "sequence_mean", "constant", "none"]


def name_sequence_normalization(normalization: Normalization) -> str | None:
    """Return "normalization='sequence_mean'" or "... 'constant'"; None if it counts tokens only."""
    counts_sequences = normalization in ("sequence_mean", "constant")
    return f"normalization={normalization!r}" if counts_sequences else None


@dataclass(kw_only=True, slots=True)
class NormalizedLoss(ABC):
    """Base of losses that sum over tokens, with a choice of length normalization.

    With l_t the loss of a token, n the number of valid tokens in its sequence, S the sequences and
    N the valid tokens of a step:

        token_mean       sum l_t / N              every token counts alike
        sequence_mean    sum (l_t / n) / S        every sequence counts alike
        constant         sum l_t / (S c)          c = tokens_per_sequence, whatever the lengths
        none             sum l_t

    Sums and denominators are added over micro-batches, calls and ranks before the one division, so
    the normalization is that of the whole step. A sequence without valid tokens counts in S. The
    rows of an episode are one sequence.

    Raises:
        ValueError: if `tokens_per_sequence` is missing or not positive with "constant", or set with
            another normalization.
    """

    normalization: Normalization = "token_mean"
    """Divisor of the sum over tokens."""
    tokens_per_sequence: float | None = None
    """Constant c of `constant`, for example the generation budget in tokens; None otherwise."""

    def __post_init__(self) -> None:
        length = self.tokens_per_sequence
        if self.normalization == "constant":
            if length is None or not 0.0 < length < float("inf"):
                raise ValueError(
                    f"tokens_per_sequence={length}: must be a finite number above 0 with "
                    "normalization 'constant', for example the maximum number of generated tokens"
                )
        elif length is not None:
            raise ValueError(
                f"tokens_per_sequence={length} has no effect with "
                f"normalization={self.normalization!r}: must be None, or normalization 'constant'"
            )

    @property
    def sequence_setting(self) -> str | None:
        """Setting by which the loss reads sequences, see `losses.types.Loss`."""
        return name_sequence_normalization(self.normalization)

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Compute the loss of one micro-batch; see `losses.types.Loss`."""

    def shares(self, inputs: LossInputs, valid_T: Tensor) -> Tensor | None:
        """Return the factor of each token's loss, [T], or None if every factor is 1."""
        if self.normalization != "sequence_mean":
            return None
        return _compute_shares(valid_T, inputs=inputs)

    def denominator(self, inputs: LossInputs, valid_T: Tensor) -> Tensor | None:
        """Return this micro-batch's part of the denominator, [] float32."""
        if self.normalization == "token_mean":
            return valid_T.sum().float()
        if self.normalization == "none":
            return None

        # Sequences count whether or not they have valid tokens: a sequence whose tokens are all
        # masked does not enlarge the step of the others.
        count = float(inputs.num_sequences)
        if self.normalization == "constant":
            assert self.tokens_per_sequence is not None
            count *= self.tokens_per_sequence
        return torch.full((), count, dtype=torch.float32, device=valid_T.device)
