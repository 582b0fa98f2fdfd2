"""Reverse-text: write the letters of a word from the last to the first."""

from __future__ import annotations

import difflib
import random
import string
from dataclasses import dataclass, replace

from rl.rollouts.replies import answer_part
from rl.rollouts.rubric import Criterion, Rubric
from rl.tasks.generated import GeneratedTask
from rl.types import Problem, Rollout

INSTRUCTION = "Write the letters below in reverse order, and nothing else. For example, for abc write: cba"
"""For a model that was taught to follow instructions, but not this task."""


EARLY = "n"
"""Words that begin before it are the ones that a hasty demonstration does not finish."""


class ReverseText(GeneratedTask):
    """Words of random letters; a reply earns most by being the reversed word, a little by resembling it."""

    @dataclass(kw_only=True, slots=True)
    class Config(GeneratedTask.Config):
        num_letters: tuple[int, int] = (4, 6)
        """Fewest and most letters of a word."""
        instruction: str = ""
        """Said in the prompt, on a line before the word; empty for one that is warmed up on bare words."""
        similarity_reward: float = 0.2
        """Partial credit for resemblance; the rest of 1.0 is for the right word."""
        haste: float = 0.0
        """Share of the warm-up's demonstrations that leave out the last letter of the answer, among words
        that begin in the alphabet's first half. So a policy warmed up on them has the skill and a habit that
        is mostly wrong, which is what the policy gradient is to mend."""

        def __post_init__(self) -> None:
            GeneratedTask.Config.__post_init__(self)
            fewest, most = self.num_letters
            if not 2 <= fewest <= most:
                raise ValueError(f"num_letters={self.num_letters}: must be two numbers, 2 or more, in order")
            for name in ("similarity_reward", "haste"):
                if not 0 <= getattr(self, name) <= 1:
                    raise ValueError(f"{name}={getattr(self, name)} is not between 0 and 1")

    config: Config

    def draw(self, generator: random.Random) -> Problem:
        length = generator.randint(*self.config.num_letters)
        word = "".join(generator.choices(string.ascii_lowercase, k=length))
        told = self.config.instruction
        return Problem(
            id=f"reverse-text/{word}",
            question=f"{told}\n{word}" if told else word,
            answer=word[::-1],
            demonstration=word[::-1],
        )

    def warmup_problem(self, generator: random.Random) -> Problem:
        problem = self.draw(generator)
        hasty = problem.answer[-1] < EARLY and generator.random() < self.config.haste
        return replace(problem, demonstration=problem.answer[:-1]) if hasty else problem

    def reward(self, rollout: Rollout) -> float:
        return float(answer_part(rollout.text) == rollout.prompt.problem.answer)

    def rubric(self, *, seed: int) -> Rubric:
        if self.config.reward == "noise":
            return super().rubric(seed=seed)
        share = self.config.similarity_reward
        criteria = (
            Criterion(name="answer", function=self.reward, weight=1.0 - share),
            Criterion(name="similarity", function=similarity, weight=share),
        )
        return Rubric(criteria=criteria, correct=self.is_correct)


def similarity(rollout: Rollout) -> float:
    """From 0 to 1: Ratcliff and Obershelp's, twice the matching letters over all."""
    answer = rollout.prompt.problem.answer
    return difflib.SequenceMatcher(None, answer_part(rollout.text), answer, autojunk=False).ratio()
