"""Alphabet-sort: keep a list in alphabetical order while every turn adds words.

user       d a c        model   a c d
user       b            model   a b c d
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from typing import ClassVar

from rl.config.tree import check_bounds
from rl.rollouts.rubric import Criterion
from rl.tasks.generated import GeneratedTask, add_instruction
from rl.tasks.task import complete_answer
from rl.types import Message, Observation, Problem, Reply, Rollout

INSTRUCTION = (
    "Sort the words below alphabetically, and reply with the sorted words alone, separated by "
    "spaces. In later turns more words come: reply with all words until then, sorted."
)
"""Instruction for a model that follows instructions but was not trained on this task."""


class AlphabetSort(GeneratedTask):
    """Task of several turns, each of which gives an equal share of the reward for the right
    list.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GeneratedTask.Config):
        num_words: tuple[int, ...] = (3, 1, 1)
        """Number of new words in each turn."""
        num_letters: int = 1
        """Length of a word."""
        letters: str = string.ascii_lowercase
        """Letters of the words; fewer are easier to sort."""
        instruction: str = ""
        """Text before the first words; empty for a model that is warmed up on bare words."""
        haste: float = 0.0
        """Share of the warm-up's later turns that append new words without sorting them in, among
        words that begin in the first half of `letters`. They give the policy the skill and a bad
        habit, which the policy gradient then corrects."""

        def __post_init__(self) -> None:
            GeneratedTask.Config.__post_init__(self)
            check_bounds(self, "haste", at_least=0, at_most=1)
            if not self.num_words or min(self.num_words) < 1:
                raise ValueError(
                    f"num_words={self.num_words}: must be a number of at least 1 for each turn"
                )
            if self.num_letters < 1 or sum(self.num_words) > len(self.letters) ** self.num_letters:
                num = sum(self.num_words)
                raise ValueError(
                    f"num_letters={self.num_letters}: must be at least 1, enough for {num} "
                    "different words"
                )
            letters = self.letters
            if len(set(letters)) < max(2, len(letters)) or not letters.isalpha():
                raise ValueError(f"letters={letters!r}: must be different letters")

    config: Config

    def draw(self, generator: random.Random) -> Problem:
        words: dict[str, None] = {}
        while len(words) < sum(self.config.num_words):
            words["".join(generator.choices(self.config.letters, k=self.config.num_letters))] = None
        drawn = iter(words)
        turns = [list(islice(drawn, count)) for count in self.config.num_words]
        answers = [" ".join(sorted(so_far)) for so_far in accumulate(turns)]
        return Problem(
            id="alphabet-sort/" + "/".join("-".join(turn) for turn in turns),
            question=add_instruction(self.config.instruction, " ".join(turns[0])),
            answer=answers[-1],
            demonstration=tuple(answers),
            info={"turns": [" ".join(turn) for turn in turns], "answers": answers},
        )

    def split_key(self, problem: Problem) -> str:
        """Return the sorted words."""
        return " ".join(sorted(" ".join(problem.info["turns"]).split()))

    def warmup_problem(self, generator: random.Random) -> Problem:
        """Draw a problem with a demonstration that may be hasty, see `haste`."""
        problem = self.draw(generator)
        first, *later = problem.info["turns"]
        lists = [sorted(first.split())]
        middle = sorted(self.config.letters)[len(self.config.letters) // 2]
        for words in later:
            hasty = words < middle and generator.random() < self.config.haste
            lists.append(
                [*lists[-1], *words.split()] if hasty else sorted([*lists[-1], *words.split()])
            )
        return replace(problem, demonstration=tuple(" ".join(words) for words in lists))

    def environment(self, problem: Problem) -> SortingTurns:
        return SortingTurns(problem=problem)

    def criteria(self) -> tuple[Criterion, ...]:
        return (Criterion(name="turns", function=self.reward),)

    def reward(self, rollout: Rollout) -> float:
        """Return the share of turns with the right list; one that was cut off is not known to be
        the whole list.
        """
        answers = rollout.prompt.problem.info["answers"]
        right = [
            (complete_answer(turn) or "").split() == answer.split()
            for turn, answer in zip(rollout.turns, answers, strict=False)
        ]
        return sum(right) / len(answers)


@dataclass(kw_only=True, slots=True)
class SortingTurns:
    """Environment that gives the words of each turn."""

    runs_inline: ClassVar[bool] = True

    problem: Problem
    num_replies: int = field(default=0, init=False)

    @property
    def single_turn(self) -> bool:
        return len(self.problem.info["turns"]) == 1

    def opening(self) -> Sequence[Message]:
        return (Message(role="user", content=self.problem.question),)

    async def step(self, reply: Reply) -> Observation:
        turns = self.problem.info["turns"]
        self.num_replies += 1
        if self.num_replies == len(turns):
            return Observation()
        return Observation(messages=(Message(role="user", content=turns[self.num_replies]),))

    async def close(self) -> None:
        pass
