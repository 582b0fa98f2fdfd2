"""Rubrics: weighted sums of reward functions over one rollout, or over all rollouts of a problem.

A rubric lists the calls to make (`list_calls`) and combines their results to scores
(`combine_scores`). `rl.rollouts.rewards` makes the calls in a process of its own, with time limits.

Shape legend: G rollouts of a problem.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rl.rollouts.reward_values import MAX_REWARD, to_number, to_numbers, to_truth
from rl.types import Prompt, Rollout, Score
from rl.utils.namespaces import describe_missing_network
from rl.utils.printing import describe_value, truncate
from rl.utils.threads import run_now

RewardFn = Callable[[Rollout], float] | Callable[[Rollout], Awaitable[float]]
GroupRewardFn = (
    Callable[[Sequence[Rollout]], Sequence[float]]
    | Callable[[Sequence[Rollout]], Awaitable[Sequence[float]]]
)

Slots = Mapping[str, asyncio.Semaphore]
"""Semaphore of each reward function, by name."""

RIGHT = 1.0 - 1e-6
"""Smallest value of a reward or criterion that counts as a right answer; below 1 for sums of
floats.
"""
ENVIRONMENT, OVERLONG = "environment", "overlong"
"""Parts of a score that no criterion gives: the rewards of the turns, and the overlong punishment.
"""
CORRECT = ""
"""Name of the function `Rubric.correct` in a call; no criterion has an empty name."""
MAX_CONCURRENCY = 64
"""Concurrent calls of an async reward function that sets no limit of its own."""


class UnparsedAnswer(Exception):  # noqa: N818  (a bad reply, not an error)
    """Raised by a reward function that finds no answer in the reply.

    The rollout is still trained on, with `value` as the function's result, and counted in
    `num_unparsed`.
    """

    def __init__(self, message: str = "", *, value: float = 0.0) -> None:
        super().__init__(message)
        self.value = value


@dataclass(frozen=True, kw_only=True, slots=True)
class Criterion:
    """A reward function of one rollout, sync or async, with its weight.

    An attribute `max_concurrency` of an async function limits its concurrent calls.
    """

    name: str
    function: RewardFn
    weight: float = 1.0

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCriterion:
    """A reward function of all rollouts of a problem: [G] rollouts to [G] numbers.

    Otherwise like `Criterion`.

    Rollouts whose environment failed are left out and get no score.
    """

    name: str
    function: GroupRewardFn
    weight: float = 1.0
    needs_group: bool = True
    """True if the function compares rollouts, so that it is skipped for the single greedy replies
    of an evaluation. False if it grades each rollout by itself, such as a judge that is asked once
    for all.
    """

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallResult:
    """Values of the reward functions of a call, or the reason why there are none."""

    values: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """One value for each rollout of the call, by name of the function."""
    unparsed: tuple[str, ...] = ()
    """Functions that found no answer in the reply."""
    failure: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RubricCall:
    """Reward functions that are called one after another as one unit of work."""

    names: tuple[str, ...]
    """All sync functions of a rollout (criteria, and `CORRECT`), or one async one, or one of a
    group.
    """
    is_async: bool
    places: tuple[int, ...]
    """Indices of the rollouts in their group."""
    rollouts: tuple[Rollout, ...]

    @property
    def title(self) -> str:
        """Name of the functions in messages."""
        return " or ".join(_describe(name) for name in self.names if name != CORRECT) or "correct"

    def make_timeout(self, time_limit_s: float) -> CallResult:
        """Return the failure of a call that exceeded the time limit for each of its rollouts."""
        # A function of a group has the limit for each of its rollouts, see `RewardProcess`.
        each = f" for each of {len(self.rollouts)} rollouts" if len(self.rollouts) > 1 else ""
        return CallResult(
            failure=f"{self.title} took longer than time_limit_s={time_limit_s:g}{each}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rubric:
    """Scores rollouts by its criteria; picklable if the functions are module-level.

    The reward is the weighted sum of the criteria plus the rewards of the environment
    (`Observation.reward`, weight 1). Without criteria the reward is the environment's alone.
    """

    criteria: tuple[Criterion | GroupCriterion, ...] = ()
    correct: Callable[[Rollout], bool] | str | None = None
    """Decides if the answer is right, independent of shaped rewards: a sync function, or the name
    of a criterion whose value is at least 1 (less 1e-6) for right answers. None: the reward is at
    least 1.
    """

    def __post_init__(self) -> None:
        names = [c.name for c in self.criteria]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two criteria have the name {name!r}: each needs its own")
            if name in (ENVIRONMENT, OVERLONG):
                raise ValueError(
                    f"a criterion has the name {name!r}, reserved for a part that relay adds to "
                    "scores: choose another"
                )
        if isinstance(self.correct, str) and self.correct not in names:
            raise ValueError(f"correct={self.correct!r} is not a criterion of the rubric {names}")
        if self.correct in self.comparing:
            raise ValueError(
                f"correct={self.correct!r} compares the rollouts of a group, but greedy evaluation "
                "has one: choose a function or another criterion, or set needs_group=False if it "
                "can grade one rollout alone"
            )
        if callable(self.correct) and is_async(self.correct):
            raise ValueError(
                "correct is an async function: make it a criterion, and give its name instead"
            )

    @property
    def has_group_functions(self) -> bool:
        """True if the rollouts of a problem have to be scored together."""
        return any(isinstance(c, GroupCriterion) for c in self.criteria)

    @property
    def comparing(self) -> tuple[str, ...]:
        """Criteria that are skipped for single rollouts."""
        names = []
        for c in self.criteria:
            if isinstance(c, GroupCriterion) and c.needs_group:
                names.append(c.name)
        return tuple(names)

    @property
    def has_async_functions(self) -> bool:
        return any(is_async(c.function) for c in self.criteria)

    @property
    def remote(self) -> tuple[str, ...]:
        """Criteria that say by an attribute `needs_network` that they ask another machine."""
        names = []
        for c in self.criteria:
            if getattr(c.function, "needs_network", False):
                names.append(c.name)
        return tuple(names)

    @property
    def key_variables(self) -> set[str]:
        """Environment variables that criteria name by an attribute `api_key_env`."""
        names = set()
        for c in self.criteria:
            name = getattr(c.function, "api_key_env", None)
            if name is not None:
                names.add(name)
        return names

    def list_calls(self, group: Sequence[Rollout], *, alone: bool = False) -> list[RubricCall]:
        """Return the calls that the scores of a problem's rollouts need, skipping failed rollouts.

        `alone` skips functions that need a group.
        """
        places, rollouts = list[int](), list[Rollout]()
        for i, rollout in enumerate(group):
            if rollout.failure is None:
                places.append(i)
                rollouts.append(rollout)
        if not places:
            return []

        sync_names: list[str] = []
        async_names: list[str] = []
        group_criteria: list[GroupCriterion] = []
        for c in self.criteria:
            if isinstance(c, Criterion):
                (async_names if is_async(c.function) else sync_names).append(c.name)
            elif not (alone and c.name in self.comparing):
                group_criteria.append(c)
        if callable(self.correct):
            sync_names.append(CORRECT)

        # The sync functions of a rollout share one call and its time limit; async ones overlap, so
        # each has a call of its own.
        units = [(tuple(sync_names), False)] if sync_names else []
        for name in async_names:
            units.append(((name,), True))
        calls = []
        for i in places:
            for names, overlaps in units:
                calls.append(
                    RubricCall(names=names, is_async=overlaps, places=(i,), rollouts=(group[i],))
                )
        for c in group_criteria:
            calls.append(
                RubricCall(
                    names=(c.name,),
                    is_async=is_async(c.function),
                    places=tuple(places),
                    rollouts=tuple(rollouts),
                )
            )
        return calls

    def make_slots(self, most: int) -> Slots:
        """Return a semaphore for each function, of `most` calls or its own `max_concurrency`."""
        slots = {}
        for c in self.criteria:
            slots[c.name] = asyncio.Semaphore(getattr(c.function, "max_concurrency", most))
        return slots

    def call_sync(self, call: RubricCall) -> CallResult:
        """Call the sync functions of a call in this thread, up to the first that fails."""
        values: dict[str, Sequence[float]] = {}
        unparsed: tuple[str, ...] = ()
        for name in call.names:
            given, raised = None, None
            # A function may call sys.exit; the process that serves all functions goes on.
            try:
                given = self._begin(name, call)
            except (Exception, SystemExit) as error:  # noqa: BLE001  (code of a user)
                raised = error
            result = self._read(name, given, raised=raised, num=len(call.rollouts))
            if result.failure is not None:
                return result
            values |= result.values
            unparsed += result.unparsed
        return CallResult(values=values, unparsed=unparsed)

    async def compute_result(
        self, call: RubricCall, *, slots: Slots, time_limit_s: float | None = None
    ) -> CallResult:
        """Call the functions of a call, async ones after waiting for a slot, which is not timed.

        `time_limit_s` limits an async function for each rollout; None: no limit.
        """
        if not call.is_async:
            return self.call_sync(call)
        (name,), num = call.names, len(call.rollouts)
        given, raised = None, None
        try:
            # First the slot, then the timer: a wait for a busy server is not the function's time.
            async with slots[name], asyncio.timeout(time_limit_s and time_limit_s * num) as timer:
                given = await self._begin(name, call)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            # A cancellation of this task goes on; one that the function brought about is its error.
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            if time_limit_s is not None and timer.expired():
                return call.make_timeout(time_limit_s)
            raised = error
        return self._read(name, given, raised=raised, num=num)

    def _begin(self, name: str, call: RubricCall) -> Any:
        """Return what a function of a call returns: a coroutine if it is async."""
        # A function that changes a problem's data must not change it for the next function.
        rollouts = _copy_private(call.rollouts)
        if name == CORRECT:
            assert callable(self.correct)
            return self.correct(rollouts[0])
        criterion = self._find_criterion(name)
        if isinstance(criterion, GroupCriterion):
            return criterion.function(rollouts)
        assert criterion is not None
        return criterion.function(rollouts[0])

    def _find_criterion(self, name: str) -> Criterion | GroupCriterion | None:
        for criterion in self.criteria:
            if criterion.name == name:
                return criterion
        return None

    def _read(self, name: str, given: Any, *, raised: BaseException | None, num: int) -> CallResult:
        """Return the values of `num` rollouts from what a function returned, or raised."""
        title, criterion = _describe(name), self._find_criterion(name)
        is_unparsed = isinstance(raised, UnparsedAnswer)
        if isinstance(raised, UnparsedAnswer):
            title, given = f"{title}: its UnparsedAnswer", raised.value
        elif raised is not None:
            hint = describe_missing_network(raised)
            return CallResult(failure=f"{title} raised {describe_value(raised)}{hint}")

        valid, why, numbers = "a finite number", "", list[float]()
        try:
            if isinstance(criterion, GroupCriterion) and not is_unparsed:
                valid = f"{num} finite numbers, one for each rollout, in order"
                # One more than needed tells a longer answer, also of an endless generator.
                numbers = to_numbers(given, most=num + 1)
            elif criterion is None and not is_unparsed:
                valid = "True or False"
                numbers = [float(to_truth(given))]
            else:
                # The value of an UnparsedAnswer counts for each rollout of a group.
                numbers = [to_number(given)] * num
        except (Exception, SystemExit) as error:  # noqa: BLE001  (a value is of any type)
            hint = "" if is_unparsed else _explain(given)
            why = f" ({hint or describe_value(error)})"
        if len(numbers) != num or not all(map(math.isfinite, numbers)):
            return CallResult(
                failure=f"{title} gave {describe_value(given)}{why}, but must give {valid}"
            )

        weight = 0.0 if criterion is None else float(criterion.weight)
        if any(abs(weight * number) > MAX_REWARD for number in numbers):
            return CallResult(
                failure=f"{title} gave {describe_value(given)} with weight {weight:g}, but a "
                f"weighted reward must be within {MAX_REWARD:g} of 0 (divide it by a constant)"
            )
        return CallResult(values={name: numbers}, unparsed=(name,) if is_unparsed else ())

    def combine_scores(
        self, group: Sequence[Rollout], calls: Sequence[RubricCall], results: Sequence[CallResult]
    ) -> list[Score]:
        """Return the scores of a problem's rollouts from the results of their calls."""
        by_place: dict[int, list[tuple[CallResult, int]]] = defaultdict(list)
        for call, result in zip(calls, results, strict=True):
            for index, place in enumerate(call.places):
                by_place[place].append((result, index))
        return [self._score(rollout, by_place[place]) for place, rollout in enumerate(group)]

    def _score(self, rollout: Rollout, results: Sequence[tuple[CallResult, int]]) -> Score:
        """Return one score from pairs of a call's result and the rollout's index in that call."""
        if rollout.failure is not None:
            return make_failed_score(rollout.failure, rollout=rollout)

        values: dict[str, float] = {}
        unparsed: list[str] = []
        for result, index in results:
            if result.failure is not None:
                return make_failed_score(result.failure, rollout=rollout)
            for name, numbers in result.values.items():
                values[name] = numbers[index]
            unparsed += result.unparsed

        # In the order of the criteria, whatever that of the calls: sums of floats depend on it.
        graded = [c for c in self.criteria if c.name in values]
        parts = {c.name: values[c.name] for c in graded}
        turn_rewards = [turn.observation.reward for turn in rollout.turns]
        environment_reward = float(sum(turn_rewards))
        if any(turn_rewards):
            parts[ENVIRONMENT] = environment_reward

        reward = sum(float(c.weight) * values[c.name] for c in graded) + environment_reward
        # "not <=" rather than ">", so that NaN is refused too.
        if not max(abs(reward), abs(environment_reward)) <= MAX_REWARD:
            amounts = (
                f"the weighted reward is {reward:g}, the environment's part of it "
                f"{environment_reward:g}"
            )
            return make_failed_score(
                f"{amounts}: both must be within {MAX_REWARD:g} of 0", rollout=rollout
            )

        if callable(self.correct):
            is_correct = values[CORRECT] == 1.0 and CORRECT not in unparsed
        else:
            is_correct = (reward if self.correct is None else values[self.correct]) >= RIGHT
        names = tuple(name or "correct" for name in unparsed)
        return Score(reward=reward, correct=is_correct, parts=parts, unparsed=names)

    def score(self, rollout: Rollout) -> Score:
        """Score one rollout in this process, without a time limit."""
        (score,) = run_now(self.score_group([rollout]))
        return score

    async def score_group(self, group: Sequence[Rollout], *, alone: bool = False) -> list[Score]:
        """Score a problem's rollouts in this process, without a time limit.

        `alone` as in `list_calls`.
        """
        calls, slots = self.list_calls(group, alone=alone), self.make_slots(MAX_CONCURRENCY)
        waiting = [self.compute_result(call, slots=slots) for call in calls]
        results = await asyncio.gather(*waiting)
        return self.combine_scores(group, calls, results)


def make_failed_score(reason: str, *, rollout: Rollout) -> Score:
    """Return a score that says why there is none; its rollout is not trained on."""
    where = (
        f"on problem {describe_value(rollout.prompt.problem.id)}, completion "
        f"{truncate(repr(rollout.text))}"
    )
    return Score(reward=0.0, correct=False, failure=f"{reason} {where}")


def is_async(function: Callable[..., Any]) -> bool:
    """Return True for an `async def`, or an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )


def _copy_private(rollouts: Sequence[Rollout]) -> tuple[Rollout, ...]:
    """Return the rollouts with problems that a single call of a function may change."""
    # The rollouts of a group share a prompt, and so do their copies.
    copies: dict[int, Prompt] = {}
    mine = []
    for r in rollouts:
        if id(r.prompt) not in copies:
            copies[id(r.prompt)] = Prompt(
                problem=r.prompt.problem.make_private(), token_ids=r.prompt.token_ids
            )
        prompt = copies[id(r.prompt)]
        mine.append(replace(r, prompt=prompt, state=_copy_state(r.state)))
    return tuple(mine)


def _copy_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state whose lists and dicts a function may change, as it may those of a problem."""
    return dict(state) if state else state  # `Rollout` copies the values of a dict.


def _explain(given: Any) -> str:
    """Return the usual reason why a function gave no number, or nothing."""
    if given is None:
        return "it returned nothing: does a path through it lack `return`?"
    if inspect.iscoroutine(given):
        given.close()  # or Python warns that nobody awaited it
        return "a coroutine: define the function itself with `async def`"
    return ""


def _describe(name: str) -> str:
    return "correct" if name == CORRECT else f"reward {name!r}"


def _check(criterion: Criterion | GroupCriterion) -> None:
    name, most = criterion.name, getattr(criterion.function, "max_concurrency", None)
    if not name:
        raise ValueError(
            "a criterion has name='': must not be empty, because metrics are named by it"
        )
    if not callable(criterion.function):
        raise ValueError(f"criterion {name!r}: function={criterion.function!r} is not callable")
    try:
        is_valid = abs(to_number(criterion.weight)) <= MAX_REWARD
    except (TypeError, ValueError, OverflowError):
        is_valid = False
    if not is_valid:
        weight = describe_value(criterion.weight)
        raise ValueError(
            f"criterion {name!r}: weight={weight} is not a finite number within {MAX_REWARD:g} of 0"
        )
    if most is not None and (not isinstance(most, int) or most < 1):
        raise ValueError(
            f"criterion {name!r}: max_concurrency={most!r} is not a number of at least 1"
        )
