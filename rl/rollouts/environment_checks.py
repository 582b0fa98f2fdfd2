"""What environments of other people's code give, looked at before it is used."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import get_args

from rl.errors import RunError
from rl.protocols import Environment
from rl.types import Message, Observation, Problem, Role


def checked_observation(observation: object) -> Observation:
    """As it is.

    Raises:
        TypeError, ValueError: names the field that is not what it must be.
    """
    if not isinstance(observation, Observation):
        raise TypeError(f"`step` returned {observation!r}, which is no Observation")
    _check_messages(observation.messages, "messages")
    _check_number(observation.reward, "reward")
    if not isinstance(observation.metrics, Mapping):
        raise TypeError(f"metrics={observation.metrics!r}: must be numbers by name")
    for name, value in observation.metrics.items():
        if not isinstance(name, str):
            raise TypeError(f"metrics has the name {name!r}, which is no string")
        _check_number(value, f"metrics[{name!r}]")
    return observation


def made_environment(environment: Callable[[Problem], Environment], problem: Problem) -> Environment:
    """What a task's `environment` returns.

    Raises:
        RunError: names the problem: it raised.
    """
    try:
        return environment(problem)
    except RunError:
        raise
    except Exception as error:
        raise RunError(f"the environment of problem {problem.id!r} cannot be made: {error!r}") from error


def common_opening(group: Sequence[Environment], problem: Problem) -> tuple[Message, ...]:
    """How all environments of a problem open.

    Raises:
        RunError: names the problem: one cannot open, gives no messages, or opens differently.
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
        messages = environment.opening()
        _check_messages(messages, "it")
        if not messages:
            raise ValueError("there are no messages in it, and the model must be told something")
    except RunError:
        raise
    except Exception as error:
        raise RunError(
            f"the environment of problem {problem.id!r} ({type(environment).__name__}) does not open: "
            f"`opening` must return a sequence of Message: {error!r}"
        ) from error
    return tuple(messages)


def _check_messages(messages: object, name: str) -> None:
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise TypeError(f"{name} is {messages!r}, which is no sequence of Message")
    for i, message in enumerate(messages):
        if not isinstance(message, Message):
            raise TypeError(f"{name}[{i}] is {message!r}, which is no Message")
        if message.role not in get_args(Role):
            raise ValueError(f"{name}[{i}].role={message.role!r}: must be one of {', '.join(get_args(Role))}")
        if not isinstance(message.content, str):
            raise TypeError(f"{name}[{i}].content={message.content!r}: must be a string")


def _check_number(value: object, name: str) -> None:
    if not isinstance(value, Real):
        raise TypeError(f"{name}={value!r}: must be a number")
    if not math.isfinite(value):
        raise ValueError(f"{name}={value!r}: must be finite")
