"""Importance correction: weights that let data of another policy stand for the trainer's own.

Three policies are told apart. A token was drawn by q, the generator's, which may be older than the trainer's,
computed by other kernels, and of several versions within one sequence. p_prox is the trainer's when it met
the data: before the first optimizer step on it. p is the one being trained. The surrogate of PPO compares p
with p_prox, for trust in the step; the correction compares p_prox with q, for the data. Hilton et al., "Batch
size-invariance for policy optimization" (arXiv:2110.00641), take the two apart; Fu et al., "AReaL"
(arXiv:2505.24298), section 5, use that for asynchronous training of language models.

Shape legend: T packed tokens of one micro-batch, S its sequences and the padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from losses.ops import MAX_LOG_RATIO, kl_k1, kl_k3, masked_sum, over_sequences
from losses.types import LossInputs

WEIGHT, WEIGHT_SQUARED = "correction_weight", "correction_weight_squared"
"""Metrics, from the means of which follows `effective_sample_share`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectedTokens:
    """What the correction says of one micro-batch; nothing here carries a gradient."""

    proximal_logprobs: Tensor
    """[T] p_prox, nats."""
    weights: Tensor
    """[T] w; 1 where the token is not valid."""
    outside: Tensor
    """[T] bool, valid tokens whose weight was truncated, or masked; False where not valid."""
    metric_sums: dict[str, Tensor]
    """[] each, summed over valid tokens."""


@dataclass(kw_only=True, slots=True)
class ImportanceCorrection:
    """Truncated or masked importance weights w of p_prox against q, constants in the loss.

    With d = p_prox - q of a valid token and S the valid tokens of its sequence:

        rho = exp(d)             level "token"
        rho = exp(sum_S d)       level "sequence"
        rho = exp(mean_S d)      level "sequence_mean", the geometric mean of the tokens' ratios
        w = min(rho, high)                      mode "truncate"
        w = rho if low <= rho <= high else 0    mode "mask"

    Truncation is Ionides, "Truncated Importance Sampling" (2008), and rho-bar of Espeholt et al., "IMPALA"
    (arXiv:1802.01561), equation 1. Two-sided masking of tokens is IcePop (Ling Team, "Every Step Evolves",
    arXiv:2510.18855). The geometric mean is the ratio of GSPO (Zheng et al., arXiv:2507.18071, equation 7).

    The ratio of a whole sequence, not cut off, makes the expected gradient that of the trainer's own samples.
    A token's own leaves out that the tokens before it were drawn by q too: a bias, for a variance that does
    not grow with the length. Bounds add a bias of their own: what lies above `high` counts for less, or
    not at all. `sequence_mean` is for masks: it says how far a sequence is from p_prox, whatever its
    length, and as a weight has no such expectation.

    A masked token counts in the denominator: it is a token that asks for no change, and dropping some does
    not make the others' steps longer.

    For w, log rho is clamped to +-20 nats; a mask compares rho itself with its bounds.

    Raises:
        ValueError: when made or called, if 1, the ratio of on-policy data, would not be left as it is, or
            `low` would have no effect.
    """

    level: Literal["token", "sequence", "sequence_mean"] = "token"
    """Whose ratio weighs a token: its own, the product over its sequence's trained tokens, or their geometric
    mean."""
    mode: Literal["truncate", "mask"] = "truncate"
    """What becomes of a ratio out of bounds: the upper bound, or 0."""
    low: float = 0.0
    """Ratios below it are masked; only with mode mask."""
    high: float = 2.0
    """Ratios above it are truncated to it, or masked; inf: none is."""

    def __post_init__(self) -> None:
        if not self.high >= 1.0:
            raise ValueError(f"high={self.high}: must be at least 1, the ratio of on-policy data")
        if not 0.0 <= self.low <= 1.0:
            raise ValueError(f"low={self.low}: must be between 0 and 1, the ratio of on-policy data")
        if self.low and self.mode != "mask":
            raise ValueError(
                f"low={self.low} has no effect with mode={self.mode!r}: must be 0, or mode 'mask'"
            )

    def __call__(self, inputs: LossInputs, valid_T: Tensor) -> CorrectedTokens:
        """Of `valid_T` ([T] bool) alone; whatever the other tokens hold, NaN too, reaches nothing.

        Without `proximal_logprobs` p_prox is p as it is now, which is exact until the first optimizer step
        on the data.
        """
        self.__post_init__()  # A field may have been edited since.
        given_T = inputs.proximal_logprobs
        proximal_T = inputs.logprobs.detach() if given_T is None else given_T
        log_ratios_T = torch.where(valid_T, proximal_T - inputs.generator_logprobs, 0.0)
        if self.level != "token":
            log_ratios_T = over_sequences(
                log_ratios_T, valid_T, inputs=inputs, mean=self.level == "sequence_mean"
            )
        rho_T = log_ratios_T.exp()
        outside_T = (rho_T < self.low) | (rho_T > self.high)  # not where rho is 1, as where not valid
        weights_T = log_ratios_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        if self.mode == "mask":
            weights_T = torch.where(outside_T, 0.0, weights_T)
        else:
            weights_T = weights_T.clamp(max=self.high)
        return CorrectedTokens(
            proximal_logprobs=proximal_T,
            weights=weights_T,
            outside=outside_T,
            metric_sums=self._metrics(inputs, proximal_T, weights_T, outside_T, valid_T),
        )

    def _metrics(
        self,
        inputs: LossInputs,
        proximal_T: Tensor,
        weights_T: Tensor,
        outside_T: Tensor,
        valid_T: Tensor,
    ) -> dict[str, Tensor]:
        generator_T = inputs.generator_logprobs
        k1_T = kl_k1(logprobs_T=generator_T, reference_logprobs_T=proximal_T)
        k3_T = kl_k3(logprobs_T=generator_T, reference_logprobs_T=proximal_T)
        share = "correction_truncated" if self.mode == "truncate" else "correction_masked"
        return {
            WEIGHT: masked_sum(weights_T, valid_T),
            WEIGHT_SQUARED: masked_sum(weights_T.square(), valid_T),
            share: outside_T.sum().float(),
            "generator_kl_k1": masked_sum(k1_T, valid_T),
            "generator_kl_k3": masked_sum(k3_T, valid_T),
        }


def effective_sample_share(*, mean_weight: float, mean_squared_weight: float) -> float:
    """Kong's effective sample size over the number of samples, (sum w)^2 / (N sum w^2): 1 if all weights are
    equal, 1 / N if one has everything; 0 if all are 0.

    Kong, "A note on importance sampling using standardized weights" (1992).
    """
    return mean_weight**2 / mean_squared_weight if mean_squared_weight else 0.0
