import asyncio
from dataclasses import dataclass, replace

import numpy as np
import pytest

from losses.correction import ImportanceCorrection
from losses.grpo import GRPOLoss
from losses.ops import masked_sum
from losses.types import LossInputs, LossOutput
from rl.observability.metrics import MetricsWriter, read_metrics, reduced
from rl.rollouts.grading import ScoredRollout, scored
from rl.rollouts.group import Group, RolloutWorker
from rl.rollouts.producer import Batch
from rl.step_clock import StepClock
from rl.step_metrics import (
    TrainedMinibatch,
    age_metrics,
    batch_metrics,
    group_metrics,
    time_metrics,
    training_metrics,
)
from rl.tasks.sum_digits import make_problem
from rl.types import (
    ExpertLoad,
    ForwardBackwardResult,
    Observation,
    OptimStepResult,
    Packing,
    PublishResult,
    Rollout,
    SamplingParams,
    Score,
)
from tests.support.fakes import RENDERER, completion, episodes_of, prompt_of, rollout_of
from tests.support.simulated import SimulatedPolicy
from tests.support.virtual_time import run_in_virtual_time
from tests.training.parts import make_engine, make_samples

PROMPT = prompt_of(make_problem([12, 34]))


def values(metrics):
    return {name: reduced(metric) for name, metric in metrics.items()}


def rollouts(*texts, finish_reason="stop"):
    made = [completion(text, finish_reason=finish_reason) for text in texts]
    return [rollout_of(PROMPT, c, sample=i) for i, c in enumerate(made)]


def minibatch(
    *, loss=0.0, num_valid=1, ratio=1.0, clipped=0.0, entropy=0.0, diff=0.0, grad_norm=1.0, lr=0.1, own=None
):
    gradient = ForwardBackwardResult(
        loss_sum=loss * num_valid,
        denominator=num_valid,
        num_samples=4,
        num_tokens=num_valid + 10,
        num_valid_tokens=num_valid,
        advantage_mean=0.0,
        advantage_std=1.0,
        ratio_mean=ratio,
        clipped_fraction=clipped,
        entropy_mean=entropy,
        logprob_diff_mean=diff,
        logprob_diff_max=3 * diff,
        logprobs_identical=diff == 0,
        loss_metrics=own or {},
        time_s=0.0,
    )
    return TrainedMinibatch(
        gradient=gradient, update=OptimStepResult(grad_norm=grad_norm, lr=lr, policy_version=1, time_s=0.0)
    )


def test_rewards_of_groups_of_unequal_size_count_by_sample_and_groups_by_group():
    failed = Score(reward=0.0, correct=False, failure="raised")
    groups = [rollouts("abc", "a", "ab"), rollouts("abcd", "abcd", "abcd", finish_reason="length")]
    scores = [
        [Score(reward=1.0, correct=True), failed, Score(reward=0.0, correct=False)],
        [Score(reward=0.5, correct=False, unparsed=("answer",)), Score(reward=0.5, correct=False), failed],
    ]
    made = [
        Group(number=i, rollouts=r, scores=s, scored=scored(r, s), generated_at=0.0)
        for i, (r, s) in enumerate(zip(groups, scores, strict=True))
    ]
    assert [[member.rollout.sample for member in group.scored] for group in made] == [[0, 2], [0, 1]]
    assert values(batch_metrics(Batch(groups=made, dropped=[]))) == {
        "groups/dropped_failed": 0,
        "groups/dropped_equal": 0,
        "groups/dropped_oversize": 0,
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


def test_rollouts_of_several_turns_report_them_and_what_their_environment_counted():
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
        Group(number=i, rollouts=[m.rollout], scores=[m.score], scored=[m], generated_at=0.0)
        for i, m in enumerate((long, short))
    ]
    said = values(batch_metrics(Batch(groups=groups, dropped=[])))
    assert (said["rollout/turns_mean"], said["rollout/unfinished"]) == (2, 0.5)
    assert said["completion/tokens_mean"] == (3 * 4 + 4) / 2  # of all turns
    # Turns of a prompt of N and 4 tokens each: before the first token of the third stand 3 N + 8.
    num_told = len(PROMPT.token_ids)
    attended = [[turn * (num_told + 4) + num_told + i for turn in range(n) for i in range(4)] for n in (3, 1)]
    assert said["completion/context_mean"] == sum(map(sum, attended)) / 16
    assert said["prompt/tokens_mean"] == (3 + 1) * num_told / 2
    # A rollout's calls are added up; one that counts no errors has none.
    assert (said["environment/calls"], said["environment/errors"]) == (1.5, 0.5)


def test_a_group_without_a_single_score_is_not_one_of_equal_rewards():
    failed = [Score(reward=0.0, correct=False, failure="raised")] * 2
    made = rollouts("abc", "a")
    group = Group(number=0, rollouts=made, scores=failed, scored=scored(made, failed), generated_at=0.0)
    said = values(batch_metrics(Batch(groups=[], dropped=[("failed", group)])))
    assert "reward/equal_groups" not in said
    assert (said["reward/num_failed"], said["groups/dropped_failed"]) == (2, 1)
    assert group_metrics([]) == {}


def test_minibatches_are_joined_each_number_by_its_own_reduction():
    merged = training_metrics(
        [
            minibatch(loss=1, num_valid=3, ratio=1.0, clipped=0.0, entropy=2, diff=1e-6, grad_norm=1, lr=0.1),
            minibatch(loss=2, num_valid=1, ratio=1.2, clipped=0.4, entropy=4, diff=0.5, grad_norm=5, lr=0.2),
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


def test_packing_is_reported_as_shares_of_all_micro_batches():
    def packed(**sizes):
        made = minibatch(num_valid=40)  # 50 tokens
        return TrainedMinibatch(gradient=replace(made.gradient, packing=Packing(**sizes)), update=made.update)

    first = packed(num_micro_batches=2, num_packed=30, num_padding=10, num_room=64, num_attended=150)
    second = packed(num_micro_batches=1, num_packed=50, num_padding=10, num_room=64, num_attended=650)
    merged = values(training_metrics([first, second]))
    assert merged["packing/num_micro_batches"] == 3
    assert merged["packing/padding"] == 20 / 100
    assert merged["packing/fill"] == 80 / 128
    assert merged["packing/shared"] == 20 / 100  # of 2 x 50 tokens
    assert merged["packing/context_mean"] == 800 / 80


def test_load_of_experts_is_reported_where_there_are_some():
    even, uneven = (
        TrainedMinibatch(gradient=replace(m.gradient, expert_load=load), update=m.update)
        for m, load in (
            (minibatch(), ExpertLoad(busiest_mean=1.0, busiest_max=1.5)),
            (minibatch(), ExpertLoad(busiest_mean=2.0, busiest_max=4.0)),
        )
    )
    merged = values(training_metrics([uneven, even]))
    assert (merged["experts/busiest_mean"], merged["experts/busiest_max"]) == (1.5, 4.0)


def test_metrics_of_the_loss_itself_are_joined_by_token():
    merged = training_metrics(
        [
            minibatch(num_valid=3, own={"kl": 0.1, "ratio": 1.0}),
            minibatch(num_valid=1, own={"kl": 0.5, "ratio": 1.2, "clipped_fraction": 0.4}),
        ]
    )
    assert reduced(merged["loss/kl"]) == pytest.approx((3 * 0.1 + 0.5) / 4)
    assert "loss/ratio" not in merged  # it is loss/ratio_mean


def test_effective_share_is_that_of_all_minibatches_weights_together():
    # Weights 2, 2, 2 and then 1: (7 / 4)^2 / (13 / 4).
    merged = training_metrics(
        [
            minibatch(num_valid=3, own={"correction_weight": 2.0, "correction_weight_squared": 4.0}),
            minibatch(num_valid=1, own={"correction_weight": 1.0, "correction_weight_squared": 1.0}),
        ]
    )
    assert reduced(merged["loss/correction_weight"]) == pytest.approx(7 / 4)
    assert reduced(merged["loss/correction_effective_share"]) == pytest.approx((7 / 4) ** 2 / (13 / 4))
    assert "loss/correction_effective_share" not in training_metrics([minibatch()])


def test_metrics_of_an_importance_correction_reach_the_step():
    samples = make_samples()
    engine = make_engine(None)
    loss = GRPOLoss(correction=ImportanceCorrection(high=1.5))
    gradient = engine.forward_backward(samples, loss=loss)
    said = values(training_metrics([TrainedMinibatch(gradient=gradient, update=engine.optim_step())]))
    logprobs = make_engine(None).compute_logprobs(samples)
    d = np.concatenate([p - s.generator_logprobs for p, s in zip(logprobs, samples, strict=True)])
    d = d[np.isfinite(d)].astype(np.float64)
    w = np.minimum(np.exp(d), 1.5)
    assert said["loss/correction_weight"] == pytest.approx(w.mean(), rel=1e-5)
    assert said["loss/correction_effective_share"] == pytest.approx(w.mean() ** 2 / (w**2).mean(), rel=1e-5)
    assert said["loss/correction_truncated"] == pytest.approx((np.exp(d) > 1.5).mean())
    assert said["loss/generator_kl_k1"] == pytest.approx(-d.mean(), rel=1e-4)
    assert said["loss/generator_kl_k3"] == pytest.approx((np.exp(d) - 1 - d).mean(), rel=1e-4)


@pytest.mark.parametrize("name", ["mean", "lr", "grad_norm"])
def test_a_metric_of_the_loss_under_a_name_of_the_step_is_refused(name):
    with pytest.raises(ValueError, match=f"metric '{name}', but loss/{name} is the step's own"):
        training_metrics([minibatch(own={name: 1.0})])


@dataclass(kw_only=True, slots=True)
class Reinforce:
    """As docs/extending.md has it."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        num_tokens = inputs.mask.sum().float()
        return LossOutput(
            loss_sum=-masked_sum(inputs.logprobs * inputs.advantages, inputs.mask),
            denominator=num_tokens,
            num_tokens=num_tokens,
            metric_sums={"surprise": -masked_sum(inputs.logprobs.detach(), inputs.mask)},
        )


def test_metric_of_a_users_loss_reaches_metrics_jsonl_as_the_mean_over_valid_tokens(tmp_path):
    samples = make_samples()
    engine = make_engine(None)
    logprobs = engine.compute_logprobs(samples)
    drawn = np.concatenate([p[s.mask] for p, s in zip(logprobs, samples, strict=True)])
    gradient = engine.forward_backward(samples, loss=Reinforce())
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
        metrics.write(training_metrics([TrainedMinibatch(gradient=gradient, update=engine.optim_step())]))
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert record["loss/surprise"] == pytest.approx(-drawn.mean(dtype=np.float64), rel=1e-6)


def test_speeds_are_of_the_lap_that_did_the_work():
    async def step():
        worker = RolloutWorker(
            episodes=episodes_of(
                SimulatedPolicy(reply=lambda prompt, i: "abc" if i else "a", generate_s=lambda prompt: 2.0),
                renderer=RENDERER,
            ),
            scorer=SlowScorer(),
            sampling=SamplingParams(max_tokens=8, num_samples=2),
            seed=0,
        )
        clock = StepClock(worker)
        clock.start()
        group = await worker.run(0, make_problem([12, 34]))  # 2 + 4 tokens in 2 s, scored in 0.5 s
        clock.rollouts(Batch(groups=[group], dropped=[]))
        await asyncio.sleep(0.5)
        clock.lap("train")
        await asyncio.sleep(1.0)
        clock.lap("publish")
        return time_metrics(
            minibatches=[minibatch(num_valid=6), minibatch(num_valid=4)],  # 16 + 14 tokens, 4 + 4 samples
            published=PublishResult(
                policy_version=1, push_s=0.25, pull_s=0.75, canary_diff=1e-6, canary_s=0.125
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
        "time/canary_s": 0.125,
        "time/step_s": 4,
        "time/generator_idle_s": 2,
        "time/reward_idle_s": 3.5,
        "time/trainer_idle_s": 3.5,
        "perf/generated_tokens_per_s": 3,
        "perf/trained_tokens_per_s": 60,
        "perf/samples_per_s": 2,
        "sync/version": 1,
        "canary/logprob_diff": 1e-6,
    }


class SlowScorer:
    """Takes half a second for any number of rollouts."""

    async def score(self, groups, *, alone=False):
        await asyncio.sleep(0.5)
        return [[Score(reward=1.0, correct=True) for _ in group] for group in groups]


def test_what_was_dropped_is_counted_by_reason_and_its_rewards_with_the_others():
    async def groups():
        worker = RolloutWorker(
            episodes=episodes_of(SimulatedPolicy(reply=lambda prompt, i: "abc"), renderer=RENDERER),
            scorer=SlowScorer(),
            sampling=SamplingParams(max_tokens=8, num_samples=2),
            seed=0,
        )
        return [await worker.run(i, make_problem([12, 34])) for i in range(3)]

    kept, equal, long = run_in_virtual_time(groups())[0]
    metrics = values(batch_metrics(Batch(groups=[kept], dropped=[("equal", equal), ("oversize", long)])))
    assert metrics["reward/mean"] == 1
    assert metrics["reward/equal_groups"] == 1
    dropped = {name: metrics[f"groups/dropped_{name}"] for name in ("equal", "oversize", "failed")}
    assert dropped == {"equal": 1, "oversize": 1, "failed": 0}


def test_ages_are_averaged_over_tokens():
    assert values(age_metrics(np.array([0, 1, 1, 2]))) == {"age/mean": 1.0, "age/max": 2}
