"""Reward functions, and how one is called so that whatever it does becomes a value or a reason.

Shape legend: G rollouts of a problem.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from rl.types import Rollout

RewardFn = Callable[[Rollout], float] | Callable[[Rollout], Awaitable[float]]
GroupRewardFn = (
    Callable[[Sequence[Rollout]], Sequence[float]] | Callable[[Sequence[Rollout]], Awaitable[Sequence[float]]]
)

NUM_SHOWN_CHARACTERS = 2000
"""Most of what an error message shows of a text that somebody else wrote."""


class UnparsedAnswer(Exception):  # noqa: N818  (no error: a reply without an answer is a bad reply)
    """Raised by a reward function that finds no answer in the reply.

    That is no failure: the rollout is trained on, with `value` as what the function gave, and counted.
    """

    def __init__(self, message: str = "", *, value: float = 0.0) -> None:
        super().__init__(message)
        self.value = value


class ScoringError(Exception):
    """What a reward function did instead of giving finite numbers; the message names it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Criterion:
    """One reward function of a rollout, sync or async, and what it counts for.

    An async function with an attribute `max_concurrency` is called for that many rollouts at once at most.
    """

    name: str
    function: RewardFn
    weight: float = 1.0

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCriterion:
    """One reward function of all rollouts of a problem together: of [G] rollouts, [G] numbers.

    Rollouts whose environment failed are not among them: they get no score. Sync or async, with
    `max_concurrency` as a `Criterion`.
    """

    name: str
    function: GroupRewardFn
    weight: float = 1.0
    needs_group: bool = True
    """Whether it compares rollouts, so that it is left out where each stands alone: the greedy replies of an
    evaluation. False for one that grades each for itself, such as a judge that is asked once for all; it is
    then given a greedy reply alone."""

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """What a reward function gave for one rollout."""

    value: float
    unparsed: bool = False
    """Whether it found no answer in the reply."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallResult:
    """Values of reward functions that were called together, or why there are none."""

    values: Mapping[str, Sequence[Value]] = field(default_factory=dict)
    """By criterion, one for each rollout of the call."""
    correct: Value | None = None
    """Where `correct` was called."""
    failure: str | None = None


def is_async(function: Callable[..., Any]) -> bool:
    """Whether it is an `async def`, or an object whose `__call__` is."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )


def values_of(criterion: Criterion | GroupCriterion, rollouts: Sequence[Rollout]) -> list[Value]:
    """What a sync criterion gives for these rollouts; for a `Criterion`, one.

    Raises:
        ScoringError: it raised, or gave something else than finite numbers.
    """
    name = f"reward {criterion.name!r}"
    return _called(
        name,
        lambda: criterion.function(_argument(criterion, rollouts)),  # type: ignore[arg-type]
        lambda given: _read(criterion, given, len(rollouts)),
        num=len(rollouts),
    )


def correctness(function: Callable[[Rollout], Any], rollout: Rollout) -> Value:
    """1 where `correct` says so; a reply without an answer is not correct.

    Raises:
        ScoringError: it raised.
    """
    (value,) = _called(
        "correct",
        lambda: function(rollout),
        lambda given: [Value(value=float(bool(given)))],
        num=1,
    )
    return Value(value=0.0, unparsed=True) if value.unparsed else value


async def async_values_of(
    criterion: Criterion | GroupCriterion, rollouts: Sequence[Rollout], *, limit_s: float | None
) -> list[Value]:
    """As `values_of`, of an async criterion, within `limit_s`.

    Raises:
        ScoringError: also when it took longer.
    """
    name = f"reward {criterion.name!r}"
    try:
        async with asyncio.timeout(limit_s) as timeout:
            given = await criterion.function(_argument(criterion, rollouts))  # type: ignore[arg-type,misc]
    except UnparsedAnswer as answer:
        return _unparsed(name, answer, len(rollouts))
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ScoringError(f"{name} raised {shown(error)}") from None
    except (Exception, SystemExit) as error:  # noqa: BLE001  (a user's function)
        if timeout.expired():
            assert limit_s is not None
            raise ScoringError(too_long([criterion.name], limit_s, len(rollouts))) from None
        raise ScoringError(f"{name} raised {shown(error)}") from None
    return _read(criterion, given, len(rollouts))


class Concurrency:
    """How many async reward functions are under way at once; of one event loop.

    Whoever waits for a place is not yet called, so that its time limit does not run.
    """

    def __init__(self, most: int) -> None:
        self._all = asyncio.Semaphore(most)
        self._own: dict[str, asyncio.Semaphore] = {}

    @asynccontextmanager
    async def place(self, criterion: Criterion | GroupCriterion) -> AsyncIterator[None]:
        """Wait for a place for one call of this criterion's function, and hold it."""
        most = getattr(criterion.function, "max_concurrency", None)
        own = nullcontext() if most is None else self._own.setdefault(criterion.name, asyncio.Semaphore(most))
        # Its own first: who waits for that takes no place from others.
        async with own, self._all:
            yield


def named(names: Sequence[str]) -> str:
    """How a message names the functions of a call: its criteria, or `correct` alone."""
    return " or ".join(f"reward {name!r}" for name in names) or "correct"


def too_long(names: Sequence[str], limit_s: float, num_rollouts: int) -> str:
    """That a call of these functions on so many rollouts took longer than `limit_s`."""
    each = f" for each of {num_rollouts} rollouts" if num_rollouts > 1 else ""
    return f"{named(names)} took longer than time_limit_s={limit_s / num_rollouts:g}{each}"


def shown(value: object) -> str:
    """The repr of somebody else's value, at a length that a message can have."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  (a user's __repr__)
        text = f"a {type(value).__name__} that has no repr"
    return shortened(text)


def shortened(text: str) -> str:
    """Its beginning and its end, where it is long."""
    if len(text) <= NUM_SHOWN_CHARACTERS:
        return text
    half = NUM_SHOWN_CHARACTERS // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters more) ... {text[-half:]}"


def _check(criterion: Criterion | GroupCriterion) -> None:
    kind = "criterion" if isinstance(criterion, Criterion) else "group criterion"
    if not criterion.name:
        raise ValueError(f"{kind} name={criterion.name!r}: must be a text, which its metrics are named by")
    if not callable(criterion.function):
        raise ValueError(
            f"{kind} {criterion.name!r}: function={criterion.function!r} cannot be called: give a function "
            f"of {'a rollout' if isinstance(criterion, Criterion) else 'the rollouts of a group'}"
        )
    if not math.isfinite(criterion.weight):
        raise ValueError(f"{kind} {criterion.name!r}: weight={criterion.weight} is not a finite number")
    most = getattr(criterion.function, "max_concurrency", None)
    if most is not None and (not isinstance(most, int) or most < 1):
        raise ValueError(f"{kind} {criterion.name!r}: max_concurrency={most!r} is not a number of at least 1")


def _argument(
    criterion: Criterion | GroupCriterion, rollouts: Sequence[Rollout]
) -> Rollout | tuple[Rollout, ...]:
    if isinstance(criterion, GroupCriterion):
        return tuple(rollouts)
    (rollout,) = rollouts
    return rollout


def _called(
    name: str, call: Callable[[], Any], read: Callable[[Any], list[Value]], *, num: int
) -> list[Value]:
    try:
        given = call()
    except UnparsedAnswer as answer:
        return _unparsed(name, answer, num)
    except (Exception, SystemExit) as error:  # noqa: BLE001  (a user's function)
        raise ScoringError(f"{name} raised {shown(error)}") from None
    if inspect.isawaitable(given):
        if inspect.iscoroutine(given):
            given.close()  # Or Python warns that nobody awaited it.
        raise ScoringError(
            f"{name} returned something to await: define the function itself with `async def`"
        ) from None
    return read(given)


def _unparsed(name: str, answer: UnparsedAnswer, num: int) -> list[Value]:
    value = Value(value=_finite(f"{name}: the value of its UnparsedAnswer", answer.value), unparsed=True)
    return [value] * num


def _read(criterion: Criterion | GroupCriterion, given: Any, num: int) -> list[Value]:
    name = f"reward {criterion.name!r}"
    if isinstance(criterion, Criterion):
        return [Value(value=_finite(name, given))]
    try:
        numbers = list(given)
    except (Exception, SystemExit):  # noqa: BLE001  (a user's object)
        raise ScoringError(
            f"{name} is {shown(given)}, where {num} numbers are wanted, one for each rollout of the group"
        ) from None
    if len(numbers) != num:
        raise ScoringError(f"{name} gave {len(numbers)} numbers for the {num} rollouts of the group")
    return [Value(value=_finite(f"{name}, number {i},", n)) for i, n in enumerate(numbers)]


def _finite(name: str, given: Any) -> float:
    try:
        number = float(given)
    except (Exception, SystemExit):  # noqa: BLE001  (a user's object)
        raise ScoringError(f"{name} is {shown(given)}, not a number") from None
    if not math.isfinite(number):
        raise ScoringError(f"{name} is {number}, not a finite number")
    return number
