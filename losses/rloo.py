"""REINFORCE leave-one-out."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from losses.normalization import Normalization
from losses.policy import PolicyTokens
from losses.ppo import PPOLoss


@dataclass(kw_only=True, slots=True)
class RLOOLoss(PPOLoss):
    """PPO's surrogate with a whole sequence as one action: its ratio is the product of its tokens' ratios.

    Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback
    in LLMs" (arXiv:2402.14740), section 3.2. The leave-one-out baseline, after Kool et al. (2019), is the
    advantage's. On policy the ratio is 1 and the gradient that of REINFORCE, -A grad log p(sequence). The log
    of the ratio is clamped to +-20 nats.
    """

    normalization: Normalization = "sequence_mean"
    """What the sum over tokens is divided by."""

    def ratios(self, tokens: PolicyTokens) -> Tensor:
        """[T] 1 where not valid."""
        return tokens.sequence_ratios(mean=False)
