"""Greedy evaluation on a held-out set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl.errors import RunError
from rl.protocols import Sampler, Scorer
from rl.rollouts.renderer import ChatRenderer
from rl.types import Prompt, SamplingParams, Score


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Means over the held-out problems."""

    num_problems: int
    correct: float
    reward: float
    parts: dict[str, float]
    """Mean of each reward function that the rubric has, by name."""


async def evaluate(
    *, prompts: Sequence[Prompt], sampler: Sampler, scorer: Scorer, renderer: ChatRenderer, max_tokens: int
) -> Evaluation:
    """One greedy reply to each prompt, graded.

    Raises:
        RunError: if a reply could not be scored.
    """
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=renderer.stop_token_ids)
    groups = await sampler.generate([p.token_ids for p in prompts], sampling=sampling)
    rollouts = [renderer.rollout(p, group[0]) for p, group in zip(prompts, groups, strict=True)]
    scores = await scorer.score(rollouts)
    raise_on_failures(scores, max_fraction=0.0)
    num = len(scores)
    return Evaluation(
        num_problems=num,
        correct=sum(s.correct for s in scores) / num,
        reward=sum(s.reward for s in scores) / num,
        parts={name: sum(s.parts[name] for s in scores) / num for name in scores[0].parts},
    )


def raise_on_failures(scores: Sequence[Score], *, max_fraction: float) -> int:
    """How many scores failed; an error that shows the first when they are too many."""
    failures = [s.failure for s in scores if s.failure is not None]
    if len(failures) > max_fraction * len(scores):
        raise RunError(
            f"{len(failures)} of {len(scores)} rewards failed, where a share of {max_fraction:g} may; "
            f"the first: {failures[0]}"
        )
    return len(failures)
