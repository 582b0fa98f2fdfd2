"""Environments: the single-turn one, the thread that all others run in, and trials before a run.

    episode --step, close--> event loop of the environment thread --result--> episode

Environments run in one event loop in a thread of its own, so that slow code does not stall the controller and
the environments of a task can share a session or a semaphore. Code that blocks belongs in `asyncio.to_thread`:
a `step` that blocks the event loop delays every other environment.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypeVar, get_args

from rl.protocols import Environment
from rl.types import Message, Observation, Problem, Reply, Role
from rl.utils.errors import RunError

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class TooLongError(Exception):
    """An environment's call exceeded its time limit; the message says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleTurn:
    """An environment that asks the question and ends the episode after the first reply."""

    problem: Problem
    system: str = ""
    """System message before the question; empty: none."""

    @property
    def runs_inline(self) -> bool:
        """True unless a subclass has a `step` or `close` of its own, which may block."""
        kind = type(self)
        return kind.step is SingleTurn.step and kind.close is SingleTurn.close

    @property
    def single_turn(self) -> bool:
        """True unless a subclass has a `step` of its own, which may ask for more."""
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
        pass


class EnvironmentThread:
    """Event loop in a daemon thread, shared by the environments of a run.

    The thread starts with the first call and ends when this object is garbage-collected.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, function: Callable[[], Awaitable[ResultT]]) -> Awaitable[ResultT]:
        """Start `function()` in the thread and return a future of its result."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="environments", daemon=True).start()
            weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_guarded(function), self._loop))


async def _guarded(function: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Await `function()`; raise RuntimeError for errors that would end the episode or the event loop."""
    try:
        return await function()
    except (asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise RuntimeError(f"{type(error).__name__} of an environment") from error


@dataclass(kw_only=True, slots=True, eq=False)
class EnvironmentCalls:
    """Calls of one environment with a time limit, in the environment thread unless it `runs_inline`."""

    environment: Environment
    problem: Problem
    thread: EnvironmentThread
    timeout_s: float
    """Longest time of a step, and of `close`."""
    messages: tuple[Message, ...] = ()
    """Opening messages, if it was opened by `TriedEnvironments`."""

    @property
    def single_turn(self) -> bool:
        """True if the environment declares that the first reply ends the episode."""
        return bool(getattr(self.environment, "single_turn", False))

    async def step(self, reply: Reply) -> Observation:
        """Return the environment's answer to a reply.

        Raises:
            TooLongError: no answer within `timeout_s`.
            TypeError, ValueError: the answer is not a valid Observation; names the field.
            Exception: what the environment raises.
        """
        return _checked(await self._call(lambda: self.environment.step(reply)))

    async def close(self) -> None:
        """Close the environment; raises as `step` does."""
        await self._call(self.environment.close)

    async def _call(self, function: Callable[[], Awaitable[ResultT]]) -> ResultT:
        runs_inline = getattr(self.environment, "runs_inline", False)
        timer = asyncio.timeout(self.timeout_s)
        try:
            async with timer:
                return await (_guarded(function) if runs_inline else self.thread.start(function))
        except Exception as error:
            if timer.expired() and not isinstance(error, RunError):
                raise TooLongError(f"took longer than step_timeout_s={self.timeout_s:g}") from error
            raise


def make_environment(make: Callable[[Problem], Environment], problem: Problem) -> Environment:
    """Return the environment that a task makes for a problem.

    Raises:
        RunError: the task's function raised; names the problem.
    """
    try:
        return make(problem)
    except RunError:
        raise
    except Exception as error:
        raise RunError(f"the environment of problem {problem.id!r} cannot be made: {error!r}") from error


def common_opening(group: Sequence[Environment], problem: Problem) -> tuple[Message, ...]:
    """Return the opening messages that all environments of a problem share.

    Raises:
        RunError: an environment raises, gives no valid messages, or opens differently; names the problem.
    """
    openings = {_opening(environment, problem) for environment in group}
    if len(openings) != 1:
        raise RunError(
            f"environments of problem {problem.id!r} open differently, but the samples of a group need the "
            "same prompt: let `opening` depend on the problem alone"
        )
    return openings.pop()


def _opening(environment: Environment, problem: Problem) -> tuple[Message, ...]:
    try:
        messages = tuple(environment.opening())
        _check_messages(messages)
        if not messages:
            raise ValueError("there are no messages, and the model needs at least one")
    except RunError:
        raise
    except Exception as error:
        raise RunError(
            f"the environment of problem {problem.id!r} ({type(environment).__name__}) does not open: "
            f"`opening` must return a sequence of Message: {error!r}"
        ) from error
    return messages


def _checked(observation: Any) -> Observation:
    if not isinstance(observation, Observation):
        raise TypeError(f"`step` returned {observation!r}, which is not an Observation")
    _check_messages(observation.messages)
    for name, value in {**observation.metrics, "reward": observation.reward}.items():
        if not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(f"{name}={value!r}: must be a finite number")
    return observation


def _check_messages(messages: Sequence[Any]) -> None:
    roles = get_args(Role)
    for i, m in enumerate(messages):
        if not (isinstance(m, Message) and m.role in roles and isinstance(m.content, str)):
            raise ValueError(
                f"messages[{i}]={m!r}: must be a Message with a text and a role of {', '.join(roles)}"
            )


@dataclass(kw_only=True, slots=True)
class TriedEnvironments:
    """Environments played outside of rollouts: in the checks before a run, and in the warm-up.

    They use the same thread as the run's episodes, so a client that the first one makes serves all of them.
    """

    make: Callable[[Problem], Environment]
    thread: EnvironmentThread = field(default_factory=EnvironmentThread)
    step_timeout_s: float = 60.0
    """Time limit of each step, and of closing."""

    @asynccontextmanager
    async def opened(self, problem: Problem) -> AsyncIterator[EnvironmentCalls]:
        """Make and open a new environment, and close it at the end.

        Raises:
            ValueError: the environment cannot be made, opened or closed; names the problem.
        """
        with environment_errors(f"opening problem {problem.id!r}"):
            calls = EnvironmentCalls(
                environment=make_environment(self.make, problem),
                problem=problem,
                thread=self.thread,
                timeout_s=self.step_timeout_s,
            )
        try:
            with environment_errors(f"opening problem {problem.id!r}"):
                calls.messages = common_opening([calls.environment], problem)
            yield calls
        except BaseException:
            try:
                await calls.close()
            except Exception as error:
                logger.warning("closing problem %r: %r", problem.id, error, exc_info=error)
            raise
        with environment_errors(f"closing problem {problem.id!r}"):
            await calls.close()


@contextmanager
def environment_errors(where: str) -> Iterator[None]:
    """Turn an error of an environment into a ValueError that begins with `where`."""
    try:
        yield
    except TooLongError as error:
        raise ValueError(f"{where}: the environment {error}") from error
    except RunError as error:
        raise ValueError(f"{where}: {error}") from error
    except Exception as error:
        raise ValueError(f"{where}: the environment raised {error!r}") from error
