"""Environments that come with the rollouts: the one of a single turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl.protocols import Environment
from rl.types import Message, Observation, Problem, Reply


def is_single_turn(environment: Environment) -> bool:
    """Whether it says that the first reply ends the episode (`single_turn`); one that does not say may go
    on."""
    return bool(getattr(environment, "single_turn", False))


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleTurn:
    """The question, and then nothing: the first reply ends the episode."""

    problem: Problem
    system: str = ""
    """A system message before the question."""

    @property
    def runs_inline(self) -> bool:
        """It never blocks; of a class with a `step` or `close` of its own, nobody knows."""
        kind = type(self)
        return kind.step is SingleTurn.step and kind.close is SingleTurn.close

    @property
    def single_turn(self) -> bool:
        """A class with a `step` of its own may go on, unless it says that it does not."""
        return type(self).step is SingleTurn.step

    @classmethod
    def of(cls, problem: Problem) -> SingleTurn:
        return cls(problem=problem)

    def opening(self) -> Sequence[Message]:
        question = Message(role="user", content=self.problem.question)
        return (Message(role="system", content=self.system), question) if self.system else (question,)

    async def step(self, reply: Reply) -> Observation:
        return Observation()

    async def close(self) -> None:
        """Nothing is held."""
