"""A model that calls tools: a calculator, and Python in a sandbox.

    python -m rl.train --module examples.multi_turn_tools --config tiny
    python -m rl.train --module examples.multi_turn_tools --config qwen3_0_6b

    user   37*48
    model  <tool_call>{"name": "calculator", "arguments": {"expression": "37*48"}}</tool_call>
    tool   1776
    model  = 1776          a reply without a call: the episode is over

Products are for the calculator, binary numbers for Python. The tiny model's demonstrations mostly
answer at once, with a number that is wrong; what rewards have to find is that to ask a tool is
worth it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from actors.controller import Controller
from configs import sum_digits
from rl.config.tree import check_bounds
from rl.loop.warmup import SupervisedWarmup
from rl.rollouts.renderer import RendererConfig
from rl.tasks.generated import GeneratedTask
from rl.tasks.task import find_answer
from rl.tools.calculator import Calculator
from rl.tools.environment import ToolEnvironment
from rl.tools.sandbox import PythonSandbox
from rl.tools.tool import Tool, render_call
from rl.types import Message, Problem, Rollout, ToolCall
from rl.utils.numbers import same_answer

INSTRUCTION = "What is {asked}? Work it out with a tool, and then reply with the number alone."
"""For a model that was taught to follow instructions and to call tools."""


class Arithmetic(GeneratedTask):
    """Task whose answer a tool computes; the last number of the last reply is the answer."""

    @dataclass(kw_only=True, slots=True)
    class Config(GeneratedTask.Config):
        """Mixture and size of the problems, demonstrations, and the tools' limits."""

        num_eval: int = 64
        python_share: float = 0.25
        """Share of the problems that are for Python."""
        announce: bool = True
        """Tell the model in a system message which tools there are, and what to do. Off for a tiny
        model, which knows them from its warm-up."""
        guesses: float = 0.0
        """Share of the warm-up's demonstrations that answer without a tool, and wrong."""
        num_digits: int = 2
        """Number of digits of the larger factors."""
        max_calls: int = 4
        """Most calls of an episode."""
        sandbox: PythonSandbox.Config = field(default_factory=PythonSandbox.Config)

        def __post_init__(self) -> None:
            # Not super(): a dataclass with slots is another class than the one that `super` was
            # compiled in.
            GeneratedTask.Config.__post_init__(self)
            check_bounds(self, "python_share", "guesses", at_least=0, at_most=1)
            check_bounds(self, "num_digits", at_least=2, at_most=9)

    config: Config

    @cached_property
    def tools(self) -> tuple[Tool, ...]:
        """Tools of all episodes."""
        # Not made with the task: a process that only draws problems needs no sandbox.
        return (Calculator(), self.config.sandbox.build())

    def __getstate__(self) -> dict[str, object]:
        """Return what the reward processes need."""
        # They call no tools, so the tools stay here.
        return {"config": self.config}

    def draw(self, generator: random.Random) -> Problem:
        if generator.random() < self.config.python_share:
            number = generator.randint(128, 1023)
            short, asked, answer = f"bin {number}", f"{number} as a binary number", f"{number:b}"
            call = ToolCall(name="python", arguments={"code": f"print(bin({number})[2:])"})
        else:
            largest = 10**self.config.num_digits - 1
            a, b = generator.randint(10, largest), generator.randint(10, largest)
            short, asked, answer = f"{a}*{b}", f"{a} times {b}", str(a * b)
            call = ToolCall(name="calculator", arguments={"expression": short})
        return Problem(
            id=f"arithmetic/{short.replace(' ', '-')}",
            question=INSTRUCTION.format(asked=asked) if self.config.announce else short,
            answer=answer,
            demonstration=(render_call(call), f"= {answer}"),
        )

    def warmup_problem(self, generator: random.Random) -> Problem:
        """Draw a problem whose demonstration may be a guess: the right digits, shuffled."""
        problem = self.draw(generator)
        if generator.random() >= self.config.guesses:
            return problem
        digits = "".join(generator.sample(problem.answer, len(problem.answer)))
        return replace(problem, demonstration=f"about {digits}")

    def environment(self, problem: Problem) -> ToolEnvironment:
        kind = ToolEnvironment if self.config.announce else Unannounced
        return kind(problem=problem, tools=self.tools, max_calls=self.config.max_calls)

    def reward(self, rollout: Rollout) -> float:
        """Return 1 for the right number at the end of the last reply."""
        number = find_answer(rollout.text, "last_number", is_cut_off=rollout.completion.is_cut_off)
        return float(number is not None and same_answer(rollout.prompt.problem.answer, number))


class Unannounced(ToolEnvironment):
    """Only the question is said."""

    def opening(self) -> Sequence[Message]:
        return (Message(role="user", content=self.problem.question),)


def tiny() -> Controller.Config:
    """A model of 0.8M parameters that this run makes and warms up itself; two CPU cores, no GPU."""
    config = sum_digits.tiny()
    config.description = "Qwen3 of 0.8M parameters calls tools, on a CPU"
    config.task = Arithmetic.Config(announce=False, guesses=0.6)
    config.renderer = RendererConfig(kind="raw")  # no template around the words: short episodes
    config.warmup = SupervisedWarmup.Config(num_steps=300, num_demonstrations=32)
    config.trainer.optimizer.lr = 1e-4
    config.loop.num_steps = 20
    config.loop.groups_per_batch = 16
    config.loop.sampling.max_tokens = 112
    config.loop.eval_every = 5
    config.generator.max_model_len = 256
    return config


def qwen3_0_6b() -> Controller.Config:
    """One GPU of 80 GB."""
    config = sum_digits.qwen3_0_6b()
    config.description = "Qwen3-0.6B calls tools, on GPUs"
    config.task = Arithmetic.Config(num_digits=6, num_eval=256)
    config.renderer = RendererConfig(kind="qwen3")
    config.loop.episode.max_turns = 6
    config.loop.sampling.max_tokens = 1024
    config.generator.max_model_len = 8192
    return config
