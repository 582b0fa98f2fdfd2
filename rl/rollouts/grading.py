"""Rollouts with their scores and advantages, in the groups they were drawn in.

Shape legend: P prompts of a step, G samples of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rl.types import Rollout, Score


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GradedRollout:
    """One rollout with its score and its advantage."""

    rollout: Rollout
    score: Score
    advantage: float


def grade(
    groups: Sequence[Sequence[Rollout]],
    scores: Sequence[Score],
    *,
    advantage: Callable[[np.ndarray], np.ndarray],
) -> list[list[GradedRollout]]:
    """[P][<=G]: rollouts whose score failed are left out, before the group's mean is taken.

    Args:
        scores: of all rollouts, one group after another.
        advantage: rewards [G] to advantages [G].
    """
    remaining = iter(scores)
    graded_PG = []
    for group in groups:
        pairs = [(rollout, next(remaining)) for rollout in group]
        pairs = [(rollout, score) for rollout, score in pairs if score.failure is None]
        advantages_G = advantage(np.array([score.reward for _, score in pairs])) if pairs else ()
        graded_PG.append(
            [
                GradedRollout(rollout=r, score=s, advantage=float(a))
                for (r, s), a in zip(pairs, advantages_G, strict=True)
            ]
        )
    return graded_PG


def teaches_nothing(group_G: Sequence[GradedRollout]) -> bool:
    """Whether the group has no policy gradient: equal rewards, or none."""
    return all(g.advantage == 0 for g in group_G)
