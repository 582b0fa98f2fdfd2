"""Evaluation: metrics of sets, pass@k, failures, and metrics of reward functions."""

import asyncio
import itertools

import pytest

from rl.observability.metrics import reduce_metric
from rl.rollouts.evaluation import SEED, Evaluation, Evaluator, pass_at
from rl.rollouts.rubric import Criterion, GroupCriterion, Rubric
from rl.tasks.sum_digits import format_reward, is_correct, make_problem
from rl.types import Rollout, SamplingParams
from rl.utils.errors import RunError
from tests.support.fakes import RENDERER, FakePolicy, RubricRewarder, episodes_of

REPLIES = {
    "<11 11>": "[ANSWER] 4",
    "<11 12>": "[ANSWER] 9",
    "<11 13>": "five",
    "<11 14>": "[ANSWER] 9",
}
"""One right reply, two wrong ones, and one in the wrong form (the third)."""
HELD_OUT = [make_problem([11, n]) for n in (11, 12, 13, 14)]
TRAINING = SamplingParams(
    max_tokens=32, num_samples=8, temperature=0.5, stop_token_ids=(0,), seed=5
)


def evaluator(rubric, *, policy=None, sets=None, settings=None, **episode):
    policy = policy or FakePolicy(reply=lambda prompt, i: REPLIES[prompt])
    return Evaluator(
        sets=sets or {"held_out": HELD_OUT},
        episodes=episodes_of(policy, renderer=RENDERER, **episode),
        rewarder=RubricRewarder(rubric=rubric),
        settings=settings or Evaluation(),
        sampling=TRAINING,
    )


def numbers(result):
    return {name: reduce_metric(metric) for name, metric in result.compute_metrics().items()}


def evaluated(rubric, **settings):
    return numbers(asyncio.run(evaluator(rubric, **settings).run()))


RUBRIC = Rubric(
    criteria=(
        Criterion(name="answer", function=is_correct, weight=0.8),
        Criterion(name="format", function=format_reward, weight=0.2),
    ),
    correct=is_correct,
)


def test_evaluation_averages_reward_correctness_and_each_criterion():
    assert evaluated(RUBRIC) == {
        "eval/correct": 0.25,
        "eval/reward": pytest.approx((1.0 + 0.2 + 0.0 + 0.2) / 4),
        "eval/num_problems": 4,
        "eval/num_unparsed": 0,
        "eval/num_failed": 0,
        "eval/answer": 0.25,
        "eval/format": 0.75,
    }


def fails_on_five(rollout: Rollout) -> float:
    return is_correct(rollout) / (rollout.text != "five")


FAILS_ON_FIVE = Rubric(
    criteria=(Criterion(name="answer", function=fails_on_five),), correct=is_correct
)


def test_allowed_failures_are_counted_and_left_out_of_means_and_pass_at_k():
    def reply(prompt: str, sample: int) -> str:
        if prompt == "<11 12>":
            return "five"
        if policy.sampled[-1].temperature == 0:
            return "[ANSWER] 4"
        return ("five", "[ANSWER] 4", "no", "no")[sample]

    policy = FakePolicy(reply=reply)
    judged = evaluator(
        FAILS_ON_FIVE, policy=policy, sets={"a": HELD_OUT[:2]}, settings=Evaluation(num_samples=4)
    )
    judged.max_failed = 5 / 8
    result = asyncio.run(judged.run())
    metrics = numbers(result)
    assert (metrics["eval/num_problems"], metrics["eval/num_failed"]) == (2, 1 + 5)
    assert metrics["eval/correct"] == metrics["eval/reward"] == metrics["eval/answer"] == 1.0
    # Three replies to the first problem are left, of which one is right; none to the second.
    assert metrics["eval/pass@1"] == pytest.approx(1 / 3)
    assert metrics["eval/pass@2"] == pytest.approx(2 / 3)
    assert result.pass_rates() == {HELD_OUT[0].id: pytest.approx(1 / 3)}
    judged.max_failed = 0.5
    with pytest.raises(
        RunError, match=r"5 of 8 rewards failed in the evaluation of 'a'; .*ZeroDivisionError"
    ):
        asyncio.run(judged.run())


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(num_samples):
    for num_correct in range(num_samples + 1):
        right = [i < num_correct for i in range(num_samples)]
        for k in range(1, num_samples + 1):
            subsets = list(itertools.combinations(right, k))
            share = sum(map(any, subsets)) / len(subsets)
            found = pass_at(k, num_samples=num_samples, num_correct=num_correct)
            assert found == pytest.approx(share, abs=1e-12)


def test_samples_give_pass_at_powers_of_two_and_greedy_replies_the_rest():
    def reply(prompt: str, sample: int) -> str:
        (greedy_of_last,) = policy.sampled[-1:]
        if greedy_of_last.temperature == 0:
            return "[ANSWER] 9"  # wrong for each
        return "[ANSWER] 4" if prompt == "<11 11>" and sample in (1, 4) else "five"

    policy = FakePolicy(reply=reply)
    settings = Evaluation(num_samples=5, temperature=0.75)
    metrics = evaluated(RUBRIC, policy=policy, sets={"a": HELD_OUT[:2]}, settings=settings)
    assert {name: value for name, value in metrics.items() if "pass" in name} == {
        # Of the first problem two of five are right, of the second none.
        "eval/pass@1": pytest.approx(0.4 / 2),
        "eval/pass@2": pytest.approx((1 - 3 / 10) / 2),
        "eval/pass@4": pytest.approx(1.0 / 2),
    }
    assert (metrics["eval/correct"], metrics["eval/num_problems"], metrics["eval/format"]) == (
        0,
        2,
        1,
    )
    greedy, sampled = policy.sampled
    assert (greedy.temperature, greedy.num_samples, greedy.seed) == (0, 1, None)
    assert (sampled.temperature, sampled.num_samples, sampled.seed) == (0.75, 5, SEED)
    assert {(s.max_tokens, s.stop_token_ids) for s in (greedy, sampled)} == {(32, (0,))}


def above_the_others(rollouts):
    return [1.0 / (len(rollouts) - 1) for _ in rollouts]


def with_function(**settings):
    """Return the rubric with a group function."""
    ranked = GroupCriterion(name="ranked", function=above_the_others, **settings)
    return Rubric(criteria=(*RUBRIC.criteria, ranked), correct=is_correct)


def test_comparing_function_is_skipped_for_greedy_replies():
    assert evaluated(with_function()) == evaluated(RUBRIC)
    policy = FakePolicy(reply=lambda prompt, sample: "[ANSWER] 4")
    judged = evaluator(with_function(), policy=policy, settings=Evaluation(num_samples=3))
    (done,) = asyncio.run(judged.run()).sets
    assert ["ranked" in score.parts for _, score in done.greedy] == [False] * 4
    assert [[score.parts["ranked"] for _, score in group] for group in done.sampled] == [
        [0.5] * 3
    ] * 4
    # A greedy reply is graded only by a group function that needs no group.
    judged = evaluator(with_function(needs_group=False))
    with pytest.raises(
        RunError, match=r"4 of 4 rewards failed.*reward 'ranked' raised ZeroDivisionError"
    ):
        asyncio.run(judged.run())
    # One sample is alone too.
    judged = evaluator(with_function(), policy=policy, settings=Evaluation(num_samples=1))
    assert asyncio.run(judged.run()).sets[0].failures == []
