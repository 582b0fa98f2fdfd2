"""An environment of your own: guess a number, and be told "higher" or "lower" until it is found.

    python -m rl.train --module examples.custom_environment --config tiny

    user   10-16     model  13
    user   lower     model  11
    user   higher    model  12     found: the episode is over

An environment says what the model is told; a task makes problems, an environment for each episode,
and says what an episode earns. Here the environment also takes something off for every wrong guess,
at that guess, and the task's reward function gives 1 for the number. The warm-up's demonstrations
mostly guess one number after another from below, which finds 3 numbers of 7; what rewards have to
find is to halve what is left.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from actors.controller import Controller
from configs import sum_digits
from rl.config.tree import check_bounds
from rl.loop.warmup import SupervisedWarmup
from rl.rollouts.renderer import RendererConfig
from rl.tasks.generated import GeneratedTask
from rl.tasks.task import complete_answer
from rl.types import Message, Observation, Problem, Reply, Rollout


class GuessNumber(GeneratedTask):
    """Task of finding a number between two others by guesses."""

    @dataclass(kw_only=True, slots=True)
    class Config(GeneratedTask.Config):
        """Range of the numbers, guesses and their cost, and the demonstrations."""

        num_eval: int = 64
        width: int = 7
        """Number of possible numbers."""
        max_guesses: int = 3
        """Most guesses of an episode."""
        wrong_guess: float = -0.1
        """Cost of each guess."""
        halving: float = 0.3
        """Share of the warm-up's guesses that halve what is left; the others are the lowest number
        left.
        """

        def __post_init__(self) -> None:
            # Not super(): a dataclass with slots is another class than the one that `super` was
            # compiled in.
            GeneratedTask.Config.__post_init__(self)
            check_bounds(self, "width", at_least=2, at_most=20)
            check_bounds(self, "max_guesses", at_least=1)
            check_bounds(self, "halving", at_least=0, at_most=1)

    config: Config

    def draw(self, generator: random.Random) -> Problem:
        low = generator.randint(10, 80)
        high = low + self.config.width - 1
        secret = generator.randint(low, high)
        return Problem(
            id=f"guess/{low}-{high}/{secret}",
            question=f"{low}-{high}",
            answer=str(secret),
            info={"low": low, "high": high},
        )

    def warmup_problem(self, generator: random.Random) -> Problem:
        """Draw a problem with demonstrated guesses, given the environment's known answers."""
        problem = self.draw(generator)
        low, high, secret = problem.info["low"], problem.info["high"], int(problem.answer)
        # A number is drawn for each guess, so that problems depend on the seed and `halving` alone.
        guesses: list[int] = []
        while secret not in guesses and len(guesses) < self.config.max_guesses:
            guess = (low + high) // 2 if generator.random() < self.config.halving else low
            guesses.append(guess)
            low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
        return replace(problem, demonstration=tuple(map(str, guesses)))

    def environment(self, problem: Problem) -> HigherOrLower:
        return HigherOrLower(
            problem=problem,
            max_guesses=self.config.max_guesses,
            wrong_guess=self.config.wrong_guess,
        )

    def reward(self, rollout: Rollout) -> float:
        """Return 1 for the number; what the environment gave in the turns comes on top."""
        return float(complete_answer(rollout.turns[-1]) == rollout.prompt.problem.answer)


@dataclass(kw_only=True, slots=True)
class HigherOrLower:
    """One episode. Whatever is no number ends it."""

    problem: Problem
    max_guesses: int
    wrong_guess: float
    num_guesses: int = field(default=0, init=False)

    def opening(self) -> Sequence[Message]:
        """The same for every episode of a problem."""
        return (Message(role="user", content=self.problem.question),)

    async def step(self, reply: Reply) -> Observation:
        """No messages: the episode is over."""
        self.num_guesses += 1
        text, secret = reply.text.strip(), int(self.problem.answer)
        if reply.completion.is_cut_off or not (text.isascii() and text.isdigit()):
            return Observation(reward=self.wrong_guess, metrics={"no_number": 1.0})
        guess = int(text)
        if guess == secret:
            return Observation(metrics={"guesses": self.num_guesses})
        if self.num_guesses == self.max_guesses:
            return Observation(reward=self.wrong_guess)
        hint = "higher" if secret > guess else "lower"
        return Observation(messages=(Message(role="user", content=hint),), reward=self.wrong_guess)

    async def close(self) -> None:
        """Nothing is held."""


def tiny() -> Controller.Config:
    """A model of 0.8M parameters that this run makes and warms up itself; two CPU cores, no GPU."""
    config = sum_digits.tiny()
    config.description = "Qwen3 of 0.8M parameters guesses numbers, on a CPU"
    config.task = GuessNumber.Config()
    config.renderer = RendererConfig(kind="raw")  # no template around the words: short episodes
    config.warmup = SupervisedWarmup.Config(num_steps=150)
    config.trainer.optimizer.lr = 2e-4
    config.loop.num_steps = 80
    config.loop.sampling.max_tokens = 4
    config.loop.episode.max_turns = 8
    # A guess is paid for what comes of it and after it, not for the guesses before.
    config.loop.advantage.credit = "token"
    config.generator.max_model_len = 64
    return config
