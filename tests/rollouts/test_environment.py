"""What the environment of a single turn says of the classes that are made from it."""

from dataclasses import dataclass

import pytest

from rl.rollouts.environment import SingleTurn, is_single_turn
from rl.types import Message, Observation, Problem, Reply

PROBLEM = Problem(id="ask", question="why", answer="")


@dataclass(frozen=True, kw_only=True)
class Retold(SingleTurn):
    def opening(self):
        return (*super().opening(), Message(role="user", content="now"))


@dataclass(frozen=True, kw_only=True)
class Answering(SingleTurn):
    async def step(self, reply: Reply) -> Observation:
        return Observation(messages=(Message(role="user", content="more"),))


@dataclass(frozen=True, kw_only=True)
class Holding(SingleTurn):
    async def close(self) -> None:
        """Gives something back, which may block."""


@dataclass(frozen=True, kw_only=True)
class Grading(SingleTurn):
    """With a `step` of its own, and it says that it ends the episode."""

    single_turn = True

    async def step(self, reply: Reply) -> Observation:
        return Observation(reward=1.0)


@pytest.mark.parametrize(
    ("kind", "single_turn", "runs_inline"),
    [
        (SingleTurn, True, True),
        (Retold, True, True),
        (Answering, False, False),
        (Holding, True, False),
        (Grading, True, False),
    ],
)
def test_it_is_inline_and_of_one_turn_as_far_as_its_own_methods_go(kind, single_turn, runs_inline):
    environment = kind.of(PROBLEM)
    assert is_single_turn(environment) == single_turn
    assert environment.runs_inline == runs_inline
