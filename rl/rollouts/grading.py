"""Rollouts with their scores, and what of their rewards belongs to which token.

Shape legend: G samples of a problem, C tokens that the model produced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl.types import Rollout, Score


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoredRollout:
    """A rollout that could be scored."""

    rollout: Rollout
    score: Score


def failure_of(rollout: Rollout, score: Score) -> str | None:
    """Why a rollout is neither trained on nor part of a mean."""
    return rollout.failure if score.failure is None else score.failure


def scored(rollouts: Sequence[Rollout], scores: Sequence[Score]) -> list[ScoredRollout]:
    """[<=G]: rollouts whose environment or whose score failed are left out."""
    pairs = zip(rollouts, scores, strict=True)
    whole = [(r, s) for r, s in pairs if failure_of(r, s) is None]
    return [ScoredRollout(rollout=r, score=s) for r, s in whole]


def equal_rewards(group_G: Sequence[ScoredRollout]) -> bool:
    """Whether no sample of the group did better than another, or there is none.

    By what the rubric gave, before the overlong punishment: DAPO's dynamic sampling (arXiv 2503.14476,
    equation 11) asks whether all replies, or none, are right.
    """
    return len({member.score.reward for member in group_G}) <= 1


def token_rewards(member: ScoredRollout, *, by_turn: bool) -> np.ndarray:
    """[C] float64: the reward, with the overlong punishment, at the last token; with `by_turn`, what the
    environment gave a reply at the last of its tokens, and the rest at the end."""
    rewards_C = np.zeros(member.rollout.num_completion_tokens, dtype=np.float64)
    rewards_C[-1] = member.score.reward + member.score.overlong
    if by_turn:
        ends = np.cumsum([len(turn.completion.token_ids) for turn in member.rollout.turns]) - 1
        for end, turn in zip(ends, member.rollout.turns, strict=True):
            rewards_C[end] += turn.observation.reward
            rewards_C[-1] -= turn.observation.reward
    return rewards_C
