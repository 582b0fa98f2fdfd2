"""Rewards: a rubric is a weighted sum of reward functions over one rollout, or over those of a problem.

    def short(rollout: Rollout) -> float: ...
    async def polite(rollout: Rollout) -> float: ...
    def ranked(rollouts: Sequence[Rollout]) -> list[float]: ...

    Rubric(criteria=(
        Criterion(name="short", function=short, weight=0.2),
        Criterion(name="polite", function=polite),
        GroupCriterion(name="ranked", function=ranked, weight=0.5),
    ))

A rubric says what is to be called (`calls`) and makes scores of what came of it (`scores`); who calls, under
which time limit and in which process, is not its business (`rl.rollouts.scoring`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rl.rollouts.overlong import OVERLONG
from rl.rollouts.rubric_functions import (
    CallResult,
    Concurrency,
    Criterion,
    GroupCriterion,
    GroupRewardFn,
    RewardFn,
    ScoringError,
    UnparsedAnswer,
    Value,
    async_values_of,
    correctness,
    is_async,
    shortened,
    values_of,
)
from rl.types import Rollout, Score

__all__ = [
    "Criterion",
    "GroupCriterion",
    "GroupRewardFn",
    "RewardFn",
    "Rubric",
    "RubricCall",
    "UnparsedAnswer",
    "failed_score",
]

RIGHT = 1.0 - 1e-6
"""From this on a reward, or a criterion's value, means a right answer; less than 1 for sums of floats."""
ENVIRONMENT = "environment"
"""The part of a score that the environment gave, turn by turn."""
MAX_CONCURRENCY = 64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RubricCall:
    """Reward functions that are called one after another, as one piece of work."""

    names: tuple[str, ...]
    """Criteria: sync ones of one rollout, or one async, or one of a group."""
    correct: bool = False
    """Whether `correct` is called after them."""
    places: tuple[int, ...]
    """Of the rollouts in their group."""
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rubric:
    """Scores rollouts by its criteria; picklable if the functions are module-level.

    The reward is the weighted sum of the criteria, and what the environment gave in the turns of the rollout
    (`Observation.reward`, weight 1). Without criteria it is the environment's alone.
    """

    criteria: tuple[Criterion | GroupCriterion, ...] = ()
    correct: Callable[[Rollout], bool] | str | None = None
    """Whether the answer is right, whatever the reward's shaping: a sync function, or the name of a criterion
    that gives at least 1 (less 1e-6) to right ones. None: where the reward itself is as much."""

    def __post_init__(self) -> None:
        names = [c.name for c in self.criteria]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two criteria have the name {name!r}: each needs its own")
        for name, given in (
            (ENVIRONMENT, "the rewards of its turns"),
            (OVERLONG, "what its length takes off"),
        ):
            if name in names:
                raise ValueError(f"a criterion has the name {name!r}, which is for {given}")
        if isinstance(self.correct, str) and self.correct not in names:
            raise ValueError(
                f"correct={self.correct!r} is no criterion of the rubric: it has {', '.join(names) or 'none'}"
            )
        if self.correct in self.comparing:
            raise ValueError(
                f"correct={self.correct!r} compares the rollouts of a problem, so it is left out of greedy "
                "evaluation: let correct be a function or another criterion, or set needs_group=False if it "
                "can grade one rollout alone"
            )
        if callable(self.correct) and is_async(self.correct):
            raise ValueError(
                "correct is an async function: let it be sync, or a criterion, and give the criterion's name"
            )

    @property
    def has_group_functions(self) -> bool:
        """Whether the rollouts of a problem have to be scored together."""
        return any(isinstance(c, GroupCriterion) for c in self.criteria)

    @property
    def comparing(self) -> tuple[str, ...]:
        """Criteria that are left out where each rollout stands alone."""
        return tuple(c.name for c in self.criteria if isinstance(c, GroupCriterion) and c.needs_group)

    @property
    def has_async_functions(self) -> bool:
        return any(is_async(c.function) for c in self.criteria)

    def criterion(self, name: str) -> Criterion | GroupCriterion:
        return next(c for c in self.criteria if c.name == name)

    def is_async(self, call: RubricCall) -> bool:
        return any(is_async(self.criterion(name).function) for name in call.names)

    # What is to be called, and what comes of it

    def calls(self, group: Sequence[Rollout], *, alone: bool = False) -> list[RubricCall]:
        """All that the scores of a problem's rollouts need; nothing for those whose environment failed.

        `alone`: the rollouts are not to be compared, so functions that need a group are left out.
        """
        whole = [(i, r) for i, r in enumerate(group) if r.failure is None]
        of_one = [c for c in self.criteria if isinstance(c, Criterion)]
        sync = tuple(c.name for c in of_one if not is_async(c.function))
        overlapping = [c.name for c in of_one if is_async(c.function)]
        correct = callable(self.correct)
        made = []
        for i, rollout in whole:
            at: dict[str, Any] = {"places": (i,), "rollouts": (rollout,)}
            if sync or correct:
                made.append(RubricCall(names=sync, correct=correct, **at))
            made += [RubricCall(names=(name,), **at) for name in overlapping]
        if whole:
            places, rollouts = zip(*whole, strict=True)
            of_group = [c for c in self.criteria if isinstance(c, GroupCriterion)]
            together = [c.name for c in of_group if not (alone and c.needs_group)]
            made += [RubricCall(names=(n,), places=places, rollouts=rollouts) for n in together]
        return made

    def result(self, call: RubricCall) -> CallResult:
        """Call sync functions, here and now; the first that fails is the last that is called."""
        try:
            values = {name: values_of(self.criterion(name), call.rollouts) for name in call.names}
            correct = correctness(self.correct, call.rollouts[0]) if call.correct else None  # type: ignore[arg-type]
        except ScoringError as error:
            return CallResult(failure=str(error))
        return CallResult(values=values, correct=correct)

    async def async_result(self, call: RubricCall, *, limit_s: float | None) -> CallResult:
        """Call an async function, which may take as long as `limit_s`; None is without end."""
        (name,) = call.names
        try:
            values = await async_values_of(self.criterion(name), call.rollouts, limit_s=limit_s)
        except ScoringError as error:
            return CallResult(failure=str(error))
        return CallResult(values={name: values})

    def scores(
        self, group: Sequence[Rollout], calls: Sequence[RubricCall], results: Sequence[CallResult]
    ) -> list[Score]:
        """Of the rollouts of a problem, from the results of all their `calls`; without what was left out."""
        return [
            self._score(
                rollout,
                [
                    (result, call.places.index(i))
                    for call, result in zip(calls, results, strict=True)
                    if i in call.places
                ],
            )
            for i, rollout in enumerate(group)
        ]

    def _score(self, rollout: Rollout, results: Sequence[tuple[CallResult, int]]) -> Score:
        """`results`: of its calls, each with its place among the rollouts of the call."""
        failures = [rollout.failure, *(r.failure for r, _ in results)]
        for failure in failures:
            if failure is not None:
                return failed_score(failure, rollout=rollout)
        values = {name: given[at] for r, at in results for name, given in r.values.items()}
        given_by_environment = sum(t.observation.reward for t in rollout.turns)
        graded = [c for c in self.criteria if c.name in values]
        reward = sum(c.weight * values[c.name].value for c in graded) + given_by_environment
        if not math.isfinite(given_by_environment):
            reason = f"the environment's reward is {given_by_environment}, not a finite number"
            return failed_score(reason, rollout=rollout)
        if not math.isfinite(reward):
            return failed_score(f"weighted reward is {reward}, not a finite number", rollout=rollout)
        parts = {c.name: values[c.name].value for c in graded}
        if any(t.observation.reward for t in rollout.turns):
            parts[ENVIRONMENT] = given_by_environment
        asked = [r.correct for r, _ in results if r.correct is not None]
        answered = values | ({"correct": asked[0]} if asked and asked[0].unparsed else {})
        return Score(
            reward=reward,
            correct=self._is_correct(reward, values, asked),
            parts=parts,
            unparsed=tuple(name for name, value in answered.items() if value.unparsed),
        )

    def _is_correct(self, reward: float, values: dict[str, Value], asked: Sequence[Value]) -> bool:
        if isinstance(self.correct, str):
            return values[self.correct].value >= RIGHT
        return asked[0].value == 1.0 if asked else reward >= RIGHT

    # All of it, in this process and without a time limit

    def score(self, rollout: Rollout) -> Score:
        """The score of one rollout; functions of a group are given this one alone.

        A function that raises or gives no finite number, and a sum that is not finite, is a failed score,
        never a silent zero: it says which, on which problem, and why.
        """
        (score,) = score_here(self, [rollout], sync=self.result, time_limit_s=None)
        return score

    async def score_group(self, group: Sequence[Rollout], *, alone: bool = False) -> list[Score]:
        """Scores of a problem's rollouts; async functions overlap, sync ones keep the event loop busy."""
        calls = self.calls(group, alone=alone)
        waiting = [c for c in calls if self.is_async(c)]
        given = iter(await _overlapping(self, waiting, time_limit_s=None))
        return self.scores(group, calls, [next(given) if self.is_async(c) else self.result(c) for c in calls])


def score_here(
    rubric: Rubric,
    group: Sequence[Rollout],
    *,
    sync: Callable[[RubricCall], CallResult],
    time_limit_s: float | None,
) -> list[Score]:
    """Scores of a problem's rollouts, made in this process.

    Args:
        sync: makes the calls of sync functions, in this thread.
        time_limit_s: of each call of an async function, for each rollout of the call.
    """
    calls = rubric.calls(group)
    given: Iterator[CallResult] = iter(())
    if waiting := [c for c in calls if rubric.is_async(c)]:
        # In a thread of its own, as there may be a running event loop in this one.
        with ThreadPoolExecutor(1) as thread:
            overlapping = _overlapping(rubric, waiting, time_limit_s=time_limit_s)
            given = iter(thread.submit(asyncio.run, overlapping).result())
    return rubric.scores(group, calls, [next(given) if rubric.is_async(c) else sync(c) for c in calls])


async def _overlapping(
    rubric: Rubric, calls: Sequence[RubricCall], *, time_limit_s: float | None
) -> list[CallResult]:
    concurrency = Concurrency(MAX_CONCURRENCY)

    async def result(call: RubricCall) -> CallResult:
        async with concurrency.place(rubric.criterion(call.names[0])):
            limit_s = None if time_limit_s is None else time_limit_s * len(call.rollouts)
            return await rubric.async_result(call, limit_s=limit_s)

    return await asyncio.gather(*map(result, calls))


def failed_score(reason: str, *, rollout: Rollout) -> Score:
    """A score that says why there is none; its rollout is not trained on."""
    where = f"on problem {rollout.prompt.problem.id!r}, completion {shortened(repr(rollout.text))}"
    return Score(reward=0.0, correct=False, failure=f"{reason} {where}")
