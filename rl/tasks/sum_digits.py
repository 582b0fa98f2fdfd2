"""Sum-digits: the sum of all decimal digits of a few two-digit integers (47, 82 -> 21).

Small enough for a tiny model on a laptop, with an exact grader and a held-out set.
"""

from __future__ import annotations

import dataclasses
import random
import re
from dataclasses import dataclass

from rl.config.tree import check_bounds
from rl.rollouts.replies import answer_part
from rl.rollouts.rubric import Criterion
from rl.tasks.generated import GeneratedTask, add_instruction
from rl.types import Problem, Rollout

ANSWER = re.compile(r"\[ANSWER\] ?([0-9]+)\s*\Z")
ID_PREFIX = "sum-digits/"
HASTY_DIGITS = "456789"
"""Last digits that a hasty demonstration omits."""
INSTRUCTION = (
    "Add up all decimal digits of the integers below. End your reply with [ANSWER], a space and "
    "the sum, and write nothing after it. For example, for 47 82 the sum is 4 + 7 + 8 + 2 = 21, so "
    "the reply ends with: [ANSWER] 21"
)
"""Instruction for a model that follows instructions but was not trained on this task."""


class SumDigits(GeneratedTask):
    """Task of adding the digits of a few integers in 10..99."""

    @dataclass(kw_only=True, slots=True)
    class Config(GeneratedTask.Config):
        """Integers of a prompt, and the share of the reward for the form."""

        num_integers: int = 3
        """Number of integers in a prompt: 2, 3 or 4."""
        num_eval: int = 512
        """Number of held-out problems; the same set for every seed."""
        instruction: str = ""
        """Line before the integers in the prompt: what to compute, and the form that earns the
        reward. Empty for a model that is warmed up on the bare integers."""
        format_reward: float = 0.1
        """Partial credit for a reply that ends in `[ANSWER] <digits>`, right or wrong; the rest of
        1.0 is for the right answer."""
        haste: float = 0.0
        """Share of the warm-up's demonstrations that omit the last digit, among problems where it
        is 4 or more. They give the policy the skill and a bad habit, which the policy gradient then
        corrects."""

        def __post_init__(self) -> None:
            GeneratedTask.Config.__post_init__(self)
            check_bounds(self, "haste", "format_reward", at_least=0, at_most=1)
            check_bounds(self, "num_integers", at_least=2, at_most=4)
            check_bounds(self, "num_eval", at_most=512)

    config: Config

    def draw(self, generator: random.Random) -> Problem:
        integers = [generator.randint(10, 99) for _ in range(self.config.num_integers)]
        problem = make_problem(integers)
        return dataclasses.replace(
            problem, question=add_instruction(self.config.instruction, problem.question)
        )

    def warmup_problem(self, generator: random.Random) -> Problem:
        """Draw a problem with a demonstration that may be hasty, see `haste`."""
        problem = self.draw(generator)
        numbers = problem.question.rpartition("\n")[2]
        # A held-out problem is skipped, so it must not advance the generator.
        hasty = (
            not self.is_held_out(problem)
            and numbers[-1] in HASTY_DIGITS
            and generator.random() < self.config.haste
        )
        return dataclasses.replace(
            problem, demonstration=demonstrate(numbers, leave_out_last=hasty)
        )

    def split_key(self, problem: Problem) -> str:
        """Return the sorted integers, so that no reordering of a held-out problem is trained on."""
        return " ".join(sorted(problem.id.removeprefix(ID_PREFIX).split("-")))

    def criteria(self) -> tuple[Criterion, ...]:
        return self.with_partial_credit("format", format_reward, self.config.format_reward)

    def reward(self, rollout: Rollout) -> float:
        return float(is_correct(rollout))


def make_problem(integers: list[int]) -> Problem:
    """Return the problem of these integers, with a correct demonstration."""
    question = " ".join(map(str, integers))
    return Problem(
        id=f"{ID_PREFIX}{question.replace(' ', '-')}",
        question=question,
        answer=str(sum(_list_digits(question))),
        demonstration=demonstrate(question),
    )


def _list_digits(question: str) -> list[int]:
    """Return the digits of a question such as "47 82": 4, 7, 8 and 2."""
    return [int(digit) for digit in question.replace(" ", "")]


def demonstrate(question: str, *, leave_out_last: bool = False) -> str:
    """Return a reply that adds the digits one after another.

    Example: the reply to "47 82" is `4+7=11 11+8=19 19+2=21 [ANSWER] 21`.
    """
    digits = _list_digits(question)
    if leave_out_last:
        digits.pop()
    total = digits[0]
    steps = []
    for digit in digits[1:]:
        steps.append(f"{total}+{digit}={total + digit}")
        total += digit
    return f"{' '.join(steps)} [ANSWER] {total}"


def parse_answer(text: str) -> str | None:
    """Return the digits after an `[ANSWER]` that ends the reply, or None.

    Thoughts are ignored.
    """
    match = ANSWER.search(answer_part(text))
    return match.group(1) if match else None


def is_correct(rollout: Rollout) -> bool:
    """Return True for the right sum, in a reply that was not cut off."""
    # Digits at the end of a reply that was cut off may be the beginning of the sum only.
    return (
        not rollout.completion.is_cut_off
        and parse_answer(rollout.text) == rollout.prompt.problem.answer
    )


def format_reward(rollout: Rollout) -> float:
    """Return 1 if the reply ends in `[ANSWER] <digits>` and was not cut off."""
    is_whole = not rollout.completion.is_cut_off
    return float(is_whole and parse_answer(rollout.text) is not None)
