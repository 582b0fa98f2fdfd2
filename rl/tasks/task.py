"""What a task gives to a run: problems, their split, and how replies are graded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from rl.rollouts.rubric import Rubric
from rl.types import Problem


class Task(Protocol):
    def train_problems(self, *, seed: int) -> Iterator[Problem]:
        """Endless, disjoint from `eval_problems`, the same for a seed."""
        ...

    def warmup_problems(self, *, seed: int) -> Iterator[Problem]:
        """Endless, disjoint from `eval_problems`, each with a demonstration; for a supervised warm-up."""
        ...

    def eval_problems(self) -> list[Problem]:
        """A fixed held-out set, the same for every seed."""
        ...

    def rubric(self, *, seed: int) -> Rubric:
        """How replies are graded; one that draws by chance draws the same for a seed."""
        ...
