"""What a step of a loop reports: its parts, each number with the reduction that joins it to the others.

Shape legend: P prompts of a step, G samples of each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import get_args

import numpy as np

from losses.correction import WEIGHT, WEIGHT_SQUARED, effective_sample_share
from rl.observability.metrics import Last, Max, Mean, Metric, Record, Std, Sum, merge
from rl.rollouts.grading import ScoredRollout, equal_rewards
from rl.rollouts.producer import Batch, DropReason
from rl.rollouts.score_metrics import score_metrics
from rl.step_clock import StepClock
from rl.types import ForwardBackwardResult, OptimStepResult, PublishResult, Rollout

_IN_EVERY_RESULT = ("ratio", "clipped_fraction")
"""Metrics of a loss that have fields of their own in a result, and names of their own in a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedMinibatch:
    """What the learner said of one optimizer step and of the gradient before it."""

    gradient: ForwardBackwardResult
    update: OptimStepResult


def batch_metrics(batch: Batch) -> dict[str, Metric]:
    """Of all rollouts that became known with a batch: of groups that are trained on and of dropped ones."""
    groups = [*batch.groups, *(group for _, group in batch.dropped)]
    reasons: dict[str, Metric] = {f"groups/dropped_{reason}": Sum(0) for reason in get_args(DropReason)}
    counts = [{f"groups/dropped_{reason}": Sum(1)} for reason, _ in batch.dropped]
    by_function = score_metrics([score for group in groups for score in group.scores])
    by_environment = _environment_metrics([member.rollout for group in groups for member in group.scored])
    of_groups = [group_metrics(group.scored) for group in groups]
    return merge([*of_groups, by_function, by_environment, reasons, *counts])


def group_metrics(scored_G: Sequence[ScoredRollout]) -> dict[str, Metric]:
    """Of those of one prompt's rollouts that could be scored; nothing where none could."""
    if not scored_G:
        return {}
    return merge([*map(_rollout_metrics, scored_G), {"reward/equal_groups": Mean(equal_rewards(scored_G))}])


def age_metrics(ages: np.ndarray) -> dict[str, Metric]:
    """Of all trained tokens: steps between the weights that drew them and those they train."""
    return {"age/mean": Mean(float(ages.sum()), len(ages)), "age/max": Max(int(ages.max()))}


def _rollout_metrics(member: ScoredRollout) -> dict[str, Metric]:
    rollout, score = member.rollout, member.score
    num_drawn = rollout.num_completion_tokens
    return {
        "reward/mean": Mean(score.reward),
        "reward/std": Std(score.reward),
        "reward/correct": Mean(score.correct),
        "prompt/tokens_mean": Mean(rollout.num_tokens - num_drawn),
        "completion/tokens_mean": Mean(num_drawn),
        "completion/tokens_max": Max(num_drawn),
        "completion/context_mean": Mean(_attended(rollout), num_drawn),
        "completion/cut_off": Mean(rollout.completion.finish_reason == "length"),
        "rollout/turns_mean": Mean(len(rollout.turns)),
        "rollout/unfinished": Mean(rollout.end != "done"),
    }


def _attended(rollout: Rollout) -> int:
    """Of all tokens that the model produced, together, those that it had before it when it drew each."""
    total = num_before = 0
    for turn in rollout.turns:
        num_before += len(turn.prompt_ids)
        num_drawn = len(turn.completion.token_ids)
        total += num_drawn * num_before + num_drawn * (num_drawn - 1) // 2
        num_before += num_drawn
    return total


def _environment_metrics(rollouts: Sequence[Rollout]) -> dict[str, Metric]:
    """What the environments report of their turns, added up, as a mean over all rollouts: 0 for those that do
    not report it."""
    totals: dict[str, float] = defaultdict(float)
    for turn in chain.from_iterable(rollout.turns for rollout in rollouts):
        for name, value in turn.observation.metrics.items():
            totals[name] += value
    return {f"environment/{name}": Mean(total, len(rollouts)) for name, total in totals.items()}


def training_metrics(minibatches: Sequence[TrainedMinibatch]) -> dict[str, Metric]:
    """Of the optimizer steps of one round of rollouts, at least one."""
    # Of the first alone: later ones differ from the generator by the updates between.
    first = _mismatch_metrics(minibatches[0].gradient)
    merged = merge([*map(_minibatch_metrics, minibatches), first])
    return merged | _effective_share(merged)


def _minibatch_metrics(minibatch: TrainedMinibatch) -> dict[str, Metric]:
    gradient, update = minibatch.gradient, minibatch.update
    num_tokens = gradient.num_valid_tokens
    metrics: dict[str, Metric] = {
        # As optimised: each step divides by its own denominator.
        "loss/mean": Mean(gradient.loss_mean),
        "loss/ratio_mean": Mean(gradient.ratio_mean * num_tokens, num_tokens),
        "loss/clipped_fraction": Mean(gradient.clipped_fraction * num_tokens, num_tokens),
        "loss/entropy_mean": Mean(gradient.entropy_mean * num_tokens, num_tokens),
        "loss/grad_norm": Mean(update.grad_norm),
        "loss/grad_norm_max": Max(update.grad_norm),
        "loss/lr": Last(update.lr),
    }
    if gradient.expert_load is not None:
        metrics["experts/busiest_mean"] = Mean(gradient.expert_load.busiest_mean)
        metrics["experts/busiest_max"] = Max(gradient.expert_load.busiest_max)
    return metrics | _packing_metrics(gradient) | _own_metrics(gradient, taken=metrics)


def _packing_metrics(gradient: ForwardBackwardResult) -> dict[str, Metric]:
    packing = gradient.packing
    if packing is None:
        return {}
    num_rows = packing.num_packed + packing.num_padding
    return {
        "packing/num_micro_batches": Sum(packing.num_micro_batches),
        "packing/padding": Mean(packing.num_padding, num_rows),
        "packing/fill": Mean(packing.num_packed, packing.num_room),
        "packing/shared": Mean(gradient.num_tokens - packing.num_packed, gradient.num_tokens),
        "packing/context_mean": Mean(packing.num_attended, packing.num_packed if packing.num_attended else 0),
    }


def _own_metrics(gradient: ForwardBackwardResult, *, taken: Mapping[str, Metric]) -> dict[str, Metric]:
    """What the loss itself reports, by token; raises ValueError for a name that is the step's."""
    num_tokens = gradient.num_valid_tokens
    own = {name: mean for name, mean in gradient.loss_metrics.items() if name not in _IN_EVERY_RESULT}
    for name in own:
        if f"loss/{name}" in taken:
            raise ValueError(
                f"the loss reports a metric {name!r}, but loss/{name} is the step's own: rename it"
            )
    return {f"loss/{name}": Mean(mean * num_tokens, num_tokens) for name, mean in own.items()}


def _effective_share(merged: Mapping[str, Metric]) -> dict[str, Metric]:
    """Of the importance weights of all minibatches, no mean of theirs; empty where there are no weights."""
    weight, squared = (merged.get(f"loss/{name}") for name in (WEIGHT, WEIGHT_SQUARED))
    if not (isinstance(weight, Mean) and isinstance(squared, Mean) and weight.count):
        return {}
    share = effective_sample_share(mean_weight=weight.value, mean_squared_weight=squared.value)
    return {"loss/correction_effective_share": Last(share)}


def _mismatch_metrics(gradient: ForwardBackwardResult) -> dict[str, Metric]:
    return {
        "logprob_diff/mean": Mean(gradient.logprob_diff_mean),
        "logprob_diff/max": Max(gradient.logprob_diff_max),
        "logprob_diff/identical": Last(int(gradient.logprobs_identical)),
    }


def time_metrics(
    *, minibatches: Sequence[TrainedMinibatch], published: PublishResult, clock: StepClock
) -> Record:
    """Seconds of each part of a step, and what was done in them.

    `time/generate_s`, `score_s`, `train_s` and `publish_s` are what the loop waited for, and together the
    step; where generation runs ahead, the first two are short. `time/push_s`, `pull_s` and `canary_s`, and
    `canary/logprob_diff`, are of the newest version that is served, `sync/version`.
    """
    num_trained = sum(minibatch.gradient.num_tokens for minibatch in minibatches)
    num_samples = sum(minibatch.gradient.num_samples for minibatch in minibatches)
    laps_s = clock.laps_s
    step_s = sum(laps_s.values())
    return {
        **{f"time/{name}_s": lap_s for name, lap_s in laps_s.items()},
        "time/push_s": published.push_s,
        "time/pull_s": published.pull_s,
        "time/canary_s": published.canary_s,
        "time/step_s": step_s,
        **{f"time/{role}_idle_s": idle_s for role, idle_s in clock.idle_s().items()},
        "perf/generated_tokens_per_s": clock.generated_tokens_per_s(),
        "perf/trained_tokens_per_s": Mean(num_trained, laps_s["train"]),
        "perf/samples_per_s": Mean(num_samples, step_s),
        "sync/version": published.policy_version,
        "canary/logprob_diff": published.canary_diff,
    }
