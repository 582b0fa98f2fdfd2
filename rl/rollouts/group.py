"""From a problem to a graded group: what one rollout worker does.

Shape legend: G samples of a problem.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from rl.clock import BusyClock, now_s
from rl.protocols import Sampler, Scorer
from rl.rollouts.grading import GradedRollout, grade
from rl.rollouts.renderer import ChatRenderer
from rl.types import Problem, Rollout, SamplingParams, Score


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Group:
    """The rollouts of one problem, graded."""

    number: int
    """Place of its problem in the task's order."""
    rollouts: list[Rollout]
    """[G], all that were drawn."""
    scores: list[Score]
    """[G]."""
    graded: list[GradedRollout]
    """[<=G], those that could be scored."""
    generated_at: float
    """By the event loop's clock, when the last token was here."""


@dataclass(kw_only=True, slots=True)
class RolloutWorker:
    """Draws a problem's completions and has them scored; many run at once."""

    sampler: Sampler
    scorer: Scorer
    renderer: ChatRenderer
    sampling: SamplingParams
    """Of every group; the seed is each group's own."""
    advantage: Callable[[np.ndarray], np.ndarray]
    """Rewards [G] to advantages [G]."""
    seed: int
    """Of the run."""
    num_generated_tokens: int = 0
    generating: BusyClock = field(default_factory=BusyClock)
    scoring: BusyClock = field(default_factory=BusyClock)

    async def run(self, number: int, problem: Problem) -> Group:
        """The result depends on the problem's number, the run's seed and the weights alone.

        All that is asked of the sampler for a group is of one session.
        """
        prompt = self.renderer.prompt(problem)
        sampling = replace(self.sampling, seed=self.seed * 1_000_003 + number)
        with self.generating.active():
            (completions,) = await self.sampler.generate(
                [prompt.token_ids], sampling=sampling, session=f"problem {number}"
            )
        generated_at = now_s()
        self.num_generated_tokens += sum(len(c.token_ids) for c in completions)
        rollouts = [self.renderer.rollout(prompt, c, sample=i) for i, c in enumerate(completions)]
        with self.scoring.active():
            scores = await self.scorer.score(rollouts)
        (graded,) = grade([rollouts], scores, advantage=self.advantage)
        return Group(
            number=number, rollouts=rollouts, scores=scores, graded=graded, generated_at=generated_at
        )
