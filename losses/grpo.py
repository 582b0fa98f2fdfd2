"""Group-relative policy optimisation."""

from __future__ import annotations

from dataclasses import dataclass

from losses.ppo import PPOLoss


@dataclass(kw_only=True, slots=True)
class GRPOLoss(PPOLoss):
    """PPO's surrogate with advantages relative to a group, averaged over all valid tokens of a step.

    Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models"
    (arXiv:2402.03300), equation 3. There each sequence counts alike (`normalization` "sequence_mean") and
    `kl_coef` is 0.04 with k3; the defaults are DAPO's token mean, and no KL term.
    """
