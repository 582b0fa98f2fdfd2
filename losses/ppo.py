"""PPO's clipped surrogate, and the bounds of all losses that clip."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from losses.policy import PolicyLoss, PolicyTokens, Surrogate


@dataclass(kw_only=True, slots=True)
class PPOLoss(PolicyLoss):
    """J = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    Schulman et al., "Proximal Policy Optimization Algorithms" (arXiv:1707.06347), equation 7. Without a
    critic: the advantages are the samples'.
    """

    clip_low: float = 0.2
    """The ratio stops paying below 1 - clip_low, for negative advantages."""
    clip_high: float = 0.2
    """The ratio stops paying above 1 + clip_high, for positive advantages."""

    def __post_init__(self) -> None:
        PolicyLoss.__post_init__(self)
        if not 0.0 <= self.clip_low <= 1.0:
            raise ValueError(f"clip_low={self.clip_low}: must be between 0 and 1")
        if not self.clip_high >= 0.0:
            raise ValueError(f"clip_high={self.clip_high}: must be at least 0")

    def ratios(self, tokens: PolicyTokens) -> Tensor:
        """[T] what is clipped."""
        return tokens.ratios()

    def clip(self, ratios_T: Tensor) -> Tensor:
        """[T]"""
        return ratios_T.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)

    def surrogate(self, tokens: PolicyTokens) -> Surrogate:
        ratios_T = self.ratios(tokens)
        plain_T = ratios_T * tokens.advantages
        clipped_T = self.clip(ratios_T) * tokens.advantages
        return Surrogate(
            values=torch.minimum(plain_T, clipped_T), ratios=ratios_T, is_clipped=clipped_T < plain_T
        )
