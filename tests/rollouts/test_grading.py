"""Which rollouts count, and what of their rewards belongs to which token."""

from dataclasses import replace

import pytest

from rl.rollouts.grading import ScoredRollout, equal_rewards, scored, token_rewards
from rl.types import Score
from tests.support.conversations import conversation, drawn


def member(reward, *, rewards=()):
    rollout = conversation((2, drawn(5, 6)), (1, drawn(7)), (4, drawn(8, 9, 10)), rewards=rewards)
    return ScoredRollout(rollout=rollout, score=Score(reward=reward, correct=False))


def test_the_reward_of_a_rollout_is_at_the_last_token_that_the_model_produced():
    assert token_rewards(member(1.5, rewards=(0.5, 0.25)), by_turn=False).tolist() == [0, 0, 0, 0, 0, 1.5]


def test_by_turn_each_reply_has_what_it_was_given_and_the_rest_comes_at_the_end():
    rewards_C = token_rewards(member(1.5, rewards=(0.5, 0.25)), by_turn=True)
    assert rewards_C.tolist() == [0, 0.5, 0.25, 0, 0, 0.75]
    # What the environment gave the last reply is there with the rest.
    rewards_C = token_rewards(member(1.5, rewards=(0.5, 0.0, 0.125)), by_turn=True)
    assert rewards_C.tolist() == [0, 0.5, 0, 0, 0, 1.0]


@pytest.mark.parametrize("rewards", [(), (0.1, 0.2), (-3.0, 0.7, 0.3)])
@pytest.mark.parametrize("by_turn", [False, True])
def test_rewards_of_tokens_sum_to_the_rollouts(rewards, by_turn):
    assert token_rewards(member(0.3, rewards=rewards), by_turn=by_turn).sum() == pytest.approx(0.3, abs=1e-12)


def test_rollouts_whose_score_failed_are_left_out_and_the_others_keep_their_order():
    rollouts = [conversation((1, drawn(5)), sample=i) for i in range(4)]
    failed = Score(reward=9.0, correct=False, failure="raised")
    scores = [Score(reward=1.0, correct=True), failed, Score(reward=0.0, correct=False), failed]
    left = scored(rollouts, scores)
    assert [(m.rollout.sample, m.score.reward) for m in left] == [(0, 1.0), (2, 0.0)]
    assert scored(rollouts, [failed] * 4) == []


def test_a_rollout_whose_environment_failed_is_left_out_whatever_its_score():
    whole = conversation((1, drawn(5)))
    score = Score(reward=1.0, correct=True)
    assert [m.rollout for m in scored([replace(whole, failure="it broke"), whole], [score] * 2)] == [whole]


def test_a_group_is_of_equal_rewards_where_no_sample_did_better():
    assert equal_rewards([])
    assert equal_rewards([member(1.0), member(1.0)])
    assert not equal_rewards([member(1.0), member(1.0), member(0.5)])
