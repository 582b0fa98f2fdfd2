"""Rubrics: values, correctness, unparsed answers and failures."""

import asyncio
import functools
import math
from dataclasses import replace

import numpy as np
import pytest

from rl.rollouts.rubric import Criterion, GroupCriterion, Rubric, UnparsedAnswer
from tests.support.scored import replied
from tests.support.virtual_time import run_in_virtual_time


def later(function):
    """Return an async function with the same result."""

    async def call(given):
        await asyncio.sleep(0)
        return function(given)

    return call


def number(rollout):
    return float(rollout.text)


class Numbers:
    """Async callable object."""

    async def __call__(self, rollout):
        return number(rollout)


def rank(rollouts):
    """Return 0 for the smallest number, 1 for the next."""
    ordered = sorted(number(r) for r in rollouts)
    return [ordered.index(number(r)) for r in rollouts]


def never(rollout):
    return False


def score_group(rubric, group):
    return asyncio.run(rubric.score_group(group))


def rubric_of(function, **settings):
    return Rubric(criteria=(Criterion(name="f", function=function),), **settings)


def failure(function, **settings):
    score = rubric_of(function, **settings).score(replied("1"))
    assert (score.reward, score.correct, score.parts) == (0.0, False, {})
    assert score.failure is not None
    return score.failure


@pytest.mark.parametrize("function", [number, later(number), Numbers(), functools.partial(later(number))])
def test_reward_is_the_weighted_sum_and_parts_are_unweighted(function):
    rubric = Rubric(
        criteria=(
            Criterion(name="a", function=function, weight=2.0),
            Criterion(name="b", function=number, weight=-0.5),
        ),
        correct=never,
    )
    score = rubric.score(replied("3"))
    assert score.reward == 2.0 * 3 - 0.5 * 3
    assert score.parts == {"a": 3.0, "b": 3.0}
    assert (score.failure, score.unparsed) == (None, ())


@pytest.mark.parametrize("function", [rank, later(rank)])
def test_group_function_gives_each_rollout_its_number(function):
    rubric = Rubric(
        criteria=(
            GroupCriterion(name="rank", function=function, weight=10.0),
            Criterion(name="number", function=number),
        ),
        correct=never,
    )
    scores = score_group(rubric, [replied("5"), replied("9"), replied("2")])
    assert [s.reward for s in scores] == [15.0, 29.0, 2.0]
    assert [s.parts for s in scores][1] == {"rank": 2.0, "number": 9.0}


def test_async_functions_overlap_up_to_max_concurrency_and_their_time_begins_with_their_turn():
    class Slow:
        max_concurrency = 2

        async def __call__(self, rollout):
            await asyncio.sleep(number(rollout))
            return 1.0

    rubric = rubric_of(Slow())

    async def results():
        calls, slots = rubric.calls([replied(text) for text in ("0.4", "0.4", "0.6", "0.4")]), rubric.slots(9)
        return await asyncio.gather(*(rubric.result(c, slots=slots, time_limit_s=0.5) for c in calls))

    found, took_s = run_in_virtual_time(results())
    late = "reward 'f' took longer than time_limit_s=0.5"
    assert [result.failure for result in found] == [None, None, late, None]
    assert took_s == pytest.approx(0.4 + 0.5)


def test_rollout_whose_environment_failed_is_seen_by_no_function():
    seen = []

    def see(what, value):
        seen.append(what)
        return value

    rubric = Rubric(
        criteria=(
            Criterion(name="one", function=lambda r: see(r.text, 1.0)),
            GroupCriterion(name="all", function=lambda rs: see([r.text for r in rs], [0.0] * len(rs))),
        ),
        correct=lambda r: see(r.text, True),
    )
    group = [replied("a"), replied("b", failure="step raised KeyError('x')"), replied("c")]
    scores = score_group(rubric, group)
    assert [s.failure is None for s in scores] == [True, False, True]
    assert "step raised KeyError('x') on problem 'sum-digits/47-82', completion 'b'" in scores[1].failure
    assert seen == ["a", "a", "c", "c", ["a", "c"]]
    assert rubric.calls([group[1]]) == []


@pytest.mark.parametrize(
    ("correct", "expected"),
    [
        (None, [False, True, False]),
        ("number", [True, True, True]),
        ("rank", [False, True, False]),
        (never, [False] * 3),
    ],
)
def test_correct_is_a_function_a_criterion_or_the_reward(correct, expected):
    rubric = Rubric(
        criteria=(
            Criterion(name="number", function=number, weight=0.5),
            # A reward that rounds to just below 1 is correct.
            GroupCriterion(
                name="rank", function=lambda rs: [0.0, 1.0 - 1e-7, 0.999], weight=0.5, needs_group=False
            ),
        ),
        correct=correct,
    )
    assert [s.correct for s in score_group(rubric, [replied("1")] * 3)] == expected


def digits(rollout):
    if not rollout.text.isdigit():
        raise UnparsedAnswer("no digits", value=-1.0)
    return number(rollout)


@pytest.mark.parametrize("function", [digits, later(digits)])
def test_unparsed_answer_gets_the_functions_value(function):
    rubric = Rubric(
        criteria=(Criterion(name="answer", function=function), Criterion(name="b", function=lambda r: 1.0)),
        correct=never,
    )
    good, bad = score_group(rubric, [replied("4"), replied("four")])
    assert (good.reward, good.unparsed) == (5.0, ())
    assert (bad.reward, bad.failure, bad.unparsed) == (0.0, None, ("answer",))
    assert bad.parts == {"answer": -1.0, "b": 1.0}


def raising(error):
    def function(rollout):
        raise error

    return function


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raising(ValueError("bad reply")), "raised ValueError('bad reply')"),
        (raising(SystemExit(3)), "raised SystemExit(3)"),
        (lambda r: math.nan, "gave nan, but must give a finite number"),
        (lambda r: None, "gave None (TypeError("),
        (lambda r: "high", "gave 'high' (ValueError("),
        (lambda r: ValueError("given"), "gave ValueError('given') (TypeError("),
        (lambda r: 10**400, "(OverflowError('int too large to convert to float')), but must give a finite"),
        (later(lambda r: 10**400), "(OverflowError('int too large to convert to float'))"),
        (later(raising(TimeoutError("the service's own"))), 'raised TimeoutError("the service\'s own")'),
        (later(raising(asyncio.CancelledError())), "raised CancelledError()"),
    ],
)
def test_function_without_a_finite_number_is_a_failed_score(function, message):
    text = failure(function)
    assert text.startswith("reward 'f' ")
    assert message in text
    assert text.endswith(" on problem 'sum-digits/47-82', completion '1'")


def test_correct_without_a_truth_value_is_a_failed_score():
    message = failure(number, correct=lambda r: np.array([1, 0]))
    assert message.startswith("correct raised ValueError('The truth value of an array")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda rs: (1 / 0 for _ in rs), "(ZeroDivisionError('division by zero')), but must give 2"),
        (lambda rs: [1.0], "reward 'g' gave [1.0], but must give 2 finite numbers"),
        (lambda rs: [1.0, math.nan], "reward 'g' gave [1.0, nan], but must give 2 finite"),
        (lambda rs: 1.0, "reward 'g' gave 1.0 (TypeError("),
        (raising(OSError("gone")), "reward 'g' raised OSError('gone')"),
    ],
)
def test_failing_group_function_fails_all_scores_of_the_group(function, message):
    rubric = Rubric(
        criteria=(Criterion(name="one", function=number), GroupCriterion(name="g", function=function))
    )
    scores = score_group(rubric, [replied("1"), replied("2")])
    assert [s.reward for s in scores] == [0.0, 0.0]
    assert all(message in s.failure for s in scores)


ONE = Criterion(name="one", function=number)


class NoPlaces(Numbers):
    max_concurrency = 0


RANKED = GroupCriterion(name="ranked", function=rank)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Criterion(name="a", function=number, weight=math.nan), "weight=nan is not a finite number"),
        (lambda: Criterion(name="", function=number), "name='': must not be empty"),
        (lambda: Criterion(name="one", function=None), "function=None is not callable"),  # type: ignore[arg-type]
        (lambda: Criterion(name="j", function=NoPlaces()), "max_concurrency=0 is not a number"),
        (lambda: Rubric(criteria=(ONE, ONE)), "two criteria have the name 'one'"),
        (lambda: Rubric(criteria=(replace(ONE, name="overlong"),)), "the name 'overlong', reserved for"),
        (lambda: Rubric(criteria=(ONE,), correct="two"), "correct='two' is not a criterion of the rubric"),
        (lambda: Rubric(criteria=(ONE, RANKED), correct="ranked"), r"correct='ranked' compares the rollouts"),
        (lambda: Rubric(criteria=(ONE,), correct=later(number)), "correct is an async function"),
    ],
)
def test_invalid_criteria_and_rubrics_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
