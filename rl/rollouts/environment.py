"""Environments: the single-turn one, and calls of all others in a thread of their own.

All environments run in one event loop in that thread, so that slow code does not stall the
controller and the environments of a task can share a session or a semaphore. Code that blocks
belongs in `asyncio.to_thread`: a `step` that blocks the event loop delays every other environment.
"""

from __future__ import annotations

import asyncio
import logging
import math
import types
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar, cast, get_args

from rl.protocols import Environment
from rl.rollouts.reward_values import MAX_REWARD, to_number
from rl.types import Message, Observation, Problem, Reply, Role, read_messages
from rl.utils.errors import RunError
from rl.utils.printing import describe_value
from rl.utils.threads import LoopThread

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

ROLES = get_args(Role)


NOTHING = Observation()
"""Answer that ends an episode; one for all, because it cannot change."""


class EnvironmentFailedError(Exception):
    """An environment broke, or exceeded its time limit; the message says which."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleTurn:
    """An environment that asks the question and ends the episode after the first reply."""

    problem: Problem
    system: str = ""
    """System message before the question; empty: none."""
    messages: tuple[Message, ...] = ()
    """Conversation to answer, instead of the problem's question alone; empty: none."""

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
        messages = self.messages or (Message(role="user", content=self.problem.question),)
        if not self.system:
            return messages
        return (Message(role="system", content=self.system), *messages)

    async def step(self, reply: Reply) -> Observation:
        return NOTHING

    async def close(self) -> None:
        pass


async def _guard(function: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Await `function()`.

    Raises RuntimeError for errors that would end the episode or the event loop.
    """
    try:
        return await function()
    # Raised in a task of the environments' loop, a SystemExit would end the loop for all of them,
    # and a CancelledError would look like a cancellation of the episode.
    except (asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise RuntimeError(f"{type(error).__name__} of an environment") from error


async def _run_with_timer(
    coroutine: Coroutine[Any, Any, ResultT], timer: asyncio.Timeout
) -> ResultT:
    """Await a coroutine within a time limit; one that does not wait costs no timer."""
    # The first step by hand: a coroutine that returns at once never reaches the event loop.
    try:
        waits_for = coroutine.send(None)
    except StopIteration as result:
        return cast(ResultT, result.value)
    async with timer:
        return cast(ResultT, await _continue(coroutine, waits_for))


@types.coroutine
def _continue(coroutine: Coroutine[Any, Any, Any], waits_for: Any) -> Generator[Any, Any, Any]:
    """Await the rest of a coroutine that has begun, and has to wait."""
    while True:
        try:
            given = yield waits_for
        except BaseException as error:  # noqa: BLE001  (raised where the coroutine waits)
            proceed = partial(coroutine.throw, error)
        else:
            proceed = partial(coroutine.send, given)
        try:
            waits_for = proceed()
        except StopIteration as result:
            return result.value


@dataclass(kw_only=True, slots=True, eq=False)
class EnvironmentCalls:
    """Calls of one opened environment with a time limit.

    They run in the environment thread, unless the environment `runs_inline`.
    """

    environment: Environment
    problem: Problem
    thread: LoopThread
    timeout_s: float
    """Longest time of a step, and of `close`."""
    messages: tuple[Message, ...] = ()
    """Opening messages."""
    ends_at_once: bool = field(init=False)
    """True if the first reply ends the episode, and neither that nor closing has anything to wait
    for.
    """
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self.ends_at_once = (
            isinstance(self.environment, SingleTurn) and self.environment.runs_inline
        )

    async def step(self, reply: Reply) -> Observation:
        """Return the environment's answer to a reply.

        Raises:
            EnvironmentFailedError: no answer within `timeout_s`, an error, or an invalid field of
                the Observation.
            RunError: raised by the environment.
        """
        if self.ends_at_once:
            return await self.environment.step(reply)

        async def answer() -> Observation:
            return _check_observation(await self.environment.step(reply))

        return await self._call(answer)

    def open(self) -> tuple[Message, ...]:
        """Return the opening messages, and keep them; ValueError names the problem."""
        try:
            self.messages = read_messages(self.environment.opening(), name="opening()")
            _check_messages(self.messages)
            if not self.messages:
                raise ValueError("there are no messages, and the model needs at least one")
        except Exception as error:
            raise ValueError(
                f"the environment of problem {describe_value(self.problem.id)} "
                f"({type(self.environment).__name__}) does not open: `opening` must return a "
                f"sequence of Message: {describe_value(error)}"
            ) from error
        return self.messages

    async def close(self) -> None:
        """Close the environment; raises as `step` does. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            await self._call(self.environment.close)

    async def _call(self, function: Callable[[], Awaitable[ResultT]]) -> ResultT:
        timer = asyncio.timeout(self.timeout_s)
        try:
            if getattr(self.environment, "runs_inline", False):
                return await _run_with_timer(_guard(function), timer)
            async with timer:
                return await self.thread.start(_guard(function))
        except RunError:
            raise
        except Exception as error:
            slow = f"took longer than step_timeout_s={self.timeout_s:g}"
            raise EnvironmentFailedError(
                f"the environment {slow if timer.expired() else f'raised {describe_value(error)}'}"
            ) from error


@dataclass(kw_only=True, slots=True)
class Environments:
    """The environments of a task, all called in one thread.

    The checks before a run, the warm-up and the episodes share one object, so a client that the
    first environment makes serves all of them.
    """

    make: Callable[[Problem], Environment]
    step_timeout_s: float = 60.0
    """Time limit of each step, and of closing."""
    thread: LoopThread = field(default_factory=lambda: LoopThread("environments"))

    @asynccontextmanager
    async def opened(
        self, problems: Iterable[Problem], *, num: int = 1
    ) -> AsyncIterator[list[list[EnvironmentCalls]]]:
        """Make and open `num` environments of each problem, and close them at the end.

        Errors of closing are only logged.

        Raises ValueError with the problem if one cannot be made, or does not open as the others of
        its problem.
        """
        groups: list[list[EnvironmentCalls]] = []
        try:
            for problem in problems:
                # Appended before it is filled, so that an error closes what has been made.
                group: list[EnvironmentCalls] = []
                groups.append(group)
                while len(group) < num:
                    group.append(self._make(problem))
                _check_distinct(group)

            for group in groups:
                for calls in group:
                    if calls.open() != group[0].messages:
                        raise ValueError(
                            f"environments of problem {describe_value(group[0].problem.id)} open "
                            "differently, but a group has one prompt: let `opening` depend on the "
                            "problem alone"
                        )
            yield groups
        finally:
            closing = []
            for calls in chain.from_iterable(groups):
                # The environment of a single turn has nothing to close.
                if not calls.ends_at_once:
                    closing.append(calls.close())
            for error in await asyncio.gather(*closing, return_exceptions=True):
                if isinstance(error, Exception):
                    logger.warning("an environment could not be closed: %r", error, exc_info=error)

    def _make(self, problem: Problem) -> EnvironmentCalls:
        try:
            environment = self.make(
                problem.make_private()
            )  # Episodes of a group must not share data.
        except Exception as error:
            raise ValueError(
                f"the environment of problem {describe_value(problem.id)} cannot be made: "
                f"{describe_value(error)}"
            ) from error
        return EnvironmentCalls(
            environment=environment,
            problem=problem,
            thread=self.thread,
            timeout_s=self.step_timeout_s,
        )


def _check_distinct(group: Sequence[EnvironmentCalls]) -> None:
    """Raise ValueError if episodes share an environment that keeps a state."""
    environments = {id(calls.environment) for calls in group}
    if len(environments) == len(group) or all(calls.ends_at_once for calls in group):
        return
    raise ValueError(
        f"two episodes of problem {describe_value(group[0].problem.id)} got the same environment, "
        f"a {type(group[0].environment).__name__}: `environment` must return a new one each time"
    )


def _check_observation(observation: Any) -> Observation:
    """Return an observation with numbers as floats.

    Raises TypeError or ValueError for an invalid field.
    """
    if not isinstance(observation, Observation):
        raise TypeError(
            f"`step` returned {describe_value(observation)}, which is not an Observation"
        )
    _check_messages(observation.messages)
    reward = _read_number("reward", observation.reward)
    if abs(reward) > MAX_REWARD:
        raise ValueError(
            f"reward={reward:g}: must be within {MAX_REWARD:g} of 0; divide it by a constant"
        )
    metrics = {name: _read_number(name, value) for name, value in observation.metrics.items()}
    # Nearly every environment gives floats, and this runs at each turn: no copy then.
    if set(map(type, (observation.reward, *observation.metrics.values()))) == {float}:
        return observation
    return replace(observation, reward=reward, metrics=metrics)


def _read_number(name: Any, value: Any) -> float:
    if not isinstance(name, str):
        raise ValueError(f"metrics has the key {describe_value(name)}: a name must be a text")
    try:
        number = to_number(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name}={describe_value(value)}: must be a finite number")
    return number


def _check_messages(messages: Sequence[Any]) -> None:
    for i, m in enumerate(messages):
        if not (isinstance(m, Message) and m.role in ROLES and isinstance(m.content, str)):
            raise ValueError(
                f"messages[{i}]={describe_value(m)}: must be a Message with a text and a role of "
                f"{', '.join(ROLES)}"
            )
