import asyncio

import numpy as np

from rl.loop import Loop
from rl.observability.metrics import merge, reduced
from rl.rollouts.evaluation import EvaluatedSet, EvaluationResult
from rl.rollouts.grading import scored
from rl.rollouts.group import Group
from rl.rollouts.kl_reward import KLReward
from rl.rollouts.producer import Batch
from rl.rollouts.score_metrics import score_metrics
from rl.step_metrics import batch_metrics
from rl.step_samples import SampleMaker
from rl.types import Score
from tests.support.conversations import conversation, drawn
from tests.support.fakes import FakePolicy


def score(unparsed=(), failure=None, **parts):
    return Score(reward=0.0, correct=False, parts=parts, failure=failure, unparsed=unparsed)


def numbers(*parts):
    return {name: reduced(metric) for name, metric in merge(parts).items()}


def test_each_function_is_a_mean_over_what_could_be_scored_and_the_rest_is_counted():
    scores = [
        score(answer=1.0, format=0.5),
        score(answer=0.0, format=0.5, unparsed=("answer", "format")),
        score(failure="it raised"),
    ]
    assert numbers(score_metrics(scores)) == {
        "reward/num_failed": 1,
        "reward/num_unparsed": 1,
        "reward/answer": 0.5,
        "reward/format": 0.5,
    }


def test_parts_of_any_size_merge_to_those_of_all():
    scores = [score(answer=float(i)) for i in range(5)]
    assert numbers(score_metrics(scores[:1]), score_metrics(scores[1:])) == numbers(score_metrics(scores))


def test_an_environment_that_gave_nothing_counts_as_0_where_another_gave_something():
    assert numbers(score_metrics([score(environment=1.0), score()]))["reward/environment"] == 0.5
    assert "reward/environment" not in score_metrics([score(), score()])


def test_a_function_does_not_replace_what_a_step_reports_anyway():
    metrics = numbers(score_metrics([score(std=2.0, num_failed=3.0)], prefix="eval"))
    assert metrics == {
        "eval/num_failed": 0,
        "eval/num_unparsed": 0,
        "eval/function_std": 2.0,
        "eval/function_num_failed": 3.0,
    }


def test_every_name_that_a_step_or_an_evaluation_reports_is_known_to_be_taken():
    # Of a step with everything switched on, and of an evaluation with tries and turns.
    groups = make_group([Score(reward=1.0, correct=True), Score(reward=0.0, correct=False)])
    config = Loop.Config(num_prompts=1, num_samples=2, kl_reward=KLReward(coef=0.1))
    maker = SampleMaker(config=config, learner=OwnReference(reply=lambda prompt, i: ""), adds_proximal=False)
    batch = Batch(groups=[groups], dropped=[])
    step = batch_metrics(batch) | asyncio.run(maker.make(batch)).metrics
    pairs = list(zip(groups.rollouts, groups.scores, strict=True))
    evaluation = EvaluationResult(sets=[EvaluatedSet(name="one", greedy=pairs, sampled=[pairs])]).metrics()
    reported = {n.partition("/")[2] for n in step if n.startswith("reward/")}
    reported |= {n.partition("/")[2] for n in evaluation}
    assert reported >= {"kl", "pass@1", "pass@2", "turns_mean", "std", "equal_groups"}
    same = score_metrics([score(**dict.fromkeys(reported, 1.0))])
    counts = {"reward/num_failed", "reward/num_unparsed"}
    assert same.keys() - counts == {f"reward/function_{name}" for name in reported}


class OwnReference(FakePolicy):
    async def compute_reference_logprobs(self, samples):
        return [np.zeros(len(s.token_ids), dtype=np.float32) for s in samples]


def make_group(scores):
    rollouts = [conversation((3, drawn(5)), (2, drawn(6)), sample=i) for i in range(len(scores))]
    return Group(
        number=0, rollouts=rollouts, scores=scores, scored=scored(rollouts, scores), generated_at=0.0
    )


def test_without_scores_there_is_nothing_but_the_counts():
    assert numbers(score_metrics([])) == {"reward/num_failed": 0, "reward/num_unparsed": 0}
