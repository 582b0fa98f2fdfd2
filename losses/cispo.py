"""Clipped importance-sampling policy optimisation."""

from __future__ import annotations

from dataclasses import dataclass

from losses.policy import PolicyTokens, Surrogate
from losses.ppo import PPOLoss


@dataclass(kw_only=True, slots=True)
class CISPOLoss(PPOLoss):
    """J = sg(clip(r, 1 - clip_low, 1 + clip_high)) A p, sg: without gradient.

    MiniMax, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention" (arXiv:2506.13585),
    equations 4 and 5. A ratio out of bounds is cut and goes on giving gradient, where PPO's stops.
    """

    clip_low: float = 1.0
    """A ratio below 1 - clip_low counts as that; 1: no lower bound, as in the paper."""
    clip_high: float = 3.0
    """A ratio above 1 + clip_high counts as that."""

    def surrogate(self, tokens: PolicyTokens) -> Surrogate:
        ratios_T = self.ratios(tokens)
        weights_T = self.clip(ratios_T).detach()
        return Surrogate(
            values=weights_T * tokens.advantages * tokens.logprobs,
            ratios=ratios_T,
            is_clipped=weights_T != ratios_T,
        )
