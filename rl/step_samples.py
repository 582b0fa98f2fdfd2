"""From a step's batch to the samples of its minibatches: rewards by token, advantages, lengths.

    scored groups -> rewards by token (- KL) -> advantages -> samples -> too long ones -> minibatches

Shape legend: P prompts of a step, G samples of each, C tokens that the model produced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from rl.errors import RunError
from rl.loop_config import LoopConfig
from rl.observability.metrics import Mean, Metric, Sum
from rl.protocols import Learner
from rl.rollouts.grading import ScoredRollout, token_rewards
from rl.rollouts.group import Place
from rl.rollouts.kl_reward import kl_penalty
from rl.rollouts.producer import Batch
from rl.rollouts.samples import cut, policy_sample
from rl.types import TrainingSample

Placed = tuple[Place, TrainingSample]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepSamples:
    """What a step trains on."""

    minibatches: list[list[TrainingSample]]
    places: list[list[Place]]
    """Whose each of them is. A rollout that is left out is in no minibatch."""
    teaches: bool
    """Whether any token has an advantage other than 0."""
    advantages_PG: list[list[np.ndarray]]
    """[C] float32 of each scored rollout of each group."""
    metrics: dict[str, Metric]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleMaker:
    """Makes a batch's samples, asking the learner for what only it knows."""

    config: LoopConfig
    learner: Learner
    adds_proximal: bool
    """The logprobs before the step's first update go with the samples."""

    async def make(self, batch: Batch) -> StepSamples:
        members_PG = [group.scored for group in batch.groups]
        by_turn = self.config.advantage.credit == "token"
        rewards_PG = [[token_rewards(m, by_turn=by_turn) for m in members] for members in members_PG]
        metrics: dict[str, Metric] = {}
        references: list[np.ndarray] | None = None
        if self.config.kl_reward.coef:
            references, kl = await self._take_off_kl(members_PG, rewards_PG)
            metrics["reward/kl"] = kl
        advantages_PG = self.config.advantage(rewards_PG)
        samples_PG = [
            [self._sample(*pair) for pair in zip(*of_group, strict=True)]
            for of_group in zip(members_PG, advantages_PG, strict=True)
        ]
        if references is not None:
            known = iter(references)
            samples_PG = [[replace(s, reference_logprobs=next(known)) for s in of] for of in samples_PG]
        width = self.config.num_prompts // self.config.num_minibatches
        placed_PG = [[((p, g), s) for g, s in enumerate(of)] for p, of in enumerate(samples_PG)]
        placed, counts = self._within_limit(
            [list(chain(*placed_PG[i : i + width])) for i in range(0, len(placed_PG), width)]
        )
        parts = [[sample for _, sample in part] for part in placed]
        if self.adds_proximal:
            logprobs = iter(await self.learner.compute_logprobs([s for part in parts for s in part]))
            parts = [[replace(s, proximal_logprobs=next(logprobs)) for s in part] for part in parts]
        return StepSamples(
            minibatches=parts,
            places=[[place for place, _ in part] for part in placed],
            teaches=any(s.advantages[s.mask].any() for part in parts for s in part),
            advantages_PG=advantages_PG,
            metrics=metrics | counts,
        )

    def _sample(self, member: ScoredRollout, advantages_C: np.ndarray) -> TrainingSample:
        return policy_sample(
            member.rollout, advantages_C=advantages_C, temperature=self.config.sampling.temperature
        )

    async def _take_off_kl(
        self, members_PG: Sequence[Sequence[ScoredRollout]], rewards_PG: Sequence[Sequence[np.ndarray]]
    ) -> tuple[list[np.ndarray], Metric]:
        """`loop.kl_reward`: of each token's reward, in place. Returns the reference policy's logprobs of each
        rollout, [T] float32 nats, which the gradient need not compute again, and the KL by token."""
        setting = self.config.kl_reward
        flat = [member for members in members_PG for member in members]
        samples = [self._sample(m, np.zeros(m.rollout.num_completion_tokens, np.float32)) for m in flat]
        references = await self.learner.compute_reference_logprobs(samples)
        total, count = 0.0, 0
        for sample, reference_T, rewards_C in zip(
            samples, references, (r for rewards in rewards_PG for r in rewards), strict=True
        ):
            kl_C = kl_penalty(
                sample.generator_logprobs[sample.mask], reference_T[sample.mask], setting.estimator
            )
            rewards_C -= setting.coef * kl_C
            total, count = total + float(kl_C.sum()), count + len(kl_C)
        return references, Mean(total, count)

    def _within_limit(self, parts: list[list[Placed]]) -> tuple[list[list[Placed]], dict[str, Metric]]:
        """`loop.max_sample_tokens` with `loop.long_samples` drop or truncate; what is empty then is left out.

        Raises:
            RunError: no sample is left.
        """
        limit, policy = self.config.max_sample_tokens, self.config.long_samples
        if limit is None or policy == "drop_group":
            return parts, {}
        samples = [s for part in parts for _, s in part]
        num_long = sum(len(s.token_ids) > limit for s in samples)
        if policy == "truncate":
            # Of a prompt as long as the limit nothing is left to train on.
            cuts = [[(place, cut(s, max_tokens=limit)) for place, s in part] for part in parts]
            kept = [[(place, s) for place, s in part if s.mask.any()] for part in cuts]
        else:
            kept = [[(place, s) for place, s in part if len(s.token_ids) <= limit] for part in parts]
        kept = [part for part in kept if part]
        num_dropped = len(samples) - sum(map(len, kept))
        if not kept:
            raise RunError(
                f"none of the step's {len(samples)} samples can be trained on: the shortest has "
                f"{min(len(s.token_ids) for s in samples)} tokens, loop.max_sample_tokens={limit} with "
                f"loop.long_samples={policy}; raise the first, or None"
            )
        counts: dict[str, Metric] = {"samples/dropped": Sum(num_dropped)}
        if policy == "truncate":
            counts["samples/truncated"] = Sum(num_long - num_dropped)
        return kept, counts
