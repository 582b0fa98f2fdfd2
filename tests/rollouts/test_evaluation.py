import asyncio

import pytest

from rl.errors import RunError
from rl.observability.metrics import reduced
from rl.rollouts.evaluation import evaluate
from rl.rollouts.renderer import ChatRenderer
from rl.rollouts.rubric import Criterion, Rubric
from rl.tasks.sum_digits import format_reward, is_correct, make_problem
from tests.support.fakes import ByteTokenizer, FakePolicy, RubricScorer

RENDERER = ChatRenderer(tokenizer=ByteTokenizer(), max_prompt_tokens=64)
REPLIES = {"<11 11>": "[ANSWER] 4", "<11 12>": "[ANSWER] 9", "<11 13>": "five", "<11 14>": "[ANSWER] 9"}
"""Right, wrong, without the form, wrong."""


def evaluated(rubric):
    policy = FakePolicy(reply=lambda prompt, i: REPLIES[prompt])
    metrics = evaluate(
        prompts=[RENDERER.prompt(make_problem([11, n])) for n in (11, 12, 13, 14)],
        sampler=policy,
        scorer=RubricScorer(rubric=rubric),
        renderer=RENDERER,
        max_tokens=32,
    )
    return {name: reduced(metric) for name, metric in asyncio.run(metrics).items()}


def test_evaluation_is_the_mean_over_the_problems_of_reward_correctness_and_each_criterion():
    criteria = (
        Criterion(name="answer", function=is_correct, weight=0.8),
        Criterion(name="format", function=format_reward, weight=0.2),
    )
    assert evaluated(Rubric(criteria=criteria, correct=is_correct)) == {
        "eval/correct": 0.25,
        "eval/reward": pytest.approx((1.0 + 0.2 + 0.0 + 0.2) / 4),
        "eval/num_problems": 4,
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
