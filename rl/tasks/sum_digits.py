"""Sum-digits: the sum of all decimal digits of a few two-digit integers (47, 82 -> 21).

Small enough for a tiny model on a laptop, with an exact grader and a held-out set.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rl.config.configurable import Configurable
from rl.rollouts.environment import SingleTurn
from rl.rollouts.rubric import Criterion, Rubric
from rl.types import Problem, Rollout

ANSWER = re.compile(r"\[ANSWER\] ?(\d+)\s*\Z")
HELD_OUT_SHARE = 0.15
ID_PREFIX = "sum-digits/"
HASTY_DIGITS = "456789"
"""Last digits that a hasty demonstration leaves out."""
INSTRUCTION = (
    "Add up all decimal digits of the integers below. End your reply with [ANSWER], a space and the sum, "
    "and write nothing after it. For example, for 47 82 the sum is 4 + 7 + 8 + 2 = 21, so the reply ends "
    "with: [ANSWER] 21"
)
"""For a model that was taught to follow instructions, but not this task."""


class SumDigits(Configurable):
    """Prompts of a few integers in 10..99, their demonstrations and their rubric."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        num_integers: int = 3
        """Integers in a prompt: 2, 3 or 4."""
        num_eval: int = 512
        """Held-out problems; the same set for every seed."""
        instruction: str = ""
        """Said in the prompt, on a line before the integers: what to compute, and the form that earns
        the reward. Empty for a model that is warmed up on the bare integers."""
        format_reward: float = 0.1
        """Partial credit for a reply that ends in `[ANSWER] <digits>`, right or wrong; the rest of
        1.0 is for the right answer."""
        haste: float = 0.0
        """Share of the warm-up's demonstrations that leave out the last digit, among problems where
        it is 4 or more. So a policy warmed up on them has the skill and a habit that is mostly wrong,
        which is what the policy gradient is to mend."""
        reward: Literal["answer", "noise"] = "answer"
        """`noise` tosses a coin for 0 or 1, the same for a seed: the control that must not learn."""

        def __post_init__(self) -> None:
            if self.num_integers not in (2, 3, 4):
                raise ValueError(f"num_integers={self.num_integers} is not one of 2, 3, 4")
            if not 0 <= self.format_reward <= 1:
                raise ValueError(f"format_reward={self.format_reward} is not between 0 and 1")
            if not 0 <= self.haste <= 1:
                raise ValueError(f"haste={self.haste} is not between 0 and 1")
            if not 1 <= self.num_eval <= 512:
                raise ValueError(f"num_eval={self.num_eval} is not between 1 and 512")

    def __init__(self, *, config: Config) -> None:
        self.config = config

    def train_problems(self, *, seed: int) -> Iterator[Problem]:
        """Endless problems, none of them held out; the same for a seed."""
        drawn = self._draw(random.Random(f"train-{seed}"))
        return (self._ask(p) for p in drawn if not is_held_out(p))

    def warmup_problems(self, *, seed: int) -> Iterator[Problem]:
        """As `train_problems`, in another order, with the demonstrations of `haste`."""
        generator = random.Random(f"warm-up-{seed}")
        for problem in self._draw(generator):
            if not is_held_out(problem):
                hasty = problem.question[-1] in HASTY_DIGITS and generator.random() < self.config.haste
                text = demonstrate(problem.question, leave_out_last=hasty)
                yield self._ask(dataclasses.replace(problem, demonstration=text))

    def eval_sets(self) -> dict[str, list[Problem]]:
        """`num_eval` distinct held-out problems."""
        problems: dict[str, Problem] = {}
        for problem in self._draw(random.Random("eval")):
            if is_held_out(problem):
                problems[problem.id] = problem
            if len(problems) == self.config.num_eval:
                break
        return {"held_out": [self._ask(p) for p in problems.values()]}

    def environment(self, problem: Problem) -> SingleTurn:
        return SingleTurn(problem=problem)

    def rubric(self, *, seed: int) -> Rubric:
        """Reward 1.0 for the right answer, `format_reward` for the form alone; `seed` is of the noise."""
        if self.config.reward == "noise":
            return Rubric(criteria=(Criterion(name="noise", function=Coin(seed=seed)),), correct=is_correct)
        share = self.config.format_reward
        criteria = (
            Criterion(name="answer", function=_answer_reward, weight=1.0 - share),
            Criterion(name="format", function=format_reward, weight=share),
        )
        return Rubric(criteria=criteria, correct=is_correct)

    def _draw(self, generator: random.Random) -> Iterator[Problem]:
        while True:
            yield make_problem([generator.randint(10, 99) for _ in range(self.config.num_integers)])

    def _ask(self, problem: Problem) -> Problem:
        """The problem as the model is asked it."""
        if not self.config.instruction:
            return problem
        return dataclasses.replace(problem, question=f"{self.config.instruction}\n{problem.question}")


def make_problem(integers: list[int]) -> Problem:
    """The problem of these integers, with a right demonstration."""
    question = " ".join(map(str, integers))
    return Problem(
        id=f"{ID_PREFIX}{question.replace(' ', '-')}",
        question=question,
        answer=str(sum(int(digit) for digit in question if digit != " ")),
        demonstration=demonstrate(question),
    )


def demonstrate(question: str, *, leave_out_last: bool = False) -> str:
    """A reply that adds the digits one after another.

    >>> demonstrate("47 82")
    '4+7=11 11+8=19 19+2=21 [ANSWER] 21'
    """
    digits = [int(digit) for digit in question if digit != " "]
    if leave_out_last:
        digits.pop()
    total = digits[0]
    steps = []
    for digit in digits[1:]:
        steps.append(f"{total}+{digit}={total + digit}")
        total += digit
    return f"{' '.join(steps)} [ANSWER] {total}"


def is_held_out(problem: Problem) -> bool:
    """By a hash of the integers without their order: no reordering of a held-out problem is trained on."""
    key = " ".join(sorted(problem.id.removeprefix(ID_PREFIX).split("-")))
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < HELD_OUT_SHARE


def parse_answer(text: str) -> str | None:
    """The digits after the last `[ANSWER]`, which must end the reply; None if there are none."""
    match = ANSWER.search(text)
    return match.group(1) if match else None


def is_correct(rollout: Rollout) -> bool:
    return parse_answer(rollout.text) == rollout.prompt.problem.answer


def format_reward(rollout: Rollout) -> float:
    """1 if the reply ends in `[ANSWER] <digits>` and was not cut off."""
    finished = rollout.completion.finish_reason == "stop"
    return float(finished and parse_answer(rollout.text) is not None)


def _answer_reward(rollout: Rollout) -> float:
    return float(is_correct(rollout))


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
