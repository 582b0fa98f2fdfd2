"""From a problem to a scored group: what one rollout worker does.

Shape legend: G samples of a problem.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

from rl.clock import BusyClock, now_s
from rl.protocols import Scorer
from rl.rollouts.episodes import Episodes
from rl.rollouts.grading import ScoredRollout, scored
from rl.rollouts.overlong import OVERLONG, OverlongPunishment
from rl.rollouts.renderer import PromptTooLongError
from rl.types import Problem, Rollout, SamplingParams, Score

logger = logging.getLogger(__name__)


Place = tuple[int, int]
"""Of a rollout in a batch: the number of its group, and its own among those of the group that were scored."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Group:
    """The rollouts of one problem, scored."""

    number: int
    """Place of its problem in the task's order."""
    rollouts: list[Rollout]
    """[G], all that were drawn; none where the prompt was too long."""
    scores: list[Score]
    """[G]."""
    scored: list[ScoredRollout]
    """[<=G], those that could be scored."""
    generated_at: float
    """By the event loop's clock, when the last token was here."""


@dataclass(kw_only=True, slots=True)
class RolloutWorker:
    """Draws a problem's rollouts and has them scored; many run at once."""

    episodes: Episodes
    scorer: Scorer
    sampling: SamplingParams
    """Of every group; the seed is each group's own."""
    seed: int
    """Of the run."""
    overlong: OverlongPunishment = field(default_factory=OverlongPunishment)
    drop_long_prompts: bool = False
    """A problem whose prompt leaves no room for a reply is a group without rollouts, no error."""
    scoring: BusyClock = field(default_factory=BusyClock)

    async def run(self, number: int, problem: Problem) -> Group:
        """The result depends on the problem's number, the run's seed and the weights alone.

        All that is asked of the sampler for a group is of one session.
        """
        sampling = replace(self.sampling, seed=self.seed * 1_000_003 + number)
        try:
            (rollouts,) = await self.episodes.run([problem], sampling=sampling, session=f"problem {number}")
        except PromptTooLongError as error:
            if not self.drop_long_prompts:
                raise
            logger.warning("%s; it is left out", error)
            return Group(number=number, rollouts=[], scores=[], scored=[], generated_at=now_s())
        generated_at = now_s()
        with self.scoring.active():
            (scores,) = await self.scorer.score([rollouts])
        scores = [self._with_overlong(r, s) for r, s in zip(rollouts, scores, strict=True)]
        return Group(
            number=number,
            rollouts=rollouts,
            scores=scores,
            scored=scored(rollouts, scores),
            generated_at=generated_at,
        )

    def _with_overlong(self, rollout: Rollout, score: Score) -> Score:
        """With what its last reply's length takes off; earlier turns are not looked at.

        A reply that was cut off, or an episode that ended for want of tokens, is at the limit, whatever room
        there was for it.
        """
        if not self.overlong.enable:
            return score
        max_tokens = self.sampling.max_tokens
        cut_off = rollout.end == "tokens" or rollout.completion.finish_reason == "length"
        num_tokens = max_tokens if cut_off else len(rollout.completion.token_ids)
        punishment = self.overlong(num_tokens, max_tokens=max_tokens)
        return replace(score, overlong=punishment, parts={**score.parts, OVERLONG: punishment})
