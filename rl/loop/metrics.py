"""The metrics of a step; each number carries the reduction that merges it with others.

Shape legend: G samples of a prompt.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from losses.correction import WEIGHT, WEIGHT_SQUARED, effective_sample_share
from rl.branches import split_rows
from rl.observability.metrics import Last, Max, Mean, Metric, Record, Std, Sum, merge
from rl.rollouts.evaluation import score_metrics
from rl.rollouts.group import RolloutWorker, ScoredRollout, has_equal_rewards
from rl.rollouts.producer import Batch, DropReason
from rl.trainer_types import ForwardBackwardResult, OptimStepResult
from rl.types import PublishResult, Rollout, Score
from rl.utils.clock import now_s

_FIELDS_OF_RESULT = ("ratio", "clipped_fraction")
"""Metrics of a loss that are fields of `ForwardBackwardResult` and have other names in a step's
record.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedMinibatch:
    """Results of one optimizer step: of its gradient, and of its update."""

    gradient: ForwardBackwardResult
    update: OptimStepResult


class StepClock:
    """Stopwatch of a step: what the loop waited for, and how long each role was idle.

    Example:
        clock.start()
        batch = await producer.take_batch()
        clock.split_batch_wait(batch)  # generate 1.10 s, score 0.02 s
        await trainer.forward_backward(samples)
        clock.lap("train")             # train 0.80 s
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
        """Divide the wait for a batch at its last token: generation before, scoring after."""
        # A group that arrived before the step began has made the loop wait for nothing.
        self.lap("generate", until=min(now_s(), max(group.generated_at for group in batch.groups)))
        self.lap("score")

    def idle_s(self) -> dict[str, float]:
        """Return the idle seconds of each role in this step until now."""
        step_s = sum(self.laps_s.values())
        generating_s, scoring_s = self._read_busy_s()
        generating_before_s, scoring_before_s = self._busy_at_start
        # Not below 0: the busy times go on after the last lap, which step_s ends with.
        return {
            "generator": max(0.0, step_s - (generating_s - generating_before_s)),
            "reward": max(0.0, step_s - (scoring_s - scoring_before_s)),
            "trainer": step_s - self.laps_s["train"],
        }

    def generated_tokens_per_s(self) -> Mean:
        """Return the speed of generation since the last call, over the time in which it ran."""
        # Since the last call and not since `start`: groups generated ahead belong to no step yet.
        tokens, busy_s = self._episodes.num_generated_tokens, self._episodes.generating.total_s()
        tokens_before, busy_before_s = self._reported
        self._reported = tokens, busy_s
        return Mean(tokens - tokens_before, busy_s - busy_before_s)

    def _read_busy_s(self) -> tuple[float, float]:
        return self._episodes.generating.total_s(), self._worker.scoring.total_s()


def batch_metrics(batch: Batch) -> dict[str, Metric]:
    """Return the metrics of a batch's rollouts and of the groups dropped since the last batch."""
    groups = [*batch.groups]
    num_dropped: Counter[DropReason] = Counter()
    for reason, group in batch.dropped:
        groups.append(group)
        num_dropped[reason] += 1

    parts: list[Mapping[str, Metric]] = []
    scores: list[Score] = []
    rollouts: list[Rollout] = []
    for group in groups:
        parts.append(group_metrics(group.scored, size=len(group.rollouts)))
        scores += group.scores
        rollouts += [member.rollout for member in group.scored]

    # Also reasons without a dropped group, so that every step has the same keys.
    dropped: dict[str, Metric] = {}
    for reason in get_args(DropReason):
        dropped[f"groups/dropped_{reason}"] = Sum(num_dropped[reason])
    of_rollouts = _environment_metrics(rollouts) | _branch_metrics(rollouts)
    return merge([*parts, score_metrics(scores), of_rollouts, dropped])


def group_metrics(scored_G: Sequence[ScoredRollout], *, size: int) -> dict[str, Metric]:
    """Return the metrics of a group of `size` rollouts; a group of one is equal to nothing."""
    if not scored_G:
        return {}
    rewards = [member.score.reward for member in scored_G]
    nums_generated = [member.rollout.num_completion_tokens for member in scored_G]
    num_tokens = num_attended = num_turns = 0
    num_correct = num_cut_off = num_unfinished = 0
    for member in scored_G:
        rollout = member.rollout
        num_tokens += rollout.num_tokens
        num_attended += _count_attended(rollout)
        num_turns += len(rollout.turns)
        num_correct += member.score.correct
        num_cut_off += rollout.completion.is_cut_off
        num_unfinished += rollout.end != "done"

    # Sums with their counts, because groups are merged by rollouts and not by groups.
    num_rollouts, num_generated = len(scored_G), sum(nums_generated)
    metrics: dict[str, Metric] = {
        "reward/mean": Mean.of(rewards),
        "reward/std": Std.of(rewards),
        "reward/correct": Mean(num_correct, num_rollouts),
        "prompt/tokens_mean": Mean(num_tokens - num_generated, num_rollouts),
        "completion/tokens_mean": Mean(num_generated, num_rollouts),
        "completion/tokens_max": Max(max(nums_generated)),
        "completion/context_mean": Mean(num_attended, num_generated),
        "completion/cut_off": Mean(num_cut_off, num_rollouts),
        "rollout/turns_mean": Mean(num_turns, num_rollouts),
        "rollout/unfinished": Mean(num_unfinished, num_rollouts),
    }
    # A single rollout always equals itself, which would look like a task without anything to learn.
    if size > 1:
        metrics["reward/equal_groups"] = Mean(has_equal_rewards(scored_G))
    return metrics


def staleness_metrics(off_policy_steps: np.ndarray) -> dict[str, Metric]:
    """Return mean and largest staleness of the trained tokens, in steps.

    Example:
        staleness_metrics(np.array([0, 0, 1, 1]))  # staleness/mean 0.5, staleness/max 1
    """
    return {
        "staleness/mean": Mean(float(off_policy_steps.sum()), len(off_policy_steps)),
        "staleness/max": Max(int(off_policy_steps.max())),
    }


def _count_attended(rollout: Rollout) -> int:
    """Return the context lengths of all trained tokens, added up."""
    total = 0
    for row in split_rows(rollout.branches):
        num_before = 0
        for i, is_new in zip(row.turns, row.is_new, strict=True):
            turn = rollout.turns[i]
            num_before += len(turn.prompt_ids)
            num_generated = len(turn.completion.token_ids)
            if is_new:
                total += num_generated * num_before + num_generated * (num_generated - 1) // 2
            num_before += num_generated
    return total


def _environment_metrics(rollouts: Sequence[Rollout]) -> dict[str, Metric]:
    """Return the environments' metrics, summed over turns and averaged over all rollouts."""
    # A rollout that does not report a metric counts as 0, such as one that called no tool.
    totals: dict[str, float] = defaultdict(float)
    for rollout in rollouts:
        for turn in rollout.turns:
            for name, value in turn.observation.metrics.items():
                totals[name] += value
    return {f"environment/{name}": Mean(total, len(rollouts)) for name, total in totals.items()}


def _branch_metrics(rollouts: Sequence[Rollout]) -> dict[str, Metric]:
    """Return the numbers of branches, of their causes and of rows, if any rollout branches."""
    num_branches = num_rows = 0
    causes: Counter[str] = Counter()
    for rollout in rollouts:
        num_branches += len(rollout.branches)
        num_rows += len(split_rows(rollout.branches))
        causes.update(branch.cause for branch in rollout.branches if branch.cause)
    if all(len(rollout.branches) == 1 for rollout in rollouts):
        return {}
    metrics: dict[str, Metric] = {
        "rollout/branches_mean": Mean(num_branches, len(rollouts)),
        "rollout/rows_mean": Mean(num_rows, len(rollouts)),
    }
    for cause, count in sorted(causes.items()):
        metrics[f"branches/{cause}"] = Sum(count)
    return metrics


def training_metrics(minibatches: Sequence[TrainedMinibatch]) -> dict[str, Metric]:
    # Later minibatches differ from the generator by the updates between them, not by a fault.
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
    # Means of tokens are merged by their number, so that a short minibatch counts for less.
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
    memory = gradient.memory
    if memory is not None:
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
        # What the samples have more than was computed is the prompts that they share.
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
    metrics: dict[str, Metric] = {}
    for name, mean in gradient.loss_metrics.items():
        if name in _FIELDS_OF_RESULT:
            continue
        if f"loss/{name}" in reserved:
            raise ValueError(
                f"the loss reports a metric {name!r}, but loss/{name} is the step's own: rename it"
            )
        # Sum and count, so that minibatches of different sizes merge by their tokens.
        metrics[f"loss/{name}"] = Mean(mean * num_tokens, num_tokens)
    return metrics


def _compute_effective_share(merged: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return the effective sample share of all importance weights, if there are any."""
    weight, squared = merged.get(f"loss/{WEIGHT}"), merged.get(f"loss/{WEIGHT_SQUARED}")
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
    `parity_s`, `sync/pushed_mb`, `sync/merge_lost` and `parity/logprob_diff` belong to the newest
    version that is served, `sync/version`.
    """
    num_trained = num_samples = 0
    for minibatch in minibatches:
        num_trained += minibatch.gradient.num_tokens
        num_samples += minibatch.gradient.num_samples
    laps_s = clock.laps_s
    step_s = sum(laps_s.values())
    laps = {f"time/{name}_s": lap_s for name, lap_s in laps_s.items()}
    idle = {f"time/{role}_idle_s": idle_s for role, idle_s in clock.idle_s().items()}
    return {
        **laps,
        "time/push_s": published.push_s,
        "time/pull_s": published.pull_s,
        "time/parity_s": published.parity_s,
        "time/step_s": step_s,
        **idle,
        "perf/generated_tokens_per_s": clock.generated_tokens_per_s(),
        "perf/trained_tokens_per_s": Mean(num_trained, laps_s["train"]),
        "perf/samples_per_s": Mean(num_samples, step_s),
        "sync/version": published.policy_version,
        "sync/pushed_mb": None if published.num_bytes is None else published.num_bytes / 1e6,
        "sync/merge_lost": published.merge_lost,
        "parity/logprob_diff": published.parity_diff,
    }
