import asyncio
import itertools

import pytest

from rl.errors import RunError
from rl.observability.metrics import reduced
from rl.rollouts.evaluation import SEED, Evaluator, pass_at
from rl.rollouts.rubric import Criterion, GroupCriterion, Rubric
from rl.rollouts.settings import Evaluation
from rl.tasks.sum_digits import format_reward, is_correct, make_problem, parse_answer
from rl.types import Message, Observation, Problem, Rollout, SamplingParams, Score
from tests.support.fakes import RENDERER, FakePolicy, RubricScorer, episodes_of

REPLIES = {"<11 11>": "[ANSWER] 4", "<11 12>": "[ANSWER] 9", "<11 13>": "five", "<11 14>": "[ANSWER] 9"}
"""Right, wrong, without the form, wrong."""
HELD_OUT = [make_problem([11, n]) for n in (11, 12, 13, 14)]
TRAINING = SamplingParams(max_tokens=32, num_samples=8, temperature=0.5, stop_token_ids=(0,), seed=5)


def evaluator(rubric, *, policy=None, sets=None, settings=None, **episode):
    policy = policy or FakePolicy(reply=lambda prompt, i: REPLIES[prompt])
    return Evaluator(
        sets=sets or {"held_out": HELD_OUT},
        episodes=episodes_of(policy, renderer=RENDERER, **episode),
        scorer=RubricScorer(rubric=rubric),
        settings=settings or Evaluation(),
        sampling=TRAINING,
    )


def evaluated(rubric, **settings):
    result = asyncio.run(evaluator(rubric, **settings).run())
    return {name: reduced(metric) for name, metric in result.metrics().items()}


RUBRIC = Rubric(
    criteria=(
        Criterion(name="answer", function=is_correct, weight=0.8),
        Criterion(name="format", function=format_reward, weight=0.2),
    ),
    correct=is_correct,
)


def test_evaluation_is_the_mean_over_the_problems_of_reward_correctness_and_each_criterion():
    assert evaluated(RUBRIC) == {
        "eval/correct": 0.25,
        "eval/reward": pytest.approx((1.0 + 0.2 + 0.0 + 0.2) / 4),
        "eval/num_problems": 4,
        "eval/num_unparsed": 0,
        "eval/num_failed": 0,
        "eval/answer": 0.25,
        "eval/format": 0.75,
    }


def test_a_criterion_does_not_replace_what_every_evaluation_reports():
    criteria = (Criterion(name="correct", function=format_reward),)
    assert evaluated(Rubric(criteria=criteria, correct=is_correct))["eval/correct"] == 0.25


def test_one_failed_score_stops_the_evaluation():
    criteria = (Criterion(name="broken", function=lambda rollout: 1 / (rollout.text != "five")),)
    with pytest.raises(RunError, match=r"1 of 4 rewards failed.*reward 'broken' raised ZeroDivisionError"):
        evaluated(Rubric(criteria=criteria, correct=is_correct))


def fails_on_five(rollout: Rollout) -> float:
    return is_correct(rollout) / (rollout.text != "five")


FAILS_ON_FIVE = Rubric(criteria=(Criterion(name="answer", function=fails_on_five),), correct=is_correct)


def test_the_share_that_may_fail_is_counted_and_left_out_of_the_means():
    judged = evaluator(FAILS_ON_FIVE)
    judged.max_failed = 0.25
    result = asyncio.run(judged.run())
    metrics = {name: reduced(metric) for name, metric in result.metrics().items()}
    assert metrics == {
        "eval/correct": pytest.approx(1 / 3),
        "eval/reward": pytest.approx(1 / 3),
        "eval/answer": pytest.approx(1 / 3),
        "eval/num_problems": 4,
        "eval/num_failed": 1,
        "eval/num_unparsed": 0,
    }


def test_failed_ones_of_the_sampled_replies_are_counted_and_left_out_of_pass_at_k_and_the_rates():
    def reply(prompt: str, sample: int) -> str:
        if policy.sampled[-1].temperature == 0:
            return "[ANSWER] 9"
        if prompt == "<11 12>":
            return "five"
        return ("five", "[ANSWER] 4", "no", "no")[sample]

    policy = FakePolicy(reply=reply)
    judged = evaluator(
        FAILS_ON_FIVE, policy=policy, sets={"a": HELD_OUT[:2]}, settings=Evaluation(num_samples=4)
    )
    judged.max_failed = 5 / 8
    result = asyncio.run(judged.run())
    metrics = {name: reduced(metric) for name, metric in result.metrics().items()}
    assert metrics["eval/num_failed"] == 5
    # Three replies to the first problem are left, of which one is right; none to the second.
    assert metrics["eval/pass@1"] == pytest.approx(1 / 3)
    assert metrics["eval/pass@2"] == pytest.approx(2 / 3)
    assert result.pass_rates() == {HELD_OUT[0].id: pytest.approx(1 / 3)}
    judged.max_failed = 0.5
    with pytest.raises(
        RunError, match=r"5 of 8 rewards failed in the evaluation of 'a', where loop.max_fail"
    ):
        asyncio.run(judged.run())


def test_sets_after_the_first_are_told_apart_by_their_names():
    sets = {"near": HELD_OUT[:2], "far": HELD_OUT[2:], "other": HELD_OUT[:1]}
    judged = evaluator(RUBRIC, sets=sets)
    assert judged.num_problems == 5
    metrics = {name: reduced(m) for name, m in asyncio.run(judged.run()).metrics().items()}
    correct = {name: value for name, value in metrics.items() if name.endswith("correct")}
    assert correct == {"eval/correct": 0.5, "eval/far/correct": 0, "eval/other/correct": 1}
    assert (metrics["eval/num_problems"], metrics["eval/far/num_problems"]) == (2, 2)


def test_a_reply_that_a_reward_function_could_not_read_is_counted():
    class Unparsed(RubricScorer):
        async def score(self, groups, *, alone=False):
            scores = await super().score(groups, alone=alone)
            return [
                [_marked(r, s) for r, s in zip(*pair, strict=True)]
                for pair in zip(groups, scores, strict=True)
            ]

    def _marked(rollout: Rollout, score: Score) -> Score:
        unparsed = () if parse_answer(rollout.text) else ("answer", "format")
        return Score(reward=score.reward, correct=score.correct, parts=score.parts, unparsed=unparsed)

    judged = evaluator(RUBRIC)
    judged.scorer = Unparsed(rubric=RUBRIC)
    metrics = asyncio.run(judged.run()).metrics()
    assert reduced(metrics["eval/num_unparsed"]) == 1  # a reply counts once, whatever functions say so


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_the_subsets_that_hold_a_right_sample(num_samples):
    for num_correct in range(num_samples + 1):
        right = [i < num_correct for i in range(num_samples)]
        for k in range(1, num_samples + 1):
            subsets = list(itertools.combinations(right, k))
            share = sum(map(any, subsets)) / len(subsets)
            found = pass_at(k, num_samples=num_samples, num_correct=num_correct)
            assert found == pytest.approx(share, abs=1e-12)


def test_sampled_replies_give_pass_at_each_power_of_two_and_the_greedy_ones_all_else():
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
    assert (metrics["eval/correct"], metrics["eval/num_problems"], metrics["eval/format"]) == (0, 2, 1)
    greedy, sampled = policy.sampled
    assert (greedy.temperature, greedy.num_samples, greedy.seed) == (0, 1, None)
    assert (sampled.temperature, sampled.num_samples, sampled.seed) == (0.75, 5, SEED)
    assert {(s.max_tokens, s.stop_token_ids) for s in (greedy, sampled)} == {(32, (0,))}


class Asks:
    """Once more after the first reply, in the first problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.asked = problem, False

    def opening(self):
        return (Message(role="user", content=self.problem.question),)

    async def step(self, reply):
        again, self.asked = self.problem == HELD_OUT[0] and not self.asked, True
        return Observation(messages=(Message(role="user", content="sure?"),) if again else ())

    async def close(self) -> None:
        """Nothing is held."""


def test_turns_of_conversations_are_reported():
    policy = FakePolicy(reply=lambda prompt, i: "[ANSWER] 4")
    metrics = evaluated(RUBRIC, policy=policy, sets={"a": HELD_OUT[:2]}, environment=Asks)
    assert metrics["eval/turns_mean"] == 1.5
    assert metrics["eval/correct"] == 0.5
    assert "eval/turns_mean" not in evaluated(RUBRIC)


def above_the_others(rollouts):
    return [1.0 / (len(rollouts) - 1) for _ in rollouts]


def with_function(**settings):
    """The rubric, and a function of a group."""
    ranked = GroupCriterion(name="ranked", function=above_the_others, **settings)
    return Rubric(criteria=(*RUBRIC.criteria, ranked), correct=is_correct)


def test_a_function_that_compares_rollouts_is_left_out_of_greedy_replies_and_called_for_sampled_ones():
    assert evaluated(with_function()) == evaluated(RUBRIC)
    policy = FakePolicy(reply=lambda prompt, sample: "[ANSWER] 4")
    judged = evaluator(with_function(), policy=policy, settings=Evaluation(num_samples=3))
    (done,) = asyncio.run(judged.run()).sets
    assert ["ranked" in score.parts for _, score in done.greedy] == [False] * 4
    assert [[score.parts["ranked"] for _, score in group] for group in done.sampled] == [[0.5] * 3] * 4
    # One sample is alone too.
    judged = evaluator(with_function(), policy=policy, settings=Evaluation(num_samples=1))
    assert asyncio.run(judged.run()).sets[0].failures == []


def test_a_function_of_a_group_that_needs_none_grades_greedy_replies_and_its_failures_are_counted():
    judged = evaluator(with_function(needs_group=False))
    judged.max_failed = 1.0
    metrics = {name: reduced(metric) for name, metric in asyncio.run(judged.run()).metrics().items()}
    assert (metrics["eval/num_failed"], metrics["eval/num_problems"]) == (4, 4)
    assert "eval/reward" not in metrics
    judged.max_failed = 0.0
    with pytest.raises(RunError, match=r"4 of 4 rewards failed.*reward 'ranked' raised ZeroDivisionError"):
        asyncio.run(judged.run())


def test_without_correct_a_greedy_reply_is_right_by_what_is_left_of_its_reward():
    halves = (
        Criterion(name="answer", function=is_correct, weight=0.5),
        GroupCriterion(name="ranked", function=above_the_others, weight=0.5),
    )
    metrics = evaluated(Rubric(criteria=halves))
    assert (metrics["eval/correct"], metrics["eval/reward"]) == (0.0, 0.25 * 0.5)
