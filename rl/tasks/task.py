"""The protocol of a task: problems, their split, environments and rubric.

A new task usually subclasses `GeneratedTask` (problems drawn at random) or `DatasetTask` (rows of files), and
overrides two methods. Any object with these five methods will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rl.protocols import Environment
from rl.rollouts.rubric import Rubric, UnparsedAnswer
from rl.types import Problem, Rollout


class Task(Protocol):
    """Everything that a run needs to know of its task."""

    def train_problems(self, *, seed: int) -> Iterator[Problem]:
        """Return endless training problems, disjoint from `eval_sets`, the same for a seed."""
        ...

    def warmup_problems(self, *, seed: int) -> Iterator[Problem]:
        """Return endless problems with demonstrations for a supervised warm-up, disjoint from `eval_sets`."""
        ...

    def eval_sets(self) -> Mapping[str, Sequence[Problem]]:
        """Return fixed held-out sets by name, the same for every seed; a run's curve shows the first."""
        ...

    def environment(self, problem: Problem) -> Environment:
        """Return a new environment for one episode of a problem."""
        ...

    def rubric(self, *, seed: int) -> Rubric:
        """Return the rubric that grades rollouts; `seed` fixes random rewards."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Solved:
    """Correctness: True if a reward function gives at least `at`; a reply without an answer is wrong."""

    reward: Callable[[Rollout], float]
    at: float = 1.0

    def __call__(self, rollout: Rollout) -> bool:
        try:
            return self.reward(rollout) >= self.at
        except UnparsedAnswer:
            return False
