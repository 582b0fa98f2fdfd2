"""Groups: scored rollouts, token rewards and the overlong punishment."""

import asyncio
from collections.abc import Callable

import pytest

from rl.protocols import Environment
from rl.rollouts.advantage import OverlongPunishment
from rl.rollouts.environment import Environments, SingleTurn
from rl.rollouts.episode import Episodes
from rl.rollouts.group import Group, RolloutWorker, ScoredRollout, compute_token_rewards
from rl.rollouts.producer import find_reason_to_drop
from rl.rollouts.rubric import Criterion, Rubric
from rl.types import Problem, SamplingParams, Score
from tests.support.conversations import (
    Counting,
    ScriptedGenerator,
    TwinRenderer,
    conversation,
    drawn,
)
from tests.support.fakes import RubricRewarder

PROBLEM = Problem(id="p", question="q", answer="y")
RUBRIC = Rubric(
    criteria=(Criterion(name="yes", function=lambda rollout: float("y" in rollout.text)),)
)


def group_of(
    *replies: str,
    later: str | None = None,
    environment: Callable[[Problem], Environment] = SingleTurn.of,
    limit: int = 100,
) -> Group:
    """Return a group with these first replies, and `later` in the second turn; a letter is a
    token.
    """

    def reply(prompt: str, sampling: SamplingParams, sample: int) -> str:
        return replies[sample] if later is None or "more" not in prompt else later

    worker = RolloutWorker(
        episodes=Episodes(
            generator=ScriptedGenerator(reply=reply),
            renderer=TwinRenderer(),
            environments=Environments(make=environment),
            max_tokens=limit,
        ),
        rewarder=RubricRewarder(rubric=RUBRIC),
        sampling=SamplingParams(max_tokens=10, num_samples=len(replies)),
        seed=0,
        overlong=OverlongPunishment(enable=True, buffer_tokens=4),
    )
    return asyncio.run(worker.run(0, PROBLEM))


def test_seed_and_session_of_a_group_are_those_of_its_number_in_every_turn():
    generator = ScriptedGenerator(reply=lambda prompt, sampling, sample: "y")
    worker = RolloutWorker(
        episodes=Episodes(
            generator=generator,
            renderer=TwinRenderer(),
            environments=Environments(make=lambda problem: Counting(problem=problem, turns=1)),
            max_tokens=100,
        ),
        rewarder=RubricRewarder(rubric=RUBRIC),
        sampling=SamplingParams(max_tokens=10),
        seed=7,
    )
    for number in (3, 4):
        asyncio.run(worker.run(number, PROBLEM))
    assert [params.seed for _, params in generator.asked[::2]] == [7_000_024, 7_000_025]
    assert generator.sessions == ["problem 3"] * 2 + ["problem 4"] * 2


def test_overlong_punishment_does_not_make_rewards_unequal():
    group = group_of("y", "yy", "y", "yyyyyyy")
    # 8 tokens of 10, where the buffer begins after 6.
    assert [score.overlong for score in group.scores] == [0, 0, 0, -0.5]
    assert [score.reward for score in group.scores] == [1, 1, 1, 1]
    assert find_reason_to_drop(group, drop_equal=True, max_sample_tokens=None) == "equal"
    # The punishment counts if such groups are trained on.
    assert [compute_token_rewards(member, by_turn=False).sum() for member in group.scored] == [
        1,
        1,
        1,
        0.5,
    ]
    unequal = group_of("y", "n")
    assert find_reason_to_drop(unequal, drop_equal=True, max_sample_tokens=None) is None


def two_turns(problem: Problem) -> Counting:
    return Counting(problem=problem, turns=1)


# An opening of 7 tokens, a reply of 3, and 16 with the next question.
@pytest.mark.parametrize(
    ("limit", "end", "finish", "punishment"),
    [(29, "done", "stop", 0.0), (28, "done", "length", -1.0), (26, "tokens", "stop", -1.0)],
)
def test_episode_that_ran_out_of_tokens_counts_as_one_at_the_limit(limit, end, finish, punishment):
    group = group_of("yy", environment=two_turns, limit=limit)
    (rollout,) = group.rollouts
    assert (rollout.end, rollout.completion.finish_reason) == (end, finish)
    assert len(rollout.completion.token_ids) <= 3
    assert group.scores[0].overlong == punishment


def member(reward, *, rewards=()):
    rollout = conversation((2, drawn(5, 6)), (1, drawn(7)), (4, drawn(8, 9, 10)), rewards=rewards)
    return ScoredRollout(rollout=rollout, score=Score(reward=reward, correct=False))


@pytest.mark.parametrize(
    ("rewards", "by_turn", "expected"),
    [
        ((0.5, 0.25), False, [0, 0, 0, 0, 0, 1.5]),
        ((0.5, 0.25), True, [0, 0.5, 0.25, 0, 0, 0.75]),
        (
            (0.5, 0.0, 0.125),
            True,
            [0, 0.5, 0, 0, 0, 1.0],
        ),  # that of the last reply stands at the end too
    ],
)
def test_rewards_stand_at_the_last_token_or_at_the_end_of_each_turn(rewards, by_turn, expected):
    assert compute_token_rewards(member(1.5, rewards=rewards), by_turn=by_turn).tolist() == expected
