"""Group sequence policy optimisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from losses.normalization import Normalization
from losses.policy import PolicyTokens
from losses.ppo import PPOLoss


@dataclass(kw_only=True, slots=True)
class GSPOLoss(PPOLoss):
    """PPO's surrogate with the geometric mean of a sequence's ratios in the place of a token's own:

        s   = exp(mean over the sequence of p - q)            level "sequence"
        s_t = sg(s) exp(p - sg(p))                            level "token", sg: without gradient

    Zheng et al., "Group Sequence Policy Optimization" (arXiv:2507.18071), equations 5 and 7; the token
    variant is its equations 13 and 14. The two have the same values; where the advantages of a sequence are
    equal, also the same gradients. Where they are not, a token's own advantage moves all of its sequence at
    level "sequence", and itself alone at level "token". The log of s is clamped to +-20 nats. Samples may say
    by `ratio_mask` which tokens the mean is over; else it is over those that are trained on.
    """

    normalization: Normalization = "sequence_mean"
    """What the sum over tokens is divided by."""
    clip_low: float = 3e-4
    """The ratio stops paying below 1 - clip_low, for negative advantages."""
    clip_high: float = 4e-4
    """The ratio stops paying above 1 + clip_high, for positive advantages."""
    level: Literal["sequence", "token"] = "sequence"
    """What moves with a token's advantage: all of its sequence, or itself."""

    def ratios(self, tokens: PolicyTokens) -> Tensor:
        """[T] s or s_t; 1 where not valid."""
        ratios_T = tokens.mean_ratios()
        if self.level == "sequence":
            return ratios_T
        logprobs_T = tokens.logprobs
        return ratios_T.detach() * torch.exp(logprobs_T - logprobs_T.detach())
