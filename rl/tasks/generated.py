"""Tasks whose problems are drawn from a random generator: what all of them share.

A task of this kind says how one problem is drawn and what a reply to it earns; order, split and control are
done here. docs/tasks.md shows a whole one.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from rl.config.configurable import Configurable
from rl.protocols import Environment
from rl.rollouts.environment import SingleTurn
from rl.rollouts.rubric import Criterion, Rubric
from rl.types import Problem, Rollout

HELD_OUT_SHARE = 0.15
MAX_DRAWS_PER_PROBLEM = 1000
"""Draws for one, until a task is said to have too few different problems."""


class GeneratedTask(Configurable):
    """Subclasses define `draw` and `reward`, or more."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        num_eval: int = 256
        """Held-out problems; the same set for every seed."""
        reward: Literal["answer", "noise"] = "answer"
        """`noise` tosses a coin for 0 or 1, the same for a seed: the control that must not learn."""

        def __post_init__(self) -> None:
            if self.num_eval < 1:
                raise ValueError(f"num_eval={self.num_eval} is less than 1")

    def __init__(self, *, config: Config) -> None:
        self.config = config

    def draw(self, generator: random.Random) -> Problem:
        """One problem; its id says all that makes it this one."""
        raise NotImplementedError

    def reward(self, rollout: Rollout) -> float:
        """What a reply earns: 1 where it is right."""
        raise NotImplementedError

    def warmup_problem(self, generator: random.Random) -> Problem:
        """A problem with the demonstration that a warm-up uses; by default that of `draw`."""
        return self.draw(generator)

    def split_key(self, problem: Problem) -> str:
        """Problems with the same key are on the same side of the split."""
        return problem.id

    def environment(self, problem: Problem) -> Environment:
        return SingleTurn(problem=problem)

    def train_problems(self, *, seed: int) -> Iterator[Problem]:
        """Endless problems, none of them held out; the same for a seed.

        Raises:
            ValueError: there are none.
        """
        return self._not_held_out(self.draw, random.Random(f"train-{seed}"))

    def warmup_problems(self, *, seed: int) -> Iterator[Problem]:
        """As `train_problems`, in another order."""
        return self._not_held_out(self.warmup_problem, random.Random(f"warm-up-{seed}"))

    def _not_held_out(
        self, draw: Callable[[random.Random], Problem], generator: random.Random
    ) -> Iterator[Problem]:
        while True:
            drawn = (draw(generator) for _ in range(MAX_DRAWS_PER_PROBLEM))
            problem = next((p for p in drawn if not self.is_held_out(p)), None)
            if problem is None:
                raise ValueError(
                    f"task: {MAX_DRAWS_PER_PROBLEM} problems in a row are held out, so none is left for "
                    "training; let there be more different ones"
                )
            yield problem

    def eval_sets(self) -> dict[str, list[Problem]]:
        """`num_eval` distinct held-out problems.

        Raises:
            ValueError: there are fewer.
        """
        generator = random.Random("eval")
        problems: dict[str, Problem] = {}
        for _ in range(MAX_DRAWS_PER_PROBLEM * self.config.num_eval):
            problem = self.draw(generator)
            if self.is_held_out(problem):
                problems[problem.id] = problem
            if len(problems) == self.config.num_eval:
                return {"held_out": list(problems.values())}
        raise ValueError(
            f"num_eval={self.config.num_eval}: only {len(problems)} held-out problems were found"
        )

    def rubric(self, *, seed: int) -> Rubric:
        if self.config.reward == "noise":
            return Rubric(
                criteria=(Criterion(name="noise", function=Coin(seed=seed)),), correct=self.is_correct
            )
        return Rubric(criteria=(Criterion(name="answer", function=self.reward),), correct=self.is_correct)

    def is_correct(self, rollout: Rollout) -> bool:
        return self.reward(rollout) >= 1.0

    def is_held_out(self, problem: Problem) -> bool:
        """By a hash: no problem of the held-out set is ever trained on."""
        digest = hashlib.sha256(self.split_key(problem).encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64 < HELD_OUT_SHARE


@dataclass(frozen=True, kw_only=True, slots=True)
class Coin:
    """A reward of 0 or 1 by chance, the same for a seed in whichever process it is tossed.

    It is tossed before the reply is read: for the problem, the policy version and the sample's
    number. So no reply is one that wins, and equal replies of a group toss a coin each.
    """

    seed: int

    def __call__(self, rollout: Rollout) -> float:
        version = int(rollout.completion.policy_versions.max(initial=0))
        toss = f"coin {self.seed} {rollout.prompt.problem.id} {version} {rollout.sample}"
        return float(hashlib.sha256(toss.encode()).digest()[0] & 1)
