"""The training samples of a batch of rollouts, and what was trained of the recorded ones.

    scored groups -> rewards by token (- KL) -> advantages -> samples -> length limit, masks ->
    minibatches

A rollout of several branches has several samples, its rows. Rewards, the KL and advantages are of
whole rollouts, [C]; lengths, masks and the trainer's logprobs are of rows, [T].

Shape legend: P prompts of a step, G rollouts of each, T tokens of a sample, C trained tokens of a
rollout, which the model generated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np

from rl.branches import split_rows
from rl.loop.config import LoopConfig
from rl.observability.metrics import Mean, Metric, Sum
from rl.protocols import LogprobSource
from rl.rollouts.advantage import KLReward, compute_kl_penalty
from rl.rollouts.group import (
    RolloutId,
    SampleId,
    ScoredRollout,
    compute_token_rewards,
    get_rollout_id,
    make_sample_id,
)
from rl.rollouts.producer import Batch
from rl.rollouts.samples import collect_from_rows, cut, policy_samples
from rl.rollouts.trained import TOO_LONG, TRAINED, TRUNCATED, TrainedRollout
from rl.trainer_types import TrainedTokens
from rl.types import Rollout, TrainingSample
from rl.utils.errors import RunError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingBatch:
    """The samples that a step trains on."""

    minibatches: list[dict[SampleId, TrainingSample]]
    """Samples of each optimizer step, in order, by the row of a rollout that they are."""
    has_gradient: bool
    """True if any trained token has an advantage other than 0."""
    advantages_PG: list[list[np.ndarray]]
    """[C] float32 for each scored rollout of each group."""
    masked: frozenset[RolloutId]
    """Rollouts that are masked because they ran out of tokens."""
    references: Mapping[SampleId, np.ndarray]
    """The reference policy's logprobs of each sample, too long ones included, [T] float32 nats;
    empty unless a KL is part of the reward."""
    metrics: dict[str, Metric]


async def make_training_batch(
    batch: Batch, *, config: LoopConfig, trainer: LogprobSource, adds_proximal_logprobs: bool
) -> TrainingBatch:
    """Return the samples of a batch, divided into minibatches by prompts.

    Args:
        trainer: computes reference and proximal logprobs.
        adds_proximal_logprobs: the samples carry the trainer's logprobs from before the step.

    Raises RunError if no sample is left to train on.
    """
    members_PG = [group.scored for group in batch.groups]
    temperature = config.sampling.temperature
    by_turn = config.advantage.credit == "token"
    rewards_PG: list[list[np.ndarray]] = []
    for members in members_PG:
        rewards_G = [compute_token_rewards(member, by_turn=by_turn) for member in members]
        rewards_PG.append(rewards_G)

    # The KL is part of the reward, so it is subtracted before groups are compared.
    metrics: dict[str, Metric] = {}
    references: dict[SampleId, np.ndarray] = {}
    if config.kl_reward.coef:
        rewards_PG, references, metrics["reward/kl"] = await _subtract_kl(
            rewards_PG,
            members_PG,
            kl_reward=config.kl_reward,
            temperature=temperature,
            trainer=trainer,
        )
    advantages_PG = config.advantage(rewards_PG)

    samples = _make_samples(members_PG, chain(*advantages_PG), temperature=temperature)
    for sample_id, reference_T in references.items():
        samples[sample_id] = replace(samples[sample_id], reference_logprobs=reference_T)

    # Lengths and masks come after the advantages: a sample that is left out of the loss still
    # counts for its group.
    samples, counts = _limit_lengths(
        samples, limit=config.max_sample_tokens, policy=config.long_samples
    )
    masked: frozenset[RolloutId] = frozenset()
    if config.mask_truncated_completions:
        masked = _mask_truncated(samples, members_PG)
        counts["samples/masked"] = Sum(len(masked))

    if adds_proximal_logprobs:
        proximal = await trainer.compute_logprobs([*samples.values()])
        for sample_id, proximal_T in zip(list(samples), proximal, strict=True):
            samples[sample_id] = replace(samples[sample_id], proximal_logprobs=proximal_T)

    width = config.groups_per_batch // config.num_minibatches
    return TrainingBatch(
        minibatches=_divide_by_prompts(samples, width=width),
        has_gradient=any(s.advantages[s.mask].any() for s in samples.values()),
        advantages_PG=advantages_PG,
        masked=masked,
        references=references,
        metrics=metrics | counts,
    )


def _make_samples(
    members_PG: Sequence[Sequence[ScoredRollout]],
    advantages: Iterable[np.ndarray],
    *,
    temperature: float,
) -> dict[SampleId, TrainingSample]:
    """Return the rows of all rollouts; `advantages` are in the order of the rollouts.

    Raises RunError if there is none.
    """
    ids: list[SampleId] = []
    for p, members in enumerate(members_PG):
        for g, member in enumerate(members):
            num_rows = len(split_rows(member.rollout.branches))
            ids += [make_sample_id((p, g), row=row) for row in range(num_rows)]
    if not ids:
        raise RunError(
            f"none of the step's {sum(map(len, members_PG))} rollouts has a branch to train on: "
            "all have is_trained=False"
        )

    rollouts = [member.rollout for member in chain(*members_PG)]
    samples = policy_samples(rollouts, [*advantages], temperature=temperature)
    return dict(zip(ids, samples, strict=True))


def _divide_by_prompts(
    samples: Mapping[SampleId, TrainingSample], *, width: int
) -> list[dict[SampleId, TrainingSample]]:
    """Return the samples of each `width` groups that have any."""
    # By prompts, not by samples: a group whose samples were dropped leaves its minibatch smaller
    # instead of moving the prompts behind it.
    minibatches: dict[int, dict[SampleId, TrainingSample]] = defaultdict(dict)
    for sample_id, sample in samples.items():
        minibatches[sample_id[0] // width][sample_id] = sample
    return [*minibatches.values()]


def _mask_truncated(
    samples: dict[SampleId, TrainingSample], members_PG: Sequence[Sequence[ScoredRollout]]
) -> frozenset[RolloutId]:
    """Leave no token to train on in rollouts that ran out of tokens; return these.

    Masked samples stay in the batch, because a loss may divide by its number of sequences.
    """
    masked: set[RolloutId] = set()
    for sample_id, sample in list(samples.items()):
        p, g = get_rollout_id(sample_id)
        if members_PG[p][g].rollout.is_truncated:
            samples[sample_id] = replace(sample, mask=np.zeros_like(sample.mask))
            masked.add((p, g))
    return frozenset(masked)


async def _subtract_kl(
    rewards_PG: Sequence[Sequence[np.ndarray]],
    members_PG: Sequence[Sequence[ScoredRollout]],
    *,
    kl_reward: KLReward,
    temperature: float,
    trainer: LogprobSource,
) -> tuple[list[list[np.ndarray]], dict[SampleId, np.ndarray], Metric]:
    """Subtract `loop.kl_reward` from each token's reward.

    Returns:
        The rewards, the reference policy's logprobs of each sample ([T] float32 nats), and the mean
        KL of a token.
    """
    # The reference policy reads tokens alone: the advantages do not exist yet, so zeros stand in.
    zeros = (np.zeros(m.rollout.num_completion_tokens, np.float32) for m in chain(*members_PG))
    made = _make_samples(members_PG, zeros, temperature=temperature)
    samples = [*made.values()]
    references = await trainer.compute_reference_logprobs(samples)

    kls: list[np.ndarray] = []
    num_rows = 0
    for member in chain(*members_PG):
        rows = slice(num_rows, num_rows + len(split_rows(member.rollout.branches)))
        num_rows = rows.stop
        collect = partial(collect_from_rows, member.rollout, dtype=np.float32, missing=np.nan)
        generator_C = collect([sample.generator_logprobs for sample in samples[rows]])
        kls.append(compute_kl_penalty(generator_C, collect(references[rows]), kl_reward.estimator))

    known = iter(kls)
    penalized_PG: list[list[np.ndarray]] = []
    for rewards_G in rewards_PG:
        penalized_G = [rewards_C - kl_reward.coef * next(known) for rewards_C in rewards_G]
        penalized_PG.append(penalized_G)
    total = sum(float(kl_C.sum()) for kl_C in kls)
    references_by_id = dict(zip(made, references, strict=True))
    return penalized_PG, references_by_id, Mean(total, sum(map(len, kls)))


def _limit_lengths(
    samples: dict[SampleId, TrainingSample], *, limit: int | None, policy: str
) -> tuple[dict[SampleId, TrainingSample], dict[str, Metric]]:
    """Drop or truncate samples above `loop.max_sample_tokens`; raise RunError if no sample is
    left.
    """
    # With "drop_group" the producer has already replaced the groups of long samples.
    if limit is None or policy == "drop_group":
        return samples, {}

    trainable: dict[SampleId, TrainingSample] = {}
    num_long = 0
    for sample_id, sample in samples.items():
        is_long = len(sample.token_ids) > limit
        num_long += is_long
        if policy == "truncate":
            shortened = cut(sample, max_tokens=limit)
            # A prompt that fills the limit leaves nothing to train on.
            if shortened.mask.any():
                trainable[sample_id] = shortened
        elif not is_long:
            trainable[sample_id] = sample

    if not trainable:
        raise RunError(
            f"none of the step's {len(samples)} samples can be trained on: the shortest has "
            f"{min(len(s.token_ids) for s in samples.values())} tokens, "
            f"loop.max_sample_tokens={limit} with loop.long_samples={policy}; raise "
            "max_sample_tokens or set it to None"
        )

    num_dropped = len(samples) - len(trainable)
    counts: dict[str, Metric] = {"samples/dropped": Sum(num_dropped)}
    if policy == "truncate":
        counts["samples/truncated"] = Sum(num_long - num_dropped)
    return trainable, counts


def collect_trained_rollouts(
    batch: Batch,
    training: TrainingBatch,
    *,
    recorded: Collection[RolloutId],
    tokens: Mapping[SampleId, TrainedTokens],
) -> list[list[TrainedRollout]]:
    """Return the advantages of each scored rollout of each group, and what is known of the training
    on the tokens of the recorded ones.

    `tokens` are what the loss has read.
    """
    samples: dict[SampleId, TrainingSample] = {}
    minibatches: dict[RolloutId, int] = {}
    for number, minibatch in enumerate(training.minibatches):
        samples |= minibatch
        minibatches |= dict.fromkeys(map(get_rollout_id, minibatch), number)

    rows: list[list[TrainedRollout]] = []
    for p, group in enumerate(batch.groups):
        row = []
        members = zip(group.scored, training.advantages_PG[p], strict=True)
        for g, (member, advantages_C) in enumerate(members):
            trained = TrainedRollout(advantages=advantages_C, minibatch=minibatches.get((p, g), -1))
            if (p, g) in recorded:
                # Tokens are large: only rollouts that are recorded carry them.
                trained = _add_tokens(trained, member.rollout, (p, g), samples, training, tokens)
            row.append(trained)
        rows.append(row)
    return rows


def _add_tokens(
    trained: TrainedRollout,
    rollout: Rollout,
    rollout_id: RolloutId,
    samples: Mapping[SampleId, TrainingSample],
    training: TrainingBatch,
    tokens: Mapping[SampleId, TrainedTokens],
) -> TrainedRollout:
    """Add masks and logprobs of a recorded rollout from its rows.

    A row that was too long to train on is not among the `samples`.
    """
    ids = [make_sample_id(rollout_id, row=row) for row in range(len(split_rows(rollout.branches)))]
    rows = [samples.get(sample_id) for sample_id in ids]
    read = [tokens.get(sample_id) for sample_id in ids]
    collect = partial(collect_from_rows, rollout, dtype=np.float32, missing=np.nan)

    def collect_known(values: list[np.ndarray | None]) -> np.ndarray | None:
        return None if all(value is None for value in values) else collect(values)

    # A masked rollout has no token to train on; of others only what was cut is missing.
    reason = TRUNCATED if rollout_id in training.masked else TOO_LONG
    reasons = [None if s is None else np.where(s.mask, TRAINED, reason) for s in rows]
    return replace(
        trained,
        reasons=collect_from_rows(rollout, reasons, dtype=np.int8, missing=reason),
        trainer_logprobs=collect_known([None if t is None else t.logprobs for t in read]),
        trainer_advantages=collect_known([None if t is None else t.advantages for t in read]),
        proximal_logprobs=collect_known([None if s is None else s.proximal_logprobs for s in rows]),
        # Also of tokens that were cut: their KL is part of the rewards that were compared.
        reference_logprobs=collect_known([training.references.get(i) for i in ids]),
    )
