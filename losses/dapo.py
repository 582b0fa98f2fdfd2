"""Decoupled clip and dynamic sampling policy optimisation."""

from __future__ import annotations

from dataclasses import dataclass

from losses.ppo import PPOLoss


@dataclass(kw_only=True, slots=True)
class DAPOLoss(PPOLoss):
    """PPO's surrogate with a higher upper bound, averaged over all valid tokens of a step.

    Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (arXiv:2503.14476),
    equation 8: the bounds are its section 3.1, the mean over tokens 3.3. Its other two parts are dynamic
    sampling (loop.equal_groups "drop") and the soft overlong punishment (`rl.rollouts.overlong`).
    """

    clip_high: float = 0.28
    """The ratio stops paying above 1 + clip_high, for positive advantages."""
