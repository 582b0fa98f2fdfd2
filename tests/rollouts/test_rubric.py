"""Rubrics: values, correctness, unparsed answers and failures."""

import asyncio
import functools
import math
import re
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from itertools import repeat

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


@pytest.mark.parametrize(
    "function", [number, later(number), Numbers(), functools.partial(later(number))]
)
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
        calls, slots = (
            rubric.list_calls([replied(text) for text in ("0.4", "0.4", "0.6", "0.4")]),
            rubric.make_slots(9),
        )
        return await asyncio.gather(
            *(rubric.compute_result(c, slots=slots, time_limit_s=0.5) for c in calls)
        )

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
            GroupCriterion(
                name="all", function=lambda rs: see([r.text for r in rs], [0.0] * len(rs))
            ),
        ),
        correct=lambda r: see(r.text, True),
    )
    group = [replied("a"), replied("b", failure="step raised KeyError('x')"), replied("c")]
    scores = score_group(rubric, group)
    assert [s.failure is None for s in scores] == [True, False, True]
    assert (
        "step raised KeyError('x') on problem 'sum-digits/47-82', completion 'b'"
        in scores[1].failure
    )
    assert seen == ["a", "a", "c", "c", ["a", "c"]]
    assert rubric.list_calls([group[1]]) == []


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
                name="rank",
                function=lambda rs: [0.0, 1.0 - 1e-7, 0.999],
                weight=0.5,
                needs_group=False,
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
        criteria=(
            Criterion(name="answer", function=function),
            Criterion(name="b", function=lambda r: 1.0),
        ),
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
        (
            lambda r: None,
            "gave None (it returned nothing: does a path through it lack `return`?), but must",
        ),
        (
            lambda r: later(number)(r),
            "(a coroutine: define the function itself with `async def`), but must give a",
        ),
        (lambda r: "high", "gave 'high' (ValueError("),
        (lambda r: ValueError("given"), "gave ValueError('given') (TypeError("),
        (
            lambda r: 10**400,
            "(OverflowError('int too large to convert to float')), but must give a finite",
        ),
        (later(lambda r: 10**400), "(OverflowError('int too large to convert to float'))"),
        (
            later(raising(TimeoutError("the service's own"))),
            'raised TimeoutError("the service\'s own")',
        ),
        (later(raising(asyncio.CancelledError())), "raised CancelledError()"),
    ],
)
def test_function_without_a_finite_number_is_a_failed_score(function, message):
    text = failure(function)
    assert text.startswith("reward 'f' ")
    assert message in text
    assert text.endswith(" on problem 'sum-digits/47-82', completion '1'")


@pytest.mark.parametrize(
    "value", [True, np.bool_(1), 1, np.float32(1), np.array(1.0), Fraction(1), Decimal(1)]
)
def test_numbers_of_any_library_are_rewards(value):
    assert rubric_of(lambda r: value).score(replied("1")).reward == 1.0


@pytest.mark.parametrize(
    "value", ["1.0", b"1", 1 + 0j, [1.0], np.array(["1"]), np.array([1.0, 2.0]), {"a": 1.0}]
)
def test_value_that_is_no_single_number_is_refused_by_name(value):
    assert "but must give a finite number" in failure(lambda r: value)
    assert "its UnparsedAnswer gave" in failure(raising(UnparsedAnswer(value=value)))


@pytest.mark.parametrize("value", [1e39, -1e200, 1e16])
def test_reward_that_no_advantage_can_hold_is_refused_by_name(value):
    text = failure(lambda r: value)
    assert text.startswith(
        f"reward 'f' gave {value} with weight 1, but a weighted reward must be within 1e+15 of 0"
    )
    assert rubric_of(lambda r: 1e15).score(replied("1")).failure is None
    metric = Criterion(name="m", function=lambda r: 1e39, weight=0.0)  # only reported
    assert Rubric(criteria=(metric,)).score(replied("1")).parts == {"m": 1e39}
    summed = Rubric(criteria=tuple(Criterion(name=n, function=lambda r: 1e15) for n in "ab"))
    assert "the weighted reward is 2e+15" in str(summed.score(replied("1")).failure)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, False), (np.bool_(1), True), (0.0, False), (re.match("1", "1"), True)],
)
def test_correct_takes_truth_values(value, expected):
    assert rubric_of(number, correct=lambda r: value).score(replied("1")).correct is expected


@pytest.mark.parametrize(
    "value",
    ["False", b"0", 0.5, math.nan, (False, "why"), {"correct": False}, "x".isdigit, iter([])],
    ids=lambda value: type(value).__name__,
)
def test_correct_that_would_always_be_true_is_refused(value):
    assert "correct gave " in failure(number, correct=lambda r: value)


def pops(rollout):
    """Reward function that works through a list of the problem."""
    questions = rollout.prompt.problem.info["questions"]
    return float(len([questions.pop() for _ in range(len(questions))]))


def test_each_function_sees_the_problem_as_the_task_made_it():
    of_group = GroupCriterion(name="group", function=lambda rs: [pops(rs[0]), 0.0])
    rubric = Rubric(
        criteria=(
            Criterion(name="a", function=pops),
            Criterion(name="b", function=pops),
            Criterion(name="later", function=later(pops)),
            of_group,
        ),
        correct=lambda r: pops(r) == 4.0,
    )
    given = replied("1")
    problem = replace(given.prompt.problem, info={"questions": [1, 2, 3, 4]})
    given = replace(given, prompt=replace(given.prompt, problem=problem))
    for _ in range(2):
        scores = score_group(rubric, [given, given])
        assert [s.reward for s in scores] == [16.0, 12.0]
        assert all(s.correct for s in scores)
    assert problem.info == {"questions": [1, 2, 3, 4]}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_function_that_changes_tokens_or_metrics_is_named(asynchronous):
    def clear(rollout):
        rollout.completion.logprobs[:] = 0.0
        return 1.0

    def count(rollout):
        rollout.turns[0].observation.metrics["moves"] = 0.0
        return 1.0

    for function in (clear, count):
        assert re.match(
            "reward 'f' raised .*read-only", failure(later(function) if asynchronous else function)
        )


def test_correct_without_a_truth_value_is_a_failed_score():
    message = failure(number, correct=lambda r: np.array([1, 0]))
    assert message.startswith("correct gave array([1, 0]) (ValueError(")
    assert "must give True or False" in message


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda rs: (1 / 0 for _ in rs),
            "(ZeroDivisionError('division by zero')), but must give 2",
        ),
        (lambda rs: [1.0], "reward 'g' gave [1.0], but must give 2 finite numbers"),
        (lambda rs: [1.0, math.nan], "reward 'g' gave [1.0, nan], but must give 2 finite"),
        (lambda rs: 1.0, "reward 'g' gave 1.0 (TypeError("),
        (
            lambda rs: {0: 0.5, 1: 0.25},
            "(TypeError('a dict is not a sequence of numbers')), but must give 2",
        ),
        (lambda rs: {0: 0.5, 1: 0.25}.keys(), "a dict_keys is not a sequence of numbers"),
        (lambda rs: {0.5, 0.25}, "a set is not a sequence of numbers"),
        (lambda rs: "12", "gave '12' (TypeError('a str is not a sequence of numbers'))"),
        (lambda rs: b"12", "a bytes is not a sequence of numbers"),
        (lambda rs: ["1", "2"], "gave ['1', '2'] (ValueError('a str is not a number'))"),
        (lambda rs: Frame(), "a Frame is not a sequence of numbers"),
        (lambda rs: repeat(1.0), "gave repeat(1.0), but must give 2 finite numbers"),
        (lambda rs: np.ones((1, 2)), "but must give 2 finite numbers"),
        (lambda rs: [1.0, 1e39], "gave [1.0, 1e+39] with weight 1, but"),
        (raising(OSError("gone")), "reward 'g' raised OSError('gone')"),
    ],
)
def test_failing_group_function_fails_all_scores_of_the_group(function, message):
    rubric = Rubric(
        criteria=(
            Criterion(name="one", function=number),
            GroupCriterion(name="g", function=function),
        )
    )
    scores = score_group(rubric, [replied("1"), replied("2")])
    assert [s.reward for s in scores] == [0.0, 0.0]
    assert all(message in s.failure for s in scores)


class Frame(list):
    """Stand-in for a data frame, which iterates over its columns."""

    def keys(self):
        return [0, 1]


@pytest.mark.parametrize(
    "values",
    [
        (1.0, 2.0),
        np.array([1, 2]),
        np.array([[1.0], [2.0]]),
        (v for v in (1.0, 2.0)),
        {"a": 1, "b": 2}.values(),
    ],
)
def test_ordered_collections_of_any_library_are_group_rewards(values):
    rubric = Rubric(criteria=(GroupCriterion(name="g", function=lambda rs: values),))
    assert [s.reward for s in score_group(rubric, [replied("1"), replied("2")])] == [1.0, 2.0]


ONE = Criterion(name="one", function=number)


class NoPlaces(Numbers):
    max_concurrency = 0


RANKED = GroupCriterion(name="ranked", function=rank)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Criterion(name="a", function=number, weight=math.nan),
            "weight=nan is not a finite number",
        ),
        (
            lambda: Criterion(name="a", function=number, weight=1e39),
            r"weight=1e\+39 is not a finite number",
        ),
        (
            lambda: Criterion(name="a", function=number, weight="1"),  # type: ignore[arg-type]
            "weight='1' is not a finite number",
        ),
        (lambda: Criterion(name="", function=number), "name='': must not be empty"),
        (lambda: Criterion(name="one", function=None), "function=None is not callable"),  # type: ignore[arg-type]
        (lambda: Criterion(name="j", function=NoPlaces()), "max_concurrency=0 is not a number"),
        (lambda: Rubric(criteria=(ONE, ONE)), "two criteria have the name 'one'"),
        (
            lambda: Rubric(criteria=(replace(ONE, name="overlong"),)),
            "the name 'overlong', reserved for",
        ),
        (
            lambda: Rubric(criteria=(ONE,), correct="two"),
            "correct='two' is not a criterion of the rubric",
        ),
        (
            lambda: Rubric(criteria=(ONE, RANKED), correct="ranked"),
            r"correct='ranked' compares the rollouts",
        ),
        (lambda: Rubric(criteria=(ONE,), correct=later(number)), "correct is an async function"),
    ],
)
def test_invalid_criteria_and_rubrics_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
