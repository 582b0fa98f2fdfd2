"""Functions of a group that are given a single rollout."""

import asyncio

import pytest

from rl.rollouts.rubric import Criterion, GroupCriterion, Rubric
from rl.rollouts.scoring_limit import score_group_within
from tests.support.scored import replied


def number(rollout):
    return float(rollout.text)


def score_group(rubric, group):
    return asyncio.run(rubric.score_group(group))


def among_the_others(rollouts):
    return [1.0 / (len(rollouts) - 1) for _ in rollouts]


async def among_the_others_later(rollouts):
    await asyncio.sleep(0)
    return among_the_others(rollouts)


@pytest.mark.parametrize("function", [among_the_others, among_the_others_later])
@pytest.mark.parametrize("needs_group", [True, False])
def test_a_group_function_that_fails_on_a_single_rollout_fails_its_score(function, needs_group):
    group_function = GroupCriterion(name="g", function=function, needs_group=needs_group)
    rubric = Rubric(criteria=(Criterion(name="one", function=number), group_function))
    (single,) = score_group(rubric, [replied("1")])
    assert "reward 'g' raised ZeroDivisionError" in str(single.failure)
    assert rubric.score(replied("1")) == single
    # The last one whose environment did not fail is no other case.
    survivor, lost = score_group(rubric, [replied("1"), replied("1", failure="step raised OSError()")])
    assert survivor == single
    assert "step raised" in str(lost.failure)


def test_an_async_group_function_that_takes_too_long_for_a_single_rollout_fails_its_score():
    async def never_ends(rollouts):
        await asyncio.Event().wait()

    rubric = Rubric(criteria=(GroupCriterion(name="g", function=never_ends),))
    (score,) = score_group_within(rubric, [replied("1")], 0.05)
    assert "reward 'g' took longer than time_limit_s=0.05" in str(score.failure)


@pytest.mark.parametrize("function", [among_the_others, among_the_others_later])
def test_functions_that_compare_rollouts_are_left_out_of_those_that_stand_alone(function):
    def scores_of(**settings):
        group_function = GroupCriterion(name="g", function=function, **settings)
        rubric = Rubric(criteria=(Criterion(name="one", function=number), group_function), correct="one")
        return asyncio.run(rubric.score_group([replied("1")], alone=True))

    (score,) = scores_of()
    assert (score.reward, score.correct, score.parts, score.failure) == (1.0, True, {"one": 1.0}, None)
    (called,) = scores_of(needs_group=False)
    assert "reward 'g' raised ZeroDivisionError" in called.failure
