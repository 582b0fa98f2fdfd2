"""The metrics of a step; each number carries the reduction that merges it with others.

Shape legend: G samples of a prompt.
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
from rl.rollouts.evaluation import score_metrics
from rl.rollouts.group import RolloutWorker, ScoredRollout, equal_rewards
from rl.rollouts.producer import Batch, DropReason
from rl.types import ForwardBackwardResult, OptimStepResult, PublishResult, Rollout
from rl.utils.clock import now_s

_FIELDS_OF_RESULT = ("ratio", "clipped_fraction")
"""Metrics of a loss that are fields of `ForwardBackwardResult` and have other names in a step's
record.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedMinibatch:
    gradient: ForwardBackwardResult
    update: OptimStepResult


class StepClock:
    """Stopwatch of a step: the seconds that the loop waited for each part, and each role's idle
    time.
    """

    def __init__(self, worker: RolloutWorker) -> None:
        self._worker = worker
        self._episodes = worker.episodes
        self._last = 0.0
        self._busy_at_start = (0.0, 0.0)
        self._reported = (0, 0.0)
        self.laps_s: dict[str, float] = {}

    def start(self) -> None:
        self._last = now_s()
        self._busy_at_start = self._read_busy_s()
        self.laps_s = defaultdict(float)

    def lap(self, name: str, *, until: float | None = None) -> None:
        """Attribute the time since the last lap, until now or `until`, to a part of the step."""
        until = now_s() if until is None else max(until, self._last)
        self.laps_s[name] += until - self._last
        self._last = until

    def split_batch_wait(self, batch: Batch) -> None:
        """Split the wait for a batch at the arrival of its last token: generation before, scoring
        after.
        """
        self.lap("generate", until=min(now_s(), max(group.generated_at for group in batch.groups)))
        self.lap("score")

    def idle_s(self) -> dict[str, float]:
        """Return the idle seconds of each role in this step until now."""
        step_s = sum(self.laps_s.values())
        generating_s, scoring_s = (
            now - before
            for now, before in zip(self._read_busy_s(), self._busy_at_start, strict=True)
        )
        return {
            "generator": max(0.0, step_s - generating_s),
            "reward": max(0.0, step_s - scoring_s),
            "trainer": step_s - self.laps_s["train"],
        }

    def generated_tokens_per_s(self) -> Mean:
        """Return the speed of generation since the last call, over the time in which any completion
        ran.
        """
        tokens, busy_s = self._episodes.num_generated_tokens, self._episodes.generating.total_s()
        tokens_before, busy_before_s = self._reported
        self._reported = tokens, busy_s
        return Mean(tokens - tokens_before, busy_s - busy_before_s)

    def _read_busy_s(self) -> tuple[float, float]:
        return self._episodes.generating.total_s(), self._worker.scoring.total_s()


def batch_metrics(batch: Batch) -> dict[str, Metric]:
    """Return the metrics of a batch's rollouts and of the groups dropped since the last batch."""
    groups = [*batch.groups, *(group for _, group in batch.dropped)]
    reasons: dict[str, Metric] = {
        f"groups/dropped_{reason}": Sum(0) for reason in get_args(DropReason)
    }
    counts = [{f"groups/dropped_{reason}": Sum(1)} for reason, _ in batch.dropped]
    by_function = score_metrics([score for group in groups for score in group.scores])
    by_environment = _environment_metrics(
        [member.rollout for group in groups for member in group.scored]
    )
    of_groups = [group_metrics(group.scored, size=len(group.rollouts)) for group in groups]
    return merge([*of_groups, by_function, by_environment, reasons, *counts])


def group_metrics(scored_G: Sequence[ScoredRollout], *, size: int) -> dict[str, Metric]:
    """Return the metrics of a group of `size` rollouts; a group of one is equal to nothing."""
    if not scored_G:
        return {}
    equal: dict[str, Metric] = (
        {"reward/equal_groups": Mean(equal_rewards(scored_G))} if size > 1 else {}
    )
    rollouts, scores = [m.rollout for m in scored_G], [m.score for m in scored_G]
    rewards = [score.reward for score in scores]
    nums_generated = [rollout.num_completion_tokens for rollout in rollouts]
    num_generated, num_tokens = sum(nums_generated), sum(rollout.num_tokens for rollout in rollouts)
    return {
        "reward/mean": Mean.of(rewards),
        "reward/std": Std.of(rewards),
        "reward/correct": Mean.of([score.correct for score in scores]),
        "prompt/tokens_mean": Mean(num_tokens - num_generated, len(rollouts)),
        "completion/tokens_mean": Mean(num_generated, len(rollouts)),
        "completion/tokens_max": Max(max(nums_generated)),
        "completion/context_mean": Mean(sum(map(_count_attended, rollouts)), num_generated),
        "completion/cut_off": Mean.of([r.completion.is_cut_off for r in rollouts]),
        "rollout/turns_mean": Mean.of([len(r.turns) for r in rollouts]),
        "rollout/unfinished": Mean.of([r.end != "done" for r in rollouts]),
        **equal,
    }


def staleness_metrics(off_policy_steps: np.ndarray) -> dict[str, Metric]:
    return {
        "staleness/mean": Mean(float(off_policy_steps.sum()), len(off_policy_steps)),
        "staleness/max": Max(int(off_policy_steps.max())),
    }


def _count_attended(rollout: Rollout) -> int:
    """Return the context lengths of all generated tokens, added up."""
    total = num_before = 0
    for turn in rollout.turns:
        num_before += len(turn.prompt_ids)
        num_generated = len(turn.completion.token_ids)
        total += num_generated * num_before + num_generated * (num_generated - 1) // 2
        num_before += num_generated
    return total


def _environment_metrics(rollouts: Sequence[Rollout]) -> dict[str, Metric]:
    """Return the environments' metrics, summed over turns; a rollout that does not report one
    counts as 0.
    """
    totals: dict[str, float] = defaultdict(float)
    for turn in chain.from_iterable(rollout.turns for rollout in rollouts):
        for name, value in turn.observation.metrics.items():
            totals[name] += value
    return {f"environment/{name}": Mean(total, len(rollouts)) for name, total in totals.items()}


def training_metrics(minibatches: Sequence[TrainedMinibatch]) -> dict[str, Metric]:
    # Later minibatches differ from the generator by the updates between them.
    first = minibatches[0].gradient
    mismatch: dict[str, Metric] = {
        "logprob_diff/mean": Mean(first.logprob_diff_mean),
        "logprob_diff/max": Max(first.logprob_diff_max),
        "logprob_diff/identical": Last(int(first.logprobs_identical)),
    }
    merged = merge([*map(_minibatch_metrics, minibatches), mismatch])
    return merged | _compute_effective_share(merged)


def _minibatch_metrics(minibatch: TrainedMinibatch) -> dict[str, Metric]:
    gradient, update = minibatch.gradient, minibatch.update
    num_tokens = gradient.num_valid_tokens
    metrics: dict[str, Metric] = {
        # A mean over optimizer steps, each of which divides by its own denominator.
        "loss/mean": Mean(gradient.loss_mean),
        "loss/ratio_mean": Mean(gradient.ratio_mean * num_tokens, num_tokens),
        "loss/clipped_fraction": Mean(gradient.clipped_fraction * num_tokens, num_tokens),
        "loss/entropy_mean": Mean(gradient.entropy_mean * num_tokens, num_tokens),
        "loss/grad_norm": Mean(update.grad_norm),
        "loss/grad_norm_max": Max(update.grad_norm),
        "loss/lr": Last(update.lr),
    }
    if update.rounding is not None:
        metrics["loss/updates_rounded_away"] = Mean(update.rounding.rounded_away)
        metrics["loss/updates_applied"] = Mean(update.rounding.applied)
    if gradient.expert_load is not None:
        metrics["experts/busiest_mean"] = Mean(gradient.expert_load.busiest_mean)
        metrics["experts/busiest_max"] = Max(gradient.expert_load.busiest_max)
    if (memory := gradient.memory) is not None:
        metrics["memory/allocated_gb"] = Max(memory.allocated / 1e9)
        metrics["memory/reserved_gb"] = Max(memory.reserved / 1e9)
        metrics["memory/total_gb"] = Max(memory.total / 1e9)
    return metrics | _packing_metrics(gradient) | _loss_metrics(gradient, reserved=metrics)


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
        "packing/context_mean": Mean(
            packing.num_attended, packing.num_packed if packing.num_attended else 0
        ),
    }


def _loss_metrics(
    gradient: ForwardBackwardResult, *, reserved: Mapping[str, Metric]
) -> dict[str, Metric]:
    """Return the loss's own metrics, averaged over tokens; raise ValueError for a reserved name."""
    num_tokens = gradient.num_valid_tokens
    own = {
        name: mean for name, mean in gradient.loss_metrics.items() if name not in _FIELDS_OF_RESULT
    }
    for name in own:
        if f"loss/{name}" in reserved:
            raise ValueError(
                f"the loss reports a metric {name!r}, but loss/{name} is the step's own: rename it"
            )
    return {f"loss/{name}": Mean(mean * num_tokens, num_tokens) for name, mean in own.items()}


def _compute_effective_share(merged: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return the effective sample share of all importance weights, if there are any."""
    weight, squared = (merged.get(f"loss/{name}") for name in (WEIGHT, WEIGHT_SQUARED))
    if not (isinstance(weight, Mean) and isinstance(squared, Mean) and weight.count):
        return {}
    share = effective_sample_share(mean_weight=weight.value, mean_squared_weight=squared.value)
    return {"loss/correction_effective_share": Last(share)}


def time_metrics(
    *, minibatches: Sequence[TrainedMinibatch], published: PublishResult, clock: StepClock
) -> Record:
    """Return the seconds of each part of a step, and the work done in them.

    `time/generate_s`, `score_s`, `train_s` and `publish_s` are the loop's waits and add up to the
    step; the first two are short where generation runs ahead. `time/push_s`, `pull_s` and
    `parity_s`, and `parity/logprob_diff`, belong to the newest version that is served,
    `sync/version`.
    """
    num_trained = sum(minibatch.gradient.num_tokens for minibatch in minibatches)
    num_samples = sum(minibatch.gradient.num_samples for minibatch in minibatches)
    laps_s = clock.laps_s
    step_s = sum(laps_s.values())
    return {
        **{f"time/{name}_s": lap_s for name, lap_s in laps_s.items()},
        "time/push_s": published.push_s,
        "time/pull_s": published.pull_s,
        "time/parity_s": published.parity_s,
        "time/step_s": step_s,
        **{f"time/{role}_idle_s": idle_s for role, idle_s in clock.idle_s().items()},
        "perf/generated_tokens_per_s": clock.generated_tokens_per_s(),
        "perf/trained_tokens_per_s": Mean(num_trained, laps_s["train"]),
        "perf/samples_per_s": Mean(num_samples, step_s),
        "sync/version": published.policy_version,
        "parity/logprob_diff": published.parity_diff,
    }
