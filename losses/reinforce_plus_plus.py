"""REINFORCE++, with and without a baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from losses.ppo import PPOLoss


@dataclass(kw_only=True, slots=True)
class ReinforcePlusPlusLoss(PPOLoss):
    """PPO's surrogate of advantages that are normalised over the whole batch.

    Hu et al., "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Normalization"
    (arXiv:2501.03262). What makes it is the advantage: of token t of a sample with reward R

        A_t = R - beta (sum of the KL penalties k1 from t on),  (A_t - mean) / std over the batch's tokens

    The form with a baseline takes the group's mean from R, divides by the batch's deviation, and has the KL
    in the loss, as k2.
    """

    kl_estimator: Literal["k1", "k2", "k3"] = "k2"
    """With d = p_ref - p: k1 is -d, k2 is d^2 / 2, k3 is exp(d) - 1 - d."""
