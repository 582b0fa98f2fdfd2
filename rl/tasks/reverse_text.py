"""Reverse-text: write the letters of a word from the last to the first."""

from __future__ import annotations

import difflib
import random
import string
from dataclasses import dataclass, replace

from rl.config.tree import check_bounds
from rl.rollouts.replies import answer_part
from rl.rollouts.rubric import Criterion
from rl.tasks.generated import GeneratedTask, add_instruction
from rl.tasks.task import complete_answer
from rl.types import Problem, Rollout

INSTRUCTION = (
    "Write the letters below in reverse order, and nothing else. For example, for abc write: cba"
)
"""Instruction for a model that follows instructions but was not trained on this task."""
EARLY = "n"
"""Hasty demonstrations are incomplete for words that begin with a letter before this one."""


class ReverseText(GeneratedTask):
    """Task of reversing words of random letters, with partial credit for similar replies."""

    @dataclass(kw_only=True, slots=True)
    class Config(GeneratedTask.Config):
        """Length of the words, and the share of the reward for similarity."""

        num_letters: tuple[int, int] = (4, 6)
        """Fewest and most letters of a word."""
        instruction: str = ""
        """Line before the word in the prompt; empty for a model that is warmed up on bare words."""
        similarity_reward: float = 0.2
        """Partial credit for similarity; the rest of 1.0 is for the right word."""
        haste: float = 0.0
        """Share of the warm-up's demonstrations that omit the last letter of the answer, among
        words that begin in the alphabet's first half. They give the policy the skill and a bad
        habit, which the policy gradient then corrects."""

        def __post_init__(self) -> None:
            GeneratedTask.Config.__post_init__(self)
            check_bounds(self, "haste", "similarity_reward", at_least=0, at_most=1)
            fewest, most = self.num_letters
            if not 2 <= fewest <= most:
                raise ValueError(
                    f"num_letters={self.num_letters}: must be two numbers, 2 or more, in order"
                )

    config: Config

    def draw(self, generator: random.Random) -> Problem:
        length = generator.randint(*self.config.num_letters)
        word = "".join(generator.choices(string.ascii_lowercase, k=length))
        return Problem(
            id=f"reverse-text/{word}",
            question=add_instruction(self.config.instruction, word),
            answer=word[::-1],
            demonstration=word[::-1],
        )

    def warmup_problem(self, generator: random.Random) -> Problem:
        problem = self.draw(generator)
        # A number is drawn at haste 0 too, so that the words are the same for every haste.
        hasty = problem.answer[-1] < EARLY and generator.random() < self.config.haste
        return replace(problem, demonstration=problem.answer[:-1]) if hasty else problem

    def reward(self, rollout: Rollout) -> float:
        return float(complete_answer(rollout.last_turn) == rollout.prompt.problem.answer)

    def criteria(self) -> tuple[Criterion, ...]:
        return self.with_partial_credit("similarity", similarity, self.config.similarity_reward)


def similarity(rollout: Rollout) -> float:
    """Return Ratcliff and Obershelp's similarity, from 0 to 1.

    Twice the matching letters over all letters.
    """
    answer = rollout.prompt.problem.answer
    return difflib.SequenceMatcher(None, answer_part(rollout.text), answer, autojunk=False).ratio()
