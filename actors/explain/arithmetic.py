"""How much a run draws, trains on, evaluates, publishes and saves.

Micro-batches come from the packing itself (`rl.rollouts.packing.plan_micro_batches`), for the two ends of
what replies may be: one token each, and as long as they may be. With the prompts of step 1, where they can be
known, both are exact; else they are of bounds on prompts.

Shape legend: P prompts of an optimizer step, G samples of each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from actors.explain.explanation import Range, RunArithmetic, StepArithmetic, Unknown
from actors.explain.known import Known
from actors.run_config import RunConfig
from rl.distributed.mesh import Degrees
from rl.models.qwen3_moe.model import MoE
from rl.rollouts.packing import plan_micro_batches
from rl.training.policy import shares_prompts

SHORTEST_SAMPLE = 2
"""A token of a prompt, and one of its reply."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Packing:
    """How the trainer packs the samples of one optimizer step."""

    num_samples: int
    max_tokens: int
    max_sequences: int | None
    num_ranks: int
    shares: bool

    def micro_batches(self, lengths_P: Sequence[int], *, prompts_P: Sequence[Hashable]) -> int:
        """Of each rank, where all samples of a prompt have so many inputs; those of equal prompts have their
        beginning in common."""
        lengths = [length for length in lengths_P for _ in range(self.num_samples)]
        families: dict[Hashable, list[int]] = defaultdict(list)
        for place, prompt in enumerate(prompts_P):
            families[prompt] += range(place * self.num_samples, (place + 1) * self.num_samples)
        plan = plan_micro_batches(
            lengths,
            families=list(families.values()) if self.shares else None,
            max_tokens=self.max_tokens,
            num_ranks=self.num_ranks,
            max_sequences=self.max_sequences,
        )
        return len(plan[0])


def step_arithmetic(known: Known, *, degrees: Degrees) -> StepArithmetic:
    """Raises ValueError where a sample fits no micro-batch."""
    loop = known.config.loop
    samples = loop.num_prompts * loop.num_samples
    limit = known.sample_limit
    prompts = known.prompts(loop.num_prompts)
    shortest, longest = _inputs(known, prompts)
    packing = _packing(known, degrees=degrees)
    width = loop.num_prompts // loop.num_minibatches
    unknown_P: list[Hashable] = list(range(loop.num_prompts))
    keys = unknown_P if prompts is None else [prompt.tobytes() for prompt in prompts]

    def micro_batches(lengths_P: Sequence[int]) -> int:
        return sum(
            packing.micro_batches(lengths_P[i : i + width], prompts_P=keys[i : i + width])
            for i in range(0, loop.num_prompts, width)
        )

    return StepArithmetic(
        num_prompts=loop.num_prompts,
        num_samples=loop.num_samples,
        samples=samples,
        optimizer_steps=loop.num_minibatches,
        samples_of_optimizer_step=width * loop.num_samples,
        data_ranks=degrees.dp,
        sample_tokens_most=limit,
        reply_tokens_most=samples * _reply_tokens(known),
        prompt_tokens=Unknown(why="the first prompts are not known here")
        if prompts is None
        else Range(fewest=min(map(len, prompts)), most=max(map(len, prompts))),
        trained_tokens=Range(fewest=loop.num_samples * sum(shortest), most=loop.num_samples * sum(longest)),
        micro_batches=Range(fewest=micro_batches(shortest), most=micro_batches(longest)),
        exact_prompts=prompts is not None,
    )


def run_arithmetic(known: Known, *, done_steps: int = 0) -> RunArithmetic:
    """Of all steps; `done_steps` of these by an earlier run."""
    config, loop, checkpoint = known.config, known.config.loop, known.config.trainer.checkpoint
    steps = range(1, loop.num_steps + 1)
    samples = loop.num_prompts * loop.num_samples
    warmup = config.warmup if config.hf_assets_path is None else None
    return RunArithmetic(
        num_steps=loop.num_steps,
        done_steps=done_steps,
        optimizer_steps=loop.num_steps * loop.num_minibatches,
        samples=loop.num_steps * samples,
        reply_tokens_most=loop.num_steps * samples * _reply_tokens(known),
        publishes=1 + sum(map(loop.publishes, steps)),
        evaluations=tuple(chain([0] if loop.eval_every else [], filter(loop.evaluates, steps))),
        eval_problems=_eval_problems(known),
        eval_replies_of_problem=1 + loop.evaluation.num_samples,
        checkpoints=tuple(
            step for step in (0, *steps) if checkpoint.due(step, last=step == loop.num_steps > 0)
        ),
        warmup_steps=0 if warmup is None else warmup.num_steps,
        warmup_demonstrations=0 if warmup is None else warmup.num_demonstrations,
    )


def _eval_problems(known: Known) -> dict[str, int] | Unknown:
    if not known.config.loop.eval_every:
        return {}
    if known.task is None:
        return Unknown(why="the task is not loaded here")
    return {name: len(problems) for name, problems in known.task.eval_sets().items()}


def _reply_tokens(known: Known) -> int:
    """Most tokens that the model produces in one rollout: of several turns, all but the first prompt."""
    loop = known.config.loop
    if known.single_turn:
        return loop.sampling.max_tokens
    return min(known.rollout_limit - 1, loop.episode.max_turns * loop.sampling.max_tokens)


def _inputs(known: Known, prompts: list[np.ndarray] | None) -> tuple[list[int], list[int]]:
    """[P] twice: the inputs of a sample of each prompt, where replies are one token, and at their longest."""
    config = known.config
    if prompts is None:
        num_prompts = config.loop.num_prompts
        return [SHORTEST_SAMPLE - 1] * num_prompts, [known.sample_limit - 1] * num_prompts
    longest = config.loop.sampling.max_tokens
    return (
        [min(len(prompt) + 1, known.sample_limit) - 1 for prompt in prompts],
        [min(len(prompt) + longest, known.sample_limit) - 1 for prompt in prompts],
    )


def _packing(known: Known, *, degrees: Degrees) -> _Packing:
    config: RunConfig = known.config
    training = config.trainer.training
    has_experts = isinstance(known.spec.model.block.feed_forward, MoE.Config)  # type: ignore[attr-defined]
    return _Packing(
        num_samples=config.loop.num_samples,
        max_tokens=training.max_tokens_per_microbatch,
        max_sequences=training.max_sequences_per_microbatch,
        num_ranks=degrees.dp,
        shares=shares_prompts(
            training, compile=config.trainer.compile, has_context=degrees.cp > 1, has_experts=has_experts
        ),
    )
