"""Groups of rollouts of one problem, and the worker that draws and scores them.

Shape legend: G samples of a problem, C tokens that the model produced.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rl.protocols import Rewarder
from rl.rollouts.advantage import OverlongPunishment
from rl.rollouts.control_tokens import RefusedMessageError
from rl.rollouts.episode import RolloutSource
from rl.rollouts.renderer import PromptTooLongError
from rl.rollouts.rubric import OVERLONG
from rl.types import Problem, Rollout, SamplingParams, Score
from rl.utils.clock import BusyClock, now_s
from rl.utils.errors import RunError

logger = logging.getLogger(__name__)

RolloutId = tuple[int, int]
"""Number of a rollout's group, and its index among the scored rollouts of the group."""
SampleId = tuple[int, ...]
"""The `RolloutId` of a rollout's first row, which is the only one of a linear rollout; of a later
row the same two numbers and the row's, from 1."""


def make_sample_id(rollout_id: RolloutId, *, row: int) -> SampleId:
    return (*rollout_id, row) if row else rollout_id


def get_rollout_id(sample_id: SampleId) -> RolloutId:
    """Return the rollout that a sample is a row of."""
    p, g, *_ = sample_id
    return p, g


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoredRollout:
    """A rollout with a score that did not fail."""

    rollout: Rollout
    score: Score


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Group:
    """The rollouts of one problem with their scores."""

    number: int
    """Number of the problem in the task's order."""
    rollouts: list[Rollout]
    """[G]; empty if the prompt was too long, or refused."""
    scores: list[Score]
    """[G]."""
    generated_at: float = 0.0
    """Time on the event loop's clock at which the last token arrived."""
    is_refused: bool = False
    """True if the renderer refused a text in the prompt."""
    scored: list[ScoredRollout] = field(init=False)
    """[<=G], without failed rollouts and scores."""

    def __post_init__(self) -> None:
        scored = []
        for rollout, score in zip(self.rollouts, self.scores, strict=True):
            if score.failure is None:
                scored.append(ScoredRollout(rollout=rollout, score=score))
        # The class is frozen, and this field follows from the others.
        object.__setattr__(self, "scored", scored)


def check_failures(
    failures: Sequence[str], *, num_scored: int, out_of: int, max_share: float, where: str
) -> None:
    """Raise RunError if the failures are more than `max_share` of `out_of` rewards.

    The error has the first failure.
    """
    # Compare the quotient, because 0.29 * 100 is less than 29.
    if failures and len(failures) / out_of > max_share:
        raise RunError(
            f"{len(failures)} of {num_scored} rewards failed {where}; "
            f"loop.max_failed_rewards={max_share:g} is the largest share allowed of {out_of}. The "
            f"first failure: {failures[0]}"
        )


def has_equal_rewards(group_G: Sequence[ScoredRollout]) -> bool:
    """Return True if all samples of a group have the same reward, or there are none.

    The overlong punishment does not count: DAPO's dynamic sampling (arXiv 2503.14476, equation 11)
    asks if all replies are right, or none.
    """
    return len({member.score.reward for member in group_G}) <= 1


def compute_token_rewards(member: ScoredRollout, *, by_turn: bool) -> np.ndarray:
    """Return [C] float64: the reward, including the overlong punishment, at the last token.

    With `by_turn`, the environment's reward of each trained turn stands at the last token of that
    turn instead. C counts the tokens of trained turns, and may be 0.
    """
    rewards_C = np.zeros(member.rollout.num_completion_tokens, dtype=np.float64)
    if not len(rewards_C):
        return rewards_C
    rewards_C[-1] = member.score.reward + member.score.overlong
    if by_turn:
        end = -1
        for turn in member.rollout.trained_turns:
            end += len(turn.completion.token_ids)
            # The score's reward contains the environment's, which moves from the last token.
            rewards_C[end] += turn.observation.reward
            rewards_C[-1] -= turn.observation.reward
    return rewards_C


@dataclass(kw_only=True, slots=True)
class RolloutWorker:
    """Draws the rollouts of problems and has them scored; many calls of `run` overlap."""

    episodes: RolloutSource
    rewarder: Rewarder
    sampling: SamplingParams
    """Sampling of every group; each group gets a seed of its own."""
    seed: int
    """Seed of the run."""
    overlong: OverlongPunishment = field(default_factory=OverlongPunishment)
    drop_long_prompts: bool = False
    """Return a group without rollouts if a prompt leaves no room for a reply; otherwise that is an
    error.
    """
    scoring: BusyClock = field(default_factory=BusyClock)

    async def run(self, number: int, problem: Problem) -> Group:
        """Draw and score one group.

        The result depends only on its number, the run's seed and the weights.
        """
        # The seeds of two runs do not meet in their first million groups.
        sampling = replace(self.sampling, seed=self.seed * 1_000_003 + number)
        try:
            (rollouts,) = await self.episodes.run(
                [problem], sampling=sampling, session=f"problem {number}"
            )
        except RefusedMessageError as error:  # One text among many must not end a run.
            return _leave_out(number, error, is_refused=True)
        except PromptTooLongError as error:
            if not self.drop_long_prompts:
                raise
            return _leave_out(number, error, is_refused=False)
        # Before the scores: the time between is that of the rewards, not of generation.
        generated_at = now_s()
        with self.scoring.measure():
            (scores,) = await self.rewarder.score([rollouts])
        scores = [self._add_overlong(r, s) for r, s in zip(rollouts, scores, strict=True)]
        return Group(number=number, rollouts=rollouts, scores=scores, generated_at=generated_at)

    def _add_overlong(self, rollout: Rollout, score: Score) -> Score:
        """Add the overlong punishment of the last reply.

        A reply that ran out of tokens counts as one at the limit.
        """
        if not self.overlong.enable:
            return score
        max_tokens = self.sampling.max_tokens
        num_tokens = max_tokens if rollout.is_truncated else len(rollout.completion.token_ids)
        punishment = self.overlong(num_tokens, max_tokens=max_tokens)
        return replace(score, overlong=punishment, parts={**score.parts, OVERLONG: punishment})


def _leave_out(number: int, error: Exception, *, is_refused: bool) -> Group:
    logger.warning("%s; it is left out", error)
    return Group(number=number, rollouts=[], scores=[], generated_at=now_s(), is_refused=is_refused)
