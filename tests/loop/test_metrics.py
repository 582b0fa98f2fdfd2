import asyncio
from dataclasses import replace

import numpy as np
import pytest

from rl.loop.metrics import (
    StepClock,
    TrainedMinibatch,
    batch_metrics,
    time_metrics,
    training_metrics,
)
from rl.observability.metrics import reduce_metric
from rl.rollouts.evaluation import score_metrics
from rl.rollouts.group import Group, RolloutWorker, ScoredRollout
from rl.rollouts.producer import Batch
from rl.tasks.sum_digits import make_problem
from rl.trainer_types import ForwardBackwardResult, OptimStepResult
from rl.types import Branch, Observation, PublishResult, Rollout, SamplingParams, Score
from tests.support.fakes import (
    RENDERER,
    SimulatedPolicy,
    completion,
    episodes_of,
    prompt_of,
    rollout_of,
)
from tests.support.virtual_time import run_in_virtual_time

PROMPT = prompt_of(make_problem([12, 34]))


def values(metrics):
    return {name: reduce_metric(metric) for name, metric in metrics.items()}


def rollouts(*texts, finish_reason="stop"):
    made = [completion(text, finish_reason=finish_reason) for text in texts]
    return [rollout_of(PROMPT, c, sample=i) for i, c in enumerate(made)]


def minibatch(
    *,
    loss=0.0,
    num_valid=1,
    ratio=1.0,
    clipped=0.0,
    entropy=0.0,
    diff=0.0,
    grad_norm=1.0,
    lr=0.1,
    own=None,
):
    gradient = ForwardBackwardResult(
        loss_sum=loss * num_valid,
        denominator=num_valid,
        num_samples=4,
        num_tokens=num_valid + 10,
        num_valid_tokens=num_valid,
        ratio_mean=ratio,
        clipped_fraction=clipped,
        entropy_mean=entropy,
        logprob_diff_mean=diff,
        logprob_diff_max=3 * diff,
        logprobs_identical=diff == 0,
        loss_metrics=own or {},
    )
    return TrainedMinibatch(
        gradient=gradient, update=OptimStepResult(grad_norm=grad_norm, lr=lr, policy_version=1)
    )


def test_rewards_are_averaged_by_sample_and_equal_groups_by_group():
    failed = Score(reward=0.0, correct=False, failure="raised")
    groups = [rollouts("abc", "a", "ab"), rollouts("abcd", "abcd", "abcd", finish_reason="length")]
    scores = [
        [Score(reward=1.0, correct=True), failed, Score(reward=0.0, correct=False)],
        [
            Score(reward=0.5, correct=False, unparsed=("answer",)),
            Score(reward=0.5, correct=False),
            failed,
        ],
    ]
    made = [
        Group(number=i, rollouts=r, scores=s)
        for i, (r, s) in enumerate(zip(groups, scores, strict=True))
    ]
    assert [[member.rollout.sample for member in group.scored] for group in made] == [
        [0, 2],
        [0, 1],
    ]
    # A dropped group counts in the averages too.
    assert values(batch_metrics(Batch(groups=made[:1], dropped=[("oversize", made[1])]))) == {
        "groups/dropped_failed": 0,
        "groups/dropped_equal": 0,
        "groups/dropped_oversize": 1,
        "groups/dropped_long_prompt": 0,
        "reward/mean": 0.5,
        "reward/std": pytest.approx(np.std([1, 0, 0.5, 0.5])),
        "reward/correct": 0.25,
        "reward/equal_groups": 0.5,
        "reward/num_failed": 2,
        "reward/num_unparsed": 1,
        # The end token counts: 4 and 3 of the first group, 5 and 5 of the second.
        "prompt/tokens_mean": len(PROMPT.token_ids),
        "completion/tokens_mean": 4.25,
        "completion/tokens_max": 5,
        # Before the last token of 4 stand the prompt and 3, and so on.
        "completion/context_mean": len(PROMPT.token_ids) + (6 + 3 + 10 + 10) / 17,
        "completion/cut_off": 0.5,
        "rollout/turns_mean": 1,
        "rollout/unfinished": 0,
    }


def test_branches_are_counted_in_steps_that_have_some():
    (plain, other) = rollouts("abc", "abcdef")
    (short,), (long,) = plain.turns, other.turns
    branches = (
        Branch(turns=(0, 1)),
        Branch(turns=(0, 2), cause="again"),
        Branch(turns=(3,), role="auxiliary", cause="agent", is_trained=False),
    )
    tree = replace(plain, turns=(short, short, long, short), branches=branches)

    def measure(*members):
        scores = [Score(reward=1.0, correct=True) for _ in members]
        group = Group(number=0, rollouts=list(members), scores=scores)
        return values(batch_metrics(Batch(groups=[group], dropped=[])))

    said = measure(plain, tree)
    assert said["rollout/branches_mean"] == (1 + 3) / 2
    assert said["rollout/rows_mean"] == (1 + 2) / 2
    assert {name: n for name, n in said.items() if name.startswith("branches/")} == {
        "branches/again": 1,
        "branches/agent": 1,
    }
    assert said["rollout/turns_mean"] == (1 + 4) / 2
    # With the end tokens 4, and 4 + 4 + 7 of the trained turns.
    assert said["completion/tokens_mean"] == (4 + 15) / 2
    num_told = len(PROMPT.token_ids)
    assert said["prompt/tokens_mean"] == (num_told + 3 * num_told) / 2
    # Before the second turns of both rows stand two prompts and the first reply.
    first, second = 4 * num_told + 6, 4 * (2 * num_told + 4) + 6
    again = 7 * (2 * num_told + 4) + 21
    assert said["completion/context_mean"] == (2 * first + second + again) / 19
    assert not any("branches" in name or "rows" in name for name in measure(plain, other))


def test_turns_and_environment_metrics_are_reported():
    def of_turns(*metrics, end="done"):
        (turn,) = rollouts("abc")[0].turns
        turns = tuple(replace(turn, observation=Observation(metrics=m)) for m in metrics)
        return ScoredRollout(
            rollout=Rollout(prompt=PROMPT, sample=0, turns=turns, end=end),
            score=Score(reward=1.0, correct=True),
        )

    long = of_turns({"calls": 2.0}, {}, {"calls": 1.0, "errors": 1.0}, end="turns")
    short = of_turns({"calls": 0.0})
    groups = [
        Group(number=i, rollouts=[m.rollout], scores=[m.score]) for i, m in enumerate((long, short))
    ]
    said = values(batch_metrics(Batch(groups=groups, dropped=[])))
    assert (said["rollout/turns_mean"], said["rollout/unfinished"]) == (2, 0.5)
    assert said["completion/tokens_mean"] == (3 * 4 + 4) / 2  # of all turns
    # DeviceLock of a prompt of N and 4 tokens each: before the first token of the third stand 3 N +
    # 8.
    num_told = len(PROMPT.token_ids)
    attended = [
        [turn * (num_told + 4) + num_told + i for turn in range(n) for i in range(4)]
        for n in (3, 1)
    ]
    assert said["completion/context_mean"] == sum(map(sum, attended)) / 16
    assert said["prompt/tokens_mean"] == (3 + 1) * num_told / 2
    # A rollout's calls are added up; one that counts no errors has none.
    assert (said["environment/calls"], said["environment/errors"]) == (1.5, 0.5)


def test_metrics_of_minibatches_are_merged_by_their_reduction():
    merged = training_metrics(
        [
            minibatch(
                loss=1,
                num_valid=3,
                ratio=1.0,
                clipped=0.0,
                entropy=2,
                diff=1e-6,
                grad_norm=1,
                lr=0.1,
            ),
            minibatch(
                loss=2,
                num_valid=1,
                ratio=1.2,
                clipped=0.4,
                entropy=4,
                diff=0.5,
                grad_norm=5,
                lr=0.2,
            ),
        ]
    )
    assert values(merged) == {
        "loss/mean": 1.5,  # by optimizer step
        "loss/ratio_mean": pytest.approx((3 * 1.0 + 1.2) / 4),  # by token
        "loss/clipped_fraction": pytest.approx(0.1),
        "loss/entropy_mean": 2.5,
        "loss/grad_norm": 3,
        "loss/grad_norm_max": 5,
        "loss/lr": 0.2,
        # Before the first update.
        "logprob_diff/mean": 1e-6,
        "logprob_diff/max": pytest.approx(3e-6),
        "logprob_diff/identical": 0,
    }


def test_environments_reward_is_averaged_over_the_rollouts_without_one_too():
    scores = [
        Score(reward=1.5, correct=True, parts={"answer": 1.0, "environment": 0.5}),
        Score(reward=0.0, correct=False, parts={"answer": 0.0}),
        Score(reward=0.0, correct=False, failure="raised"),
    ]
    found = values(score_metrics(scores))
    assert (found["reward/answer"], found["reward/environment"]) == (0.5, 0.25)


def test_effective_share_is_taken_over_all_minibatches():
    # Weights 2, 2, 2 and then 1: (7 / 4)^2 / (13 / 4).
    merged = training_metrics(
        [
            minibatch(
                num_valid=3, own={"correction_weight": 2.0, "correction_weight_squared": 4.0}
            ),
            minibatch(
                num_valid=1, own={"correction_weight": 1.0, "correction_weight_squared": 1.0}
            ),
        ]
    )
    assert reduce_metric(merged["loss/correction_weight"]) == pytest.approx(7 / 4)
    assert reduce_metric(merged["loss/correction_effective_share"]) == pytest.approx(
        (7 / 4) ** 2 / (13 / 4)
    )
    assert "loss/correction_effective_share" not in training_metrics([minibatch()])


def test_times_and_speeds_of_a_step():
    async def step():
        worker = RolloutWorker(
            episodes=episodes_of(
                SimulatedPolicy(
                    reply=lambda prompt, i: "abc" if i else "a", generate_s=lambda prompt: 2.0
                ),
                renderer=RENDERER,
            ),
            rewarder=SlowRewarder(),
            sampling=SamplingParams(max_tokens=8, num_samples=2),
            seed=0,
        )
        clock = StepClock(worker)
        clock.start()
        group = await worker.run(0, make_problem([12, 34]))  # 2 + 4 tokens in 2 s, scored in 0.5 s
        early = replace(group, generated_at=1.0)
        clock.split_batch_wait(Batch(groups=[early, group], dropped=[]))
        await asyncio.sleep(0.5)
        clock.lap("train")
        await asyncio.sleep(1.0)
        clock.lap("publish")
        return time_metrics(
            minibatches=[
                minibatch(num_valid=6),
                minibatch(num_valid=4),
            ],  # 16 + 14 tokens, 4 + 4 samples
            published=PublishResult(
                policy_version=1,
                push_s=0.25,
                pull_s=0.75,
                parity_diff=1e-6,
                parity_s=0.125,
                num_bytes=250_000,
                merge_lost=0.375,
            ),
            clock=clock,
        )

    assert values(run_in_virtual_time(step())[0]) == {
        "time/generate_s": 2,
        "time/score_s": 0.5,
        "time/train_s": 0.5,
        "time/publish_s": 1,
        "time/push_s": 0.25,
        "time/pull_s": 0.75,
        "time/parity_s": 0.125,
        "time/step_s": 4,
        "time/generator_idle_s": 2,
        "time/reward_idle_s": 3.5,
        "time/trainer_idle_s": 3.5,
        "perf/generated_tokens_per_s": 3,
        "perf/trained_tokens_per_s": 60,
        "perf/samples_per_s": 2,
        "sync/version": 1,
        "sync/pushed_mb": 0.25,
        "sync/merge_lost": 0.375,
        "parity/logprob_diff": 1e-6,
    }


class SlowRewarder:
    """Takes half a second for any number of rollouts."""

    async def score(self, groups, *, alone=False):
        await asyncio.sleep(0.5)
        return [[Score(reward=1.0, correct=True) for _ in group] for group in groups]
