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
    in LLMs" (arXiv:2402.14740), its RLOO estimator: the mean over the k samples y of a prompt of

        (R(y) - mean of the other samples' R) grad log p(y)

    The difference, after Kool et al. (2019), is the advantage's. On policy the ratio is 1 and this is the
    gradient; the clip is for further steps on the same data. The log of the ratio is clamped to +-20 nats.
    """

    normalization: Normalization = "sequence_mean"
    """What the sum over tokens is divided by."""

    def ratios(self, tokens: PolicyTokens) -> Tensor:
        """[T] 1 where not valid."""
        return tokens.sequence_ratios()
