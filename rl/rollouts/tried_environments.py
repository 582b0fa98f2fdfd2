"""Environments outside of rollouts, where what is wrong with one is an error that names the problem.

They are made, called and closed in the threads that the run's episodes use later, so that what a task shares
among its environments stays in one event loop, and what blocks is left behind after a time limit.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from rl.errors import RunError
from rl.protocols import Environment
from rl.rollouts.environment import is_single_turn
from rl.rollouts.environment_checks import checked_observation, common_opening, made_environment
from rl.rollouts.environment_limit import TooLongError
from rl.rollouts.environment_thread import EnvironmentCalls, EnvironmentThreads
from rl.types import Message, Observation, Problem, Reply

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedEnvironment:
    """One that has opened."""

    calls: EnvironmentCalls
    messages: tuple[Message, ...]
    """That it opened with."""
    step_timeout_s: float

    @property
    def single_turn(self) -> bool:
        """Whether it says so."""
        return is_single_turn(self.calls.environment)

    async def step(self, reply: Reply, *, turn: int) -> Observation:
        """
        Raises:
            ValueError: it raises, takes too long or does not return a valid Observation; names the problem,
                the turn and the field.
        """
        where = f"turn {turn} of problem {self.calls.problem.id!r}"
        with _named(f"{where}: the environment"):
            answer = await self.calls.step(reply, turn=turn, timeout_s=self.step_timeout_s)
        try:
            return checked_observation(answer)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from error


@dataclass(kw_only=True, slots=True)
class TriedEnvironments:
    """Makes, opens and closes them."""

    make: Callable[[Problem], Environment]
    threads: EnvironmentThreads = field(default_factory=EnvironmentThreads)
    step_timeout_s: float = 60.0
    """Longest time that one may take to be made, to open, to answer or to close."""
    _last_ran_inline: bool = field(default=False, init=False)
    """Then the next is made without the way between the threads, which takes longer than to make it."""

    @asynccontextmanager
    async def opened(self, problem: Problem) -> AsyncIterator[TriedEnvironment]:
        """A new one, closed at the end.

        Raises:
            ValueError: it cannot be made, opened or closed; names the problem.
        """
        calls = await self._made(problem)
        try:
            yield TriedEnvironment(
                calls=calls, messages=await self._opening(calls), step_timeout_s=self.step_timeout_s
            )
        except BaseException:
            try:
                await self._close(calls)
            except ValueError as error:
                logger.warning("%s", error, exc_info=error)
            raise
        await self._close(calls)

    async def _made(self, problem: Problem) -> EnvironmentCalls:
        environment = await self._called(
            lambda: made_environment(self.make, problem),
            title=f"making the environment of problem {problem.id!r}",
            inline=self._last_ran_inline,
        )
        calls = self.threads.calls_of(environment, problem)
        self._last_ran_inline = calls.thread is None
        return calls

    async def _opening(self, calls: EnvironmentCalls) -> tuple[Message, ...]:
        return await self._called(
            lambda: common_opening([calls.environment], calls.problem),
            title=f"opening problem {calls.problem.id!r}",
            inline=calls.thread is None,
        )

    async def _called(self, function: Callable[[], ResultT], *, title: str, inline: bool) -> ResultT:
        async def there() -> ResultT:
            return function()

        with _named(title):
            if inline:
                return function()
            return await self.threads.call(there, title=title, timeout_s=self.step_timeout_s)

    async def _close(self, calls: EnvironmentCalls) -> None:
        with _named(f"closing problem {calls.problem.id!r}: the environment"):
            await calls.close(timeout_s=self.step_timeout_s)


@contextmanager
def _named(who: str) -> Iterator[None]:
    """What an environment's own code raises becomes a ValueError that begins with `who`."""
    try:
        yield
    except TooLongError as error:
        raise ValueError(f"{who} {error}") from error
    except RunError as error:
        raise ValueError(f"{who}: {error}") from error
    except Exception as error:
        raise ValueError(f"{who} raised {error!r}") from error
