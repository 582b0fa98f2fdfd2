"""From a problem to a scored group: what the overlong punishment takes off, and what it leaves equal."""

import asyncio
from collections.abc import Callable

import pytest

from rl.protocols import Environment
from rl.rollouts.environment import SingleTurn
from rl.rollouts.episodes import Episodes
from rl.rollouts.grading import token_rewards
from rl.rollouts.group import Group, RolloutWorker
from rl.rollouts.overlong import OverlongPunishment
from rl.rollouts.producer import GroupFilter
from rl.rollouts.rubric import Criterion, Rubric
from rl.rollouts.settings import EpisodeLimits
from rl.types import Problem, SamplingParams
from tests.support.conversations import Counting, ScriptedSampler, TwinRenderer
from tests.support.fakes import RubricScorer

PROBLEM = Problem(id="p", question="q", answer="y")
RUBRIC = Rubric(criteria=(Criterion(name="yes", function=lambda rollout: float("y" in rollout.text)),))


def group_of(
    *replies: str,
    later: str | None = None,
    environment: Callable[[Problem], Environment] = SingleTurn.of,
    limit: int = 100,
) -> Group:
    """The group of samples that reply so, and with `later` in later turns; one token a letter, and one that
    ends it."""

    def reply(prompt: str, sampling: SamplingParams, sample: int) -> str:
        return replies[sample] if later is None or "more" not in prompt else later

    worker = RolloutWorker(
        episodes=Episodes(
            sampler=ScriptedSampler(reply=reply),
            renderer=TwinRenderer(),
            environment=environment,
            limits=EpisodeLimits(),
            max_tokens=limit,
        ),
        scorer=RubricScorer(rubric=RUBRIC),
        sampling=SamplingParams(max_tokens=10, num_samples=len(replies)),
        seed=0,
        overlong=OverlongPunishment(enable=True, buffer_tokens=4),
    )
    return asyncio.run(worker.run(0, PROBLEM))


def test_right_replies_are_a_group_of_equal_rewards_though_one_is_long():
    group = group_of("y", "yy", "y", "yyyyyyy")
    # 8 tokens of 10, where the buffer begins after 6.
    assert [score.overlong for score in group.scores] == [0, 0, 0, -0.5]
    assert [score.reward for score in group.scores] == [1, 1, 1, 1]
    assert GroupFilter(drop_equal=True, max_sample_tokens=None).reason_to_drop(group) == "equal"
    # Where such groups are trained on, the punishment is.
    assert [token_rewards(member, by_turn=False).sum() for member in group.scored] == [1, 1, 1, 0.5]
    unequal = group_of("y", "n")
    assert GroupFilter(drop_equal=True, max_sample_tokens=None).reason_to_drop(unequal) is None


def test_a_reply_that_was_cut_off_is_at_the_limit():
    (score,) = group_of("y" * 20).scores
    assert (score.overlong, score.parts["overlong"]) == (-1.0, -1.0)


def two_turns(problem: Problem) -> Counting:
    return Counting(problem=problem, turns=1)


# An opening of 7 tokens, a reply of 3, and 16 with the next question.
@pytest.mark.parametrize(
    ("limit", "end", "finish", "punishment"),
    [(29, "done", "stop", 0.0), (28, "done", "length", -1.0), (26, "tokens", "stop", -1.0)],
)
def test_an_episode_that_ran_out_of_room_is_at_the_limit_however_short_its_replies(
    limit, end, finish, punishment
):
    group = group_of("yy", environment=two_turns, limit=limit)
    (rollout,) = group.rollouts
    assert (rollout.end, rollout.completion.finish_reason) == (end, finish)
    assert len(rollout.completion.token_ids) <= 3
    assert group.scores[0].overlong == punishment


def test_the_length_of_earlier_turns_is_not_punished():
    group = group_of("yyyyyyy", later="y", environment=two_turns)
    assert [len(turn.completion.token_ids) for turn in group.rollouts[0].turns] == [8, 2]
    assert group.scores[0].overlong == 0.0
    assert group_of("y", later="yyyyyyy", environment=two_turns).scores[0].overlong == -0.5
