"""GRPO done right."""

from __future__ import annotations

from dataclasses import dataclass

from losses.normalization import Normalization
from losses.ppo import PPOLoss


@dataclass(kw_only=True, slots=True)
class DrGRPOLoss(PPOLoss):
    """PPO's surrogate, divided by sequences times `tokens_per_sequence`, however long they are.

    Liu et al., "Understanding R1-Zero-Like Training: A Critical Perspective" (arXiv:2503.20783), section
    3.2: a mean over each sequence's own tokens makes long wrong answers cheap, so the sum is divided by a
    constant, the generation budget. Its other half, no division by the standard deviation, is the
    advantage's.
    """

    normalization: Normalization = "constant"
    """What the sum over tokens is divided by."""
