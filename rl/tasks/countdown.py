"""Countdown: make a target out of given numbers, each used at most once, with + - * and /."""

from __future__ import annotations

import ast
import operator
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from rl.config.tree import check_bounds
from rl.rollouts.rubric import Criterion, UnparsedAnswer
from rl.tasks.generated import GeneratedTask, add_instruction
from rl.tasks.task import complete_answer
from rl.types import Problem, Rollout

ANSWER = re.compile(r"\[ANSWER\] ?([0-9+\-*/() ]{1,200})\s*\Z")
INSTRUCTION = (
    "Using the numbers given, each at most once, and the operations + - * / and parentheses, write "
    "an expression that equals the target. End your reply with [ANSWER], a space and the "
    "expression. For example, for the numbers 2 3 7 and the target 13: [ANSWER] 2*3+7"
)
"""Instruction for a model that follows instructions but was not trained on this task."""

OPERATIONS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
MAX_DRAWS = 10_000
"""Draws of numbers and signs after which the task is refused for having no targets."""
_NODES = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


class Countdown(GeneratedTask):
    """Task of making a target out of numbers; every target can be made with all of them."""

    @dataclass(kw_only=True, slots=True)
    class Config(GeneratedTask.Config):
        """Given numbers, targets, and the share of the reward for the form."""

        num_numbers: int = 3
        """Number of given numbers."""
        largest: int = 20
        """Largest given number; the smallest is 1."""
        max_target: int = 100
        """Largest target; the smallest is 1."""
        operations: str = "+-*"
        """Operations of the targets; replies may use all four."""
        instruction: str = INSTRUCTION
        """Text before numbers and target; empty for a model that is warmed up without it."""
        format_reward: float = 0.1
        """Partial credit for an expression that uses the numbers correctly; the rest of 1.0 is for
        the target.
        """

        def __post_init__(self) -> None:
            GeneratedTask.Config.__post_init__(self)
            check_bounds(self, "format_reward", at_least=0, at_most=1)
            check_bounds(self, "num_numbers", at_least=2, at_most=8)
            check_bounds(self, "largest", "max_target", at_least=2)
            if not self.operations or set(self.operations) - OPERATIONS.keys():
                raise ValueError(
                    f"operations={self.operations!r}: must be one or more of {''.join(OPERATIONS)}"
                )

    config: Config

    def draw(self, generator: random.Random) -> Problem:
        for _ in range(MAX_DRAWS):
            numbers = [
                generator.randint(1, self.config.largest) for _ in range(self.config.num_numbers)
            ]
            text, value = self._combine(numbers, generator)
            # Every target is what the numbers give, so it can be made; most values are too large.
            if value.denominator == 1 and 1 <= value <= self.config.max_target:
                break
        else:
            raise ValueError(
                f"no target up to max_target={self.config.max_target} was found for "
                f"operations={self.config.operations!r}, num_numbers={self.config.num_numbers} and "
                f"largest={self.config.largest}: allow more operations or targets, or fewer or "
                "smaller numbers"
            )
        generator.shuffle(numbers)
        asked = f"numbers {' '.join(map(str, numbers))} target {value}"
        return Problem(
            id=f"countdown/{asked.replace(' ', '-')}",
            question=add_instruction(self.config.instruction, asked),
            answer=text,
            demonstration=f"[ANSWER] {text}",
            info={"numbers": numbers, "target": int(value)},
        )

    def _combine(self, numbers: list[int], generator: random.Random) -> tuple[str, Fraction]:
        """Combine all numbers from left to right; return the expression and its value."""
        text, value = str(numbers[0]), Fraction(numbers[0])
        for i, number in enumerate(numbers[1:]):
            sign = generator.choice(self.config.operations)
            # Without parentheses, * and / would bind more tightly than the signs before them.
            text = f"({text}){sign}{number}" if i and sign in "*/" else f"{text}{sign}{number}"
            value = OPERATIONS[sign](value, Fraction(number))
        return text, value

    def split_key(self, problem: Problem) -> str:
        """Return the sorted numbers and the target."""
        # Numbers in another order are the same problem.
        return f"{sorted(problem.info['numbers'])} {problem.info['target']}"

    def criteria(self) -> tuple[Criterion, ...]:
        return self.with_partial_credit("format", uses_the_numbers, self.config.format_reward)

    def reward(self, rollout: Rollout) -> float:
        """Return 1 for an expression that equals the target and uses each number at most once."""
        info = rollout.prompt.problem.info
        return float(
            bool(uses_the_numbers(rollout))
            and evaluate(parse_expression(rollout)) == info["target"]
        )


def parse_expression(rollout: Rollout) -> str:
    """Return the expression after an `[ANSWER]` that ends the reply, outside of thoughts.

    Raises:
        UnparsedAnswer: there is none, or the reply was cut off.
    """
    match = ANSWER.search(complete_answer(rollout.last_turn) or "")
    text = match.group(1).strip() if match else ""
    if not text:
        raise UnparsedAnswer("no [ANSWER] with an expression at the end")
    return text


def uses_the_numbers(rollout: Rollout) -> float:
    """Return 1 for a valid expression that uses no number more often than it is given."""
    text = parse_expression(rollout)
    # Counters compare how often each number is used with how often it is given.
    used = Counter(map(int, re.findall(r"[0-9]+", text)))
    return float(
        evaluate(text) is not None and used <= Counter(rollout.prompt.problem.info["numbers"])
    )


def evaluate(text: str) -> Fraction | None:
    """Return the exact value of an expression of whole numbers, or None.

    Valid are + - * / and parentheses.
    """
    try:
        return _evaluate_node(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _evaluate_node(node: ast.expr) -> Fraction:
    # Fractions are exact: 1/3*3 is 1. Signs before a number are no operation of the game.
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _NODES:
        left, right = _evaluate_node(node.left), _evaluate_node(node.right)
        return OPERATIONS[_NODES[type(node.op)]](left, right)
    raise ValueError("not arithmetic")
