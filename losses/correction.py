"""Importance correction for data that an older or different policy sampled.

Three policies are involved. q is the generator's policy that sampled a token; it may be older than
the trainer's, computed by other kernels, and change within a sequence. p_prox is the trainer's
policy before its first optimizer step on the data. p is the policy being trained. PPO's surrogate
compares p with p_prox to bound the step; the correction weighs the data by p_prox against q. Hilton
et al., "Batch size-invariance for policy optimization" (arXiv:2110.00641), separate the two; Fu et
al., "AReaL" (arXiv:2505.24298), section 5, use the separation for asynchronous training of language
models.

Shape legend: T packed tokens of one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from losses.ops import bounded_exp, kl_k1, kl_k3, masked_sum, over_sequences
from losses.types import LossInputs

WEIGHT, WEIGHT_SQUARED = "correction_weight", "correction_weight_squared"
"""Metrics whose means determine `effective_sample_share`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectedTokens:
    """Correction of one micro-batch; no tensor carries a gradient."""

    proximal_logprobs: Tensor
    """[T] p_prox, nats."""
    weights: Tensor
    """[T] w; 1 for invalid tokens."""
    metric_sums: dict[str, Tensor]
    """[] each, summed over valid tokens."""


@dataclass(kw_only=True, slots=True)
class ImportanceCorrection:
    """Truncated or masked importance weights w of p_prox against q, constant in the loss.

    With d = p_prox - q of a valid token and S the valid tokens of its sequence:

        rho = exp(d)             level "token"
        rho = exp(sum_S d)       level "sequence"
        rho = exp(mean_S d)      level "sequence_mean", the geometric mean of the tokens' ratios
        w = min(rho, high)                      mode "truncate"
        w = rho if low <= rho <= high else 0    mode "mask"

    Truncation is Ionides, "Truncated Importance Sampling" (2008), and rho-bar of Espeholt et al.,
    "IMPALA" (arXiv:1802.01561), equation 1. Two-sided masking of tokens is IcePop (Ling Team,
    "Every Step Evolves", arXiv:2510.18855). The geometric mean is the ratio of GSPO (Zheng et al.,
    arXiv:2507.18071, equation 7).

    With the unbounded ratio of a whole sequence the expected gradient equals that of the trainer's
    own samples. The ratio of a token ignores that the tokens before it were sampled from q too: a
    bias, in exchange for a variance that does not grow with the length. Bounds add a bias of their
    own. `sequence_mean` is meant for masks: it measures the distance of a sequence from p_prox
    independently of its length, and its weights do not make the gradient unbiased.

    Masked tokens stay in the denominator, so masking does not enlarge the steps of the remaining
    tokens. For w log rho is clamped to +-20 nats; a mask compares rho itself with its bounds.

    Raises:
        ValueError: if the bounds exclude 1, the ratio of on-policy data, or `low` has no effect.
    """

    level: Literal["token", "sequence", "sequence_mean"] = "token"
    """Ratio that weighs a token: its own, the product over its sequence's trained tokens, or their
    geometric mean."""
    mode: Literal["truncate", "mask"] = "truncate"
    """Treatment of ratios out of bounds: replaced by the upper bound, or by 0."""
    low: float = 0.0
    """Lower bound of the ratio; only with mode mask."""
    high: float = 2.0
    """Upper bound of the ratio; inf for none."""

    def __post_init__(self) -> None:
        if not self.high >= 1.0:
            raise ValueError(f"high={self.high}: must be at least 1, the ratio of on-policy data")
        if not 0.0 <= self.low <= 1.0:
            raise ValueError(
                f"low={self.low}: must be between 0 and 1, the ratio of on-policy data"
            )
        if self.low and self.mode != "mask":
            raise ValueError(
                f"low={self.low} has no effect with mode={self.mode!r}: must be 0, or mode 'mask'"
            )

    def __call__(self, inputs: LossInputs, valid_T: Tensor) -> CorrectedTokens:
        """Compute weights and metrics from the valid tokens; values elsewhere, including NaN, have
        no effect.

        Without `proximal_logprobs` the current p stands for p_prox, which is exact until the first
        optimizer step on the data.
        """
        # Without gradient: the weights are constants in the loss.
        given_T = inputs.proximal_logprobs
        proximal_T = inputs.logprobs.detach() if given_T is None else given_T

        # Masked before the exponential and before sums over sequences, which a NaN would spoil.
        log_ratios_T = torch.where(valid_T, proximal_T - inputs.generator_logprobs, 0.0)
        if self.level != "token":
            log_ratios_T = over_sequences(
                log_ratios_T, valid_T, inputs=inputs, mean=self.level == "sequence_mean"
            )

        # The bounds are compared with the ratio itself, which may be infinite; the weights multiply
        # a loss, and are clamped.
        rho_T = log_ratios_T.exp()
        outside_T = (rho_T < self.low) | (rho_T > self.high)  # Invalid tokens have rho = 1, inside.
        weights_T = bounded_exp(log_ratios_T)
        if self.mode == "mask":
            weights_T = torch.where(outside_T, 0.0, weights_T)
        else:
            weights_T = weights_T.clamp(max=self.high)

        # KL(q || p_prox), as q has sampled the tokens: the distance between generator and trainer.
        logprobs = {"logprobs_T": inputs.generator_logprobs, "reference_logprobs_T": proximal_T}
        share = "correction_truncated" if self.mode == "truncate" else "correction_masked"
        return CorrectedTokens(
            proximal_logprobs=proximal_T,
            weights=weights_T,
            metric_sums={
                WEIGHT: masked_sum(weights_T, valid_T),
                WEIGHT_SQUARED: masked_sum(weights_T.square(), valid_T),
                share: outside_T.sum().float(),
                "generator_kl_k1": masked_sum(kl_k1(**logprobs), valid_T),
                "generator_kl_k3": masked_sum(kl_k3(**logprobs), valid_T),
            },
        )


def effective_sample_share(*, mean_weight: float, mean_squared_weight: float) -> float:
    """Return Kong's effective sample size divided by the number of samples, (sum w)^2 / (N sum
    w^2).

    1 if all weights are equal, 1 / N if a single sample has all the weight, 0 if all weights are 0.
    Kong, "A note on importance sampling using standardized weights" (1992).
    """
    return mean_weight**2 / mean_squared_weight if mean_squared_weight else 0.0
