"""Calculation: products that are too large for a small model, for agents with a calculator.

user   37*48
model  <tool_call>{"name": "calculator", "arguments": {"expression": "37*48"}}</tool_call>
tool   1776
model  = 1776
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rl.config.tree import check_bounds
from rl.tasks.generated import GeneratedTask, add_instruction
from rl.tasks.task import find_answer
from rl.tools.calculator import Calculator, evaluate
from rl.tools.environment import ToolEnvironment
from rl.tools.tool import parse_calls, render_call
from rl.types import Message, Observation, Problem, Reply, Rollout, ToolCall
from rl.utils.numbers import same_answer

INSTRUCTION = "Work out the product with the calculator, and reply with the number alone."
"""Instruction for a model that follows instructions and knows how to call tools."""


class Calculation(GeneratedTask):
    """Task of several products, asked one after another; each answer is the end of a reply."""

    @dataclass(kw_only=True, slots=True)
    class Config(GeneratedTask.Config):
        """Number and size of the products, and demonstrations."""

        num_eval: int = 64
        num_products: int = 1
        """Products of a problem, each asked when the one before was answered."""
        num_digits: int = 2
        """Number of digits of the larger factors."""
        instruction: str = ""
        """Line before each product. Empty for a model that is warmed up on the bare products."""
        guesses: float = 0.0
        """Share of the warm-up's answers that are given without the calculator, and wrong."""

        def __post_init__(self) -> None:
            # Not super(), which does not work in a dataclass with slots.
            GeneratedTask.Config.__post_init__(self)
            check_bounds(self, "num_products", at_least=1)
            check_bounds(self, "num_digits", at_least=2, at_most=9)
            check_bounds(self, "guesses", at_least=0, at_most=1)

    config: Config

    def draw(self, generator: random.Random) -> Problem:
        largest = 10**self.config.num_digits - 1
        products = []
        for _ in range(self.config.num_products):
            products.append(f"{generator.randint(10, largest)}*{generator.randint(10, largest)}")
        return self._make_problem(products, guessed=[False] * len(products))

    def warmup_problem(self, generator: random.Random) -> Problem:
        """Draw a problem whose demonstration may guess: the right digits, shuffled."""
        products = self.draw(generator).question.split()
        guessed = [generator.random() < self.config.guesses for _ in products]
        return self._make_problem(products, guessed=guessed, generator=generator)

    def _make_problem(
        self,
        products: Sequence[str],
        *,
        guessed: Sequence[bool],
        generator: random.Random | None = None,
    ) -> Problem:
        replies, answers = [], []
        for product, is_guessed in zip(products, guessed, strict=True):
            answer = str(evaluate(product))
            answers.append(answer)
            if is_guessed:
                assert generator is not None
                replies.append(f"about {''.join(generator.sample(answer, len(answer)))}")
            else:
                call = ToolCall(name="calculator", arguments={"expression": product})
                replies += [render_call(call), f"= {answer}"]
        return Problem(
            id=f"calculation/{' '.join(products)}",
            question=" ".join(products),
            answer=" ".join(answers),
            demonstration=tuple(replies),
        )

    def environment(self, problem: Problem) -> ProductEnvironment:
        return ProductEnvironment(problem=problem, instruction=self.config.instruction)

    def reward(self, rollout: Rollout) -> float:
        """Return the share of the products with the right number at the end of their reply.

        A conversation may be shorter than the problem, because its history was summed up: the last
        answers are compared then.
        """
        answers = rollout.answer.split()
        numbers = []
        for turn in rollout.turns:
            if not parse_calls(turn.text):
                cut_off = turn.completion.is_cut_off
                numbers.append(find_answer(turn.text, "last_number", is_cut_off=cut_off))
        num_right = 0
        for answer, number in zip(answers, numbers, strict=False):
            num_right += number is not None and same_answer(answer, number)
        return num_right / len(answers)


def reward_of_output(rollout: Rollout) -> float:
    """Return 1 if the last number that an agent printed is the answer of the last product."""
    number = find_answer(str(rollout.state.get("output", "")), "last_number")
    return float(number is not None and same_answer(rollout.answer.split()[-1], number))


class ProductEnvironment(ToolEnvironment):
    """Asks for the products of a problem one after another, and answers calls of the calculator.

    The calculator is not announced: a model knows it from its warm-up.
    """

    def __init__(self, *, problem: Problem, instruction: str = "") -> None:
        questions = problem.question.split()
        super().__init__(problem=problem, tools=(Calculator(),), max_calls=4 * len(questions))
        self._questions = iter(add_instruction(instruction, question) for question in questions)

    def opening(self) -> Sequence[Message]:
        return (Message(role="user", content=next(self._questions)),)

    async def step(self, reply: Reply) -> Observation:
        answer = await super().step(reply)
        question = None if answer.messages else next(self._questions, None)
        if question is None:
            return answer
        return replace(answer, messages=(Message(role="user", content=question),))
