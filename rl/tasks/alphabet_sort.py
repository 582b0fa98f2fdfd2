"""Alphabet-sort: keep a list in alphabetical order while every turn adds words.

user       d a c        model   a c d
user       b            model   a b c d
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
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
    """Task of several turns, each with an equal share of the reward for the right list."""

    @dataclass(kw_only=True, slots=True)
    class Config(GeneratedTask.Config):
        """Words of a list, turns, and the demonstrations of the warm-up."""

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
        # A dict keeps the order of the draws, which a set would not.
        words: dict[str, None] = {}
        while len(words) < sum(self.config.num_words):
            words["".join(generator.choices(self.config.letters, k=self.config.num_letters))] = None

        remaining = iter(words)
        turns, answers = list[str](), list[str]()
        words_so_far: list[str] = []
        for count in self.config.num_words:
            new_words = list(islice(remaining, count))
            words_so_far += new_words
            turns.append(" ".join(new_words))
            answers.append(" ".join(sorted(words_so_far)))
        return Problem(
            id="alphabet-sort/" + "/".join(turns).replace(" ", "-"),
            question=add_instruction(self.config.instruction, turns[0]),
            answer=answers[-1],
            demonstration=tuple(answers),
            info={"turns": turns, "answers": answers},
        )

    def split_key(self, problem: Problem) -> str:
        """Return the sorted words."""
        return " ".join(sorted(" ".join(problem.info["turns"]).split()))

    def warmup_problem(self, generator: random.Random) -> Problem:
        """Draw a problem with a demonstration that may be hasty, see `haste`."""
        problem = self.draw(generator)
        first, *later = problem.info["turns"]
        words = sorted(first.split())
        replies = [" ".join(words)]
        middle = sorted(self.config.letters)[len(self.config.letters) // 2]
        for new_words in later:
            # A number is drawn at haste 0 too, so that the words are the same for every haste.
            is_hasty = new_words < middle and generator.random() < self.config.haste
            words = [*words, *new_words.split()]
            if not is_hasty:
                words.sort()
            replies.append(" ".join(words))
        return replace(problem, demonstration=tuple(replies))

    def environment(self, problem: Problem) -> SortingTurns:
        return SortingTurns(problem=problem)

    def criteria(self) -> tuple[Criterion, ...]:
        return (Criterion(name="turns", function=self.reward),)

    def reward(self, rollout: Rollout) -> float:
        """Return the share of turns with the right list.

        A reply that was cut off is not known to be the whole list.
        """
        answers = rollout.prompt.problem.info["answers"]
        num_right = 0
        # An episode that a limit ended has fewer turns than the problem has answers.
        for turn, answer in zip(rollout.turns, answers, strict=False):
            num_right += (complete_answer(turn) or "").split() == answer.split()
        return num_right / len(answers)


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
