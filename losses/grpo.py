"""The clipped policy gradient of GRPO, against the logprobs recorded by the generator.

Shape legend: T packed tokens of one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from losses.ops import drawn_tokens, importance_ratios, masked_sum
from losses.types import LossInputs, LossOutput


@dataclass(kw_only=True, slots=True)
class GRPOLoss:
    """Group-relative policy optimisation, averaged over all valid tokens of a step.

    Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language
    Models" (arXiv:2402.03300), equation 3 without its KL term; the surrogate is equation 7 of
    Schulman et al., "Proximal Policy Optimization Algorithms" (arXiv:1707.06347). Two bounds
    as in DAPO (arXiv:2503.14476, equation 8), which also averages over tokens.

    With p the logprob of the policy being trained, q the one recorded when the token was
    drawn, A its advantage and m = mask and finite(q):

        r = exp(clamp(p - q, -20, 20))
        token loss = -m min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    It asks for the number of valid tokens as denominator. Metrics: `ratio`, r itself, and
    `clipped_fraction`, 1 where the clipped branch is the smaller one, which stops the gradient.

    Raises:
        ValueError: when made or called, if a bound is negative or `clip_low` is above 1.
    """

    clip_low: float = 0.2
    """The ratio stops paying below 1 - clip_low, for negative advantages."""
    clip_high: float = 0.2
    """The ratio stops paying above 1 + clip_high, for positive advantages."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.clip_low <= 1.0:
            raise ValueError(f"clip_low={self.clip_low}: must be between 0 and 1")
        if not self.clip_high >= 0.0:
            raise ValueError(f"clip_high={self.clip_high}: must be at least 0")

    def __call__(self, inputs: LossInputs) -> LossOutput:
        self.__post_init__()  # A field may have been edited since.
        valid_T = drawn_tokens(mask_T=inputs.mask, generator_logprobs_T=inputs.generator_logprobs)
        ratios_T = importance_ratios(
            logprobs_T=inputs.logprobs, generator_logprobs_T=inputs.generator_logprobs, valid_T=valid_T
        )
        plain_T = ratios_T * inputs.advantages
        clipped_T = ratios_T.clamp(1.0 - self.clip_low, 1.0 + self.clip_high) * inputs.advantages
        num_tokens = valid_T.sum().float()
        return LossOutput(
            loss_sum=-masked_sum(torch.minimum(plain_T, clipped_T), valid_T),
            denominator=num_tokens,
            num_tokens=num_tokens,
            metric_sums=_metrics(ratios_T.detach(), clipped_T < plain_T, valid_T),
        )


def _metrics(ratios_T: Tensor, is_clipped_T: Tensor, valid_T: Tensor) -> dict[str, Tensor]:
    return {
        "ratio": masked_sum(ratios_T, valid_T),
        "clipped_fraction": (is_clipped_T & valid_T).sum().float(),
    }
