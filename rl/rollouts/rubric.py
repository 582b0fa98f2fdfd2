"""Rewards: a rubric is a weighted sum of reward functions over one rollout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rl.types import Rollout, Score

RewardFn = Callable[[Rollout], float]


class UnparsedAnswer(Exception):  # noqa: N818  (an outcome, not a fault)
    """Raised by a reward function that finds no answer in the reply; `value` is what such a reply gets."""

    def __init__(self, message: str = "", *, value: float = 0.0) -> None:
        super().__init__(message)
        self.value = value


@dataclass(frozen=True, kw_only=True, slots=True)
class Criterion:
    """One reward function and what it counts for."""

    name: str
    function: RewardFn
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"criterion {self.name!r}: weight={self.weight} is not a finite number")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rubric:
    """Scores a rollout by its criteria; picklable if the functions are module-level.

    `correct` tells whether the answer is right, whatever the reward's shaping.
    """

    criteria: tuple[Criterion, ...]
    correct: Callable[[Rollout], bool]

    def score(self, rollout: Rollout) -> Score:
        """The score of one rollout. A criterion or `correct` that raises, and a reward that is not
        finite, is a failed score, never a silent zero: it says which, on which problem, and why."""
        parts: dict[str, float] = {}
        for criterion in self.criteria:
            try:
                value = float(criterion.function(rollout))
            except Exception as error:  # noqa: BLE001  (a user's function)
                return failed_score(f"reward {criterion.name!r} raised {error!r}", rollout=rollout)
            if not math.isfinite(value):
                return failed_score(
                    f"reward {criterion.name!r} is {value}, not a finite number", rollout=rollout
                )
            parts[criterion.name] = value
        reward = sum(c.weight * parts[c.name] for c in self.criteria)
        if not math.isfinite(reward):
            return failed_score(f"weighted reward is {reward}, not a finite number", rollout=rollout)
        try:
            correct = bool(self.correct(rollout))
        except Exception as error:  # noqa: BLE001  (a user's function)
            return failed_score(f"correct raised {error!r}", rollout=rollout)
        return Score(reward=reward, correct=correct, parts=parts)


def failed_score(reason: str, *, rollout: Rollout) -> Score:
    """A score that says why there is none; its rollout is not trained on."""
    where = f"on problem {rollout.prompt.problem.id!r}, completion {rollout.text!r}"
    return Score(reward=0.0, correct=False, failure=f"{reason} {where}")
