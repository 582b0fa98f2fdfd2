"""Greedy evaluation on a held-out set."""

from __future__ import annotations

from collections.abc import Sequence

from rl.errors import RunError
from rl.observability.metrics import Mean, Metric, Sum, merge
from rl.protocols import Sampler, Scorer
from rl.rollouts.renderer import ChatRenderer
from rl.types import Prompt, SamplingParams, Score


async def evaluate(
    *, prompts: Sequence[Prompt], sampler: Sampler, scorer: Scorer, renderer: ChatRenderer, max_tokens: int
) -> dict[str, Metric]:
    """One greedy reply to each prompt, graded: `eval/correct`, `eval/reward`, `eval/num_problems`,
    and `eval/<name>` of each reward function that the rubric has.

    Raises:
        RunError: if a reply could not be scored.
    """
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=renderer.stop_token_ids)
    # Of no session: that would send all of them to one generator.
    groups = await sampler.generate([p.token_ids for p in prompts], sampling=sampling)
    rollouts = [renderer.rollout(p, group[0], sample=0) for p, group in zip(prompts, groups, strict=True)]
    scores = await scorer.score(rollouts)
    raise_on_failures(scores, max_fraction=0.0)
    return merge(map(_score_metrics, scores))


def _score_metrics(score: Score) -> dict[str, Metric]:
    return {
        **{f"eval/{name}": Mean(value) for name, value in score.parts.items()},
        "eval/correct": Mean(score.correct),
        "eval/reward": Mean(score.reward),
        "eval/num_problems": Sum(1),
    }


def raise_on_failures(scores: Sequence[Score], *, max_fraction: float) -> None:
    """Raises RunError, which shows the first failure, if more than this share of the scores failed."""
    failures = [s.failure for s in scores if s.failure is not None]
    if len(failures) > max_fraction * len(scores):
        raise RunError(
            f"{len(failures)} of {len(scores)} rewards failed, where a share of {max_fraction:g} may; "
            f"the first: {failures[0]}"
        )
