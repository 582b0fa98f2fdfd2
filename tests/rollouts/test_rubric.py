import asyncio
import functools
import math
import pickle

import pytest

from rl.rollouts.rubric import Criterion, GroupCriterion, Rubric, UnparsedAnswer
from tests.support.scored import replied


def number(rollout):
    return float(rollout.text)


async def number_later(rollout):
    await asyncio.sleep(0)
    return number(rollout)


class Numbers:
    """Calls of it overlap."""

    async def __call__(self, rollout):
        return await number_later(rollout)


def rank(rollouts):
    """0 for the smallest number, 1 for the next."""
    ordered = sorted(number(r) for r in rollouts)
    return [ordered.index(number(r)) for r in rollouts]


async def rank_later(rollouts):
    await asyncio.sleep(0)
    return rank(rollouts)


def never(rollout):
    return False


def score_group(rubric, group):
    return asyncio.run(rubric.score_group(group))


def rubric_of(function, **settings):
    return Rubric(criteria=(Criterion(name="f", function=function),), **settings)


def failure(function, *texts, **settings):
    score = rubric_of(function, **settings).score(replied(*texts or ("1",)))
    assert (score.reward, score.correct, score.parts) == (0.0, False, {})
    assert score.failure is not None
    return score.failure


# Values


@pytest.mark.parametrize("function", [number, number_later, Numbers(), functools.partial(number_later)])
def test_the_reward_is_the_weighted_sum_and_parts_are_without_weight(function):
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


@pytest.mark.parametrize("function", [rank, rank_later])
def test_a_function_of_a_group_gives_each_rollout_its_number(function):
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


def test_scores_can_be_made_within_a_running_event_loop():
    async def inside():
        return rubric_of(number_later).score(replied("1"))

    assert asyncio.run(inside()).reward == 1.0


def test_async_functions_of_a_group_overlap_as_far_as_their_max_concurrency():
    class Counting:
        max_concurrency = 3

        def __init__(self):
            self.now = self.most = 0

        async def __call__(self, rollout):
            self.now += 1
            self.most = max(self.most, self.now)
            for _ in range(5):
                await asyncio.sleep(0)
            self.now -= 1
            return 1.0

    counting = Counting()
    scores = score_group(rubric_of(counting), [replied("1") for _ in range(8)])
    assert [s.reward for s in scores] == [1.0] * 8
    assert counting.most == 3


# The environment's rewards


def test_the_environments_rewards_are_added_over_the_turns():
    score = rubric_of(number).score(replied("7", "1", rewards=[0.25, 0.5]))
    assert score.reward == 1.75
    assert score.parts == {"f": 1.0, "environment": 0.75}


def test_without_criteria_the_reward_is_the_environments():
    scores = score_group(Rubric(), [replied("a", "b", rewards=[0.0, 1.0]), replied("a")])
    assert [(s.reward, s.correct) for s in scores] == [(1.0, True), (0.0, False)]
    assert [s.parts for s in scores] == [{"environment": 1.0}, {}]


def test_an_environments_reward_that_is_not_finite_is_a_failed_score():
    score = rubric_of(number).score(replied("1", rewards=[math.nan]))
    assert "the environment's reward is nan" in score.failure


def test_a_rollout_whose_environment_failed_is_a_failed_score_and_no_function_sees_it():
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


# Correct


@pytest.mark.parametrize(
    ("correct", "says"),
    [
        (None, [False, True, False]),
        ("number", [True, True, True]),
        ("rank", [False, True, False]),
        (never, [False] * 3),
    ],
)
def test_correct_is_a_function_a_criterion_or_a_whole_reward(correct, says):
    rubric = Rubric(
        criteria=(
            Criterion(name="number", function=number, weight=0.5),
            GroupCriterion(
                name="rank", function=lambda rs: [0.0, 1.0 - 1e-7, 0.999], weight=0.5, needs_group=False
            ),
        ),
        correct=correct,
    )
    assert [s.correct for s in score_group(rubric, [replied("1")] * 3)] == says


def test_a_sum_of_weights_that_rounds_below_one_is_right():
    names = {"a": 0.6, "b": 0.3, "c": 0.1}
    criteria = tuple(Criterion(name=n, function=lambda r: 1.0, weight=w) for n, w in names.items())
    score = Rubric(criteria=criteria).score(replied("x"))
    assert score.reward < 1
    assert score.correct


# Replies without an answer


def unparsed(value):
    def function(rollout):
        if not rollout.text.isdigit():
            raise UnparsedAnswer("no digits", value=value)
        return float(rollout.text)

    return function


async def unparsed_later(rollout):
    return unparsed(-1.0)(rollout)


@pytest.mark.parametrize("function", [unparsed(-1.0), unparsed_later])
def test_a_reply_without_an_answer_is_counted_and_gets_what_the_function_says(function):
    rubric = Rubric(
        criteria=(Criterion(name="answer", function=function), Criterion(name="b", function=lambda r: 1.0)),
        correct=never,
    )
    good, bad = score_group(rubric, [replied("4"), replied("four")])
    assert (good.reward, good.unparsed) == (5.0, ())
    assert (bad.reward, bad.failure, bad.unparsed) == (0.0, None, ("answer",))
    assert bad.parts == {"answer": -1.0, "b": 1.0}


def test_a_group_function_that_finds_no_answer_gives_its_value_to_all():
    def nothing(rollouts):
        raise UnparsedAnswer(value=0.25)

    rubric = Rubric(criteria=(GroupCriterion(name="g", function=nothing),))
    scores = score_group(rubric, [replied("a"), replied("b")])
    assert [(s.reward, s.unparsed) for s in scores] == [(0.25, ("g",))] * 2


def test_a_correct_that_finds_no_answer_says_no_and_is_counted():
    score = rubric_of(lambda r: 1.0, correct=unparsed(1.0)).score(replied("four"))
    assert (score.reward, score.correct, score.unparsed) == (1.0, False, ("correct",))


def test_the_value_of_an_unparsed_answer_is_finite_and_survives_a_pickle():
    assert "the value of its UnparsedAnswer is nan" in failure(unparsed(math.nan), "four")
    copy = pickle.loads(pickle.dumps(UnparsedAnswer("why", value=0.5)))
    assert (str(copy), copy.value) == ("why", 0.5)


# Failures


def raising(error):
    def function(rollout):
        raise error

    return function


async def raises_timeout(rollout):
    raise TimeoutError("the service's own")


async def raises_cancelled(rollout):
    raise asyncio.CancelledError


class NoReprError(Exception):
    def __repr__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (raising(ValueError("bad reply")), "raised ValueError('bad reply')"),
        (raising(SystemExit(3)), "raised SystemExit(3)"),
        (raising(NoReprError()), "raised a NoReprError that has no repr"),
        (lambda r: math.nan, "is nan, not a finite number"),
        (lambda r: -math.inf, "is -inf, not a finite number"),
        (lambda r: None, "is None, not a number"),
        (lambda r: "high", "is 'high', not a number"),
        (
            lambda r: number_later(r),
            "returned something to await: define the function itself with `async def`",
        ),
        (raises_timeout, 'raised TimeoutError("the service\'s own")'),
        (raises_cancelled, "raised CancelledError()"),
    ],
)
def test_a_function_without_a_finite_number_is_a_failed_score_that_says_why(function, says):
    text = failure(function, "1")
    assert text == f"reward 'f' {says} on problem 'sum-digits/47-82', completion '1'"


def test_a_raising_correct_is_a_failed_score_that_names_it():
    text = failure(number, correct=raising(KeyError("answer")))
    assert "correct raised KeyError('answer') on problem 'sum-digits/47-82'" in text


def test_a_weighted_sum_that_overflows_is_a_failed_score():
    rubric = Rubric(criteria=(Criterion(name="obey", function=number, weight=1e308),), correct=never)
    assert rubric.score(replied("1")).reward == 1e308
    score = rubric.score(replied("10"))
    assert "weighted reward is inf" in str(score.failure)
    assert score.reward == 0.0


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda rs: [1.0], "reward 'g' gave 1 numbers for the 2 rollouts of the group"),
        (lambda rs: [1.0, math.nan], "reward 'g', number 1, is nan, not a finite number"),
        (lambda rs: 1.0, "reward 'g' is 1.0, where 2 numbers are wanted"),
        (raising(OSError("gone")), "reward 'g' raised OSError('gone')"),
    ],
)
def test_a_group_function_that_fails_fails_all_scores_of_the_group(function, says):
    rubric = Rubric(
        criteria=(Criterion(name="one", function=number), GroupCriterion(name="g", function=function))
    )
    scores = score_group(rubric, [replied("1"), replied("2")])
    assert [s.reward for s in scores] == [0.0, 0.0]
    assert all(says in s.failure for s in scores)


def test_a_failing_function_fails_its_own_rollout_alone():
    rubric = rubric_of(number)
    scores = score_group(rubric, [replied("1"), replied("one"), replied("2")])
    assert [s.failure is None for s in scores] == [True, False, True]


def test_a_long_completion_is_shortened_in_the_message():
    text = failure(raising(ValueError("x" * 100_000)), "y" * 100_000)
    assert len(text) < 10_000
    assert "characters more" in text


# What a rubric refuses


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("kind", "called"), [(Criterion, "criterion"), (GroupCriterion, "group criterion")])
def test_a_weight_that_is_not_finite_is_refused_by_name(kind, called, weight):
    with pytest.raises(ValueError, match=f"{called} 'obey': weight={weight} is not a finite number"):
        kind(name="obey", function=number, weight=weight)


def test_names_functions_and_correct_that_do_not_fit_are_refused():
    one = Criterion(name="one", function=number)
    with pytest.raises(ValueError, match="name='': must be a text"):
        Criterion(name="", function=number)
    with pytest.raises(ValueError, match="function=None cannot be called: give a function of a rollout"):
        Criterion(name="one", function=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="two criteria have the name 'one'"):
        Rubric(criteria=(one, GroupCriterion(name="one", function=rank)))
    for name in ("environment", "overlong"):
        with pytest.raises(ValueError, match=f"a criterion has the name '{name}', which is for "):
            Rubric(criteria=(Criterion(name=name, function=number),))
    with pytest.raises(ValueError, match="correct='two' is no criterion of the rubric: it has one"):
        Rubric(criteria=(one,), correct="two")
    ranked = GroupCriterion(name="ranked", function=rank)
    with pytest.raises(ValueError, match=r"correct='ranked' compares the rollouts .*needs_group=False"):
        Rubric(criteria=(one, ranked), correct="ranked")
    with pytest.raises(ValueError, match="correct is an async function"):
        Rubric(criteria=(one,), correct=number_later)  # type: ignore[arg-type]

    class Judge:
        max_concurrency = 0

        async def __call__(self, rollout):
            return 1.0

    with pytest.raises(
        ValueError, match="criterion 'judge': max_concurrency=0 is not a number of at least 1"
    ):
        Criterion(name="judge", function=Judge())
