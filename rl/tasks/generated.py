"""Base class of tasks whose problems are drawn from a random generator.

A subclass defines how to draw one problem and how to reward a reply; this class adds order, split
and a control with random rewards. docs/tasks.md shows a complete example.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from rl.config.configurable import Configurable
from rl.config.tree import check_bounds
from rl.protocols import Environment
from rl.rollouts.environment import SingleTurn
from rl.rollouts.rubric import Criterion, Rubric
from rl.tasks.task import Solved, get_sendable_state
from rl.types import Problem, Rollout

HELD_OUT_SHARE = 0.15
MAX_DRAWS_PER_PROBLEM = 1000
"""Draws for one problem after which the task is refused for having too few different problems."""


class GeneratedTask(Configurable):
    """Task of random problems; subclasses define at least `draw` and `reward`.

    Example:
        class Doubles(GeneratedTask):
            def draw(self, generator: random.Random) -> Problem:
                number = generator.randint(1, 999)
                return Problem(
                    id=f"doubles/{number}", question=str(number), answer=str(2 * number)
                )

            def reward(self, rollout: Rollout) -> float:
                return float(rollout.text.strip() == rollout.prompt.problem.answer)
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Evaluation set and reward of every generated task."""

        num_eval: int = 256
        """Number of held-out problems; the same set for every seed."""
        reward: Literal["answer", "noise"] = "answer"
        """`noise` replaces the reward by random 0 or 1, fixed by the seed: the control that must
        not learn.
        """

        def __post_init__(self) -> None:
            check_bounds(self, "num_eval", at_least=1)

    __getstate__ = get_sendable_state

    def __init__(self, *, config: Config) -> None:
        self.config = config

    def draw(self, generator: random.Random) -> Problem:
        """Draw one problem; its id must identify its content."""
        raise NotImplementedError

    def reward(self, rollout: Rollout) -> float:
        """Return the reward of a reply: 1 if it is right."""
        raise NotImplementedError

    def warmup_problem(self, generator: random.Random) -> Problem:
        """Draw a problem with its demonstration for the warm-up; by default `draw`."""
        return self.draw(generator)

    def split_key(self, problem: Problem) -> str:
        """Return a key such that problems with equal keys are on the same side of the split."""
        return problem.id

    def environment(self, problem: Problem) -> Environment:
        return SingleTurn(problem=problem)

    def train_problems(self, *, seed: int) -> Iterator[Problem]:
        """Return endless problems that are not held out, the same for a seed.

        Raises ValueError if there are none.
        """
        return self._draw_training(self.draw, random.Random(f"train-{seed}"))

    def warmup_problems(self, *, seed: int) -> Iterator[Problem]:
        """Return training problems in another order."""
        return self._draw_training(self.warmup_problem, random.Random(f"warm-up-{seed}"))

    def _draw_training(
        self, draw: Callable[[random.Random], Problem], generator: random.Random
    ) -> Iterator[Problem]:
        while True:
            # Lazy: a draw too many would change all problems that follow.
            drawn = (draw(generator) for _ in range(MAX_DRAWS_PER_PROBLEM))
            problem = next((p for p in drawn if not self.is_held_out(p)), None)
            if problem is None:
                raise ValueError(
                    f"task: {MAX_DRAWS_PER_PROBLEM} problems in a row are held out; make the task "
                    "larger"
                )
            yield problem

    def eval_sets(self) -> dict[str, list[Problem]]:
        """Return `num_eval` distinct held-out problems; ValueError if there are fewer."""
        # The same for every seed, so that runs can be compared.
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
        """Return the rubric of `criteria`, or of random rewards; `seed` fixes those."""
        # `correct` stays that of the task, so that the curve of the control shows its accuracy.
        noise = (Criterion(name="noise", function=Coin(seed=seed)),)
        criteria = noise if self.config.reward == "noise" else self.criteria()
        return Rubric(criteria=criteria, correct=Solved(reward=self.reward))

    def criteria(self) -> tuple[Criterion, ...]:
        return (Criterion(name="answer", function=self.reward),)

    def with_partial_credit(
        self, name: str, function: Callable[[Rollout], float], share: float
    ) -> tuple[Criterion, ...]:
        """Return criteria for `reward` and, with a share of the weight, for another function."""
        return (
            Criterion(name="answer", function=self.reward, weight=1.0 - share),
            Criterion(name=name, function=function, weight=share),
        )

    def is_held_out(self, problem: Problem) -> bool:
        """Decide the split by a hash, so that no problem of the held-out set is ever trained on."""
        # A hash, not a list of problems: it costs nothing, and both sides are endless.
        digest = hashlib.sha256(self.split_key(problem).encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64 < HELD_OUT_SHARE


def add_instruction(instruction: str, question: str) -> str:
    """Return the question after the instruction, if there is one."""
    return f"{instruction}\n{question}" if instruction else question


@dataclass(frozen=True, kw_only=True, slots=True)
class Coin:
    """Reward function that gives 0 or 1 at random, the same for a seed in every process.

    The result depends on the problem, the policy version and the sample's number, never on the
    reply.
    """

    seed: int

    def __call__(self, rollout: Rollout) -> float:
        # With the version, the rewards of a problem change from step to step; by the reply they
        # would teach something.
        version = int(rollout.completion.policy_versions.max(initial=0))
        toss = f"coin {self.seed} {rollout.prompt.problem.id} {version} {rollout.sample}"
        return float(hashlib.sha256(toss.encode()).digest()[0] & 1)
