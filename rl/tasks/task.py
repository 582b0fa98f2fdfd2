"""What a task gives to a run: problems, their split, how a model meets them, and how replies are graded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from rl.protocols import Environment
from rl.rollouts.rubric import Rubric
from rl.types import Problem


class Task(Protocol):
    def train_problems(self, *, seed: int) -> Iterator[Problem]:
        """Endless, disjoint from `eval_sets`, the same for a seed."""
        ...

    def warmup_problems(self, *, seed: int) -> Iterator[Problem]:
        """Endless, disjoint from `eval_sets`, each with a demonstration; for a supervised warm-up."""
        ...

    def eval_sets(self) -> Mapping[str, Sequence[Problem]]:
        """Fixed held-out sets by name, the same for every seed. The first is the one that a run's curve
        shows."""
        ...

    def environment(self, problem: Problem) -> Environment:
        """A new episode of a problem."""
        ...

    def rubric(self, *, seed: int) -> Rubric:
        """How replies are graded; one that draws by chance draws the same for a seed."""
        ...
