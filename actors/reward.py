"""The reward actor: endpoints over a scoring worker, on a mesh of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from monarch.actor import Actor, current_rank, endpoint

from rl.config.configurable import Configurable
from rl.rollouts.rubric import Rubric
from rl.rollouts.scoring import ScoringWorker
from rl.types import Rollout, Score

MAX_TIME_LIMIT_S = 86_400.0

logger = logging.getLogger(__name__)


class RewardActor(Actor, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        time_limit_s: float = 10.0
        """Longest time the score of one rollout may take; then it is a failed score."""
        num_procs: int = 1
        """Processes that score; a step's rollouts are divided between them."""

        def __post_init__(self) -> None:
            if not 0 < self.time_limit_s <= MAX_TIME_LIMIT_S:
                raise ValueError(
                    f"time_limit_s={self.time_limit_s}: must be above 0 and at most {MAX_TIME_LIMIT_S:g} "
                    "(a day): a reward function that never returns must end"
                )
            if self.num_procs < 1:
                raise ValueError(f"num_procs={self.num_procs} is less than 1")

    def __init__(self, *, config: Config, rubric: Rubric) -> None:
        self._worker = ScoringWorker(rubric=rubric, time_limit_s=config.time_limit_s)

    @endpoint
    async def setup(self) -> None:
        """Start the worker, so that the first score does not wait for it."""
        await asyncio.to_thread(self._worker.start)
        logger.info("ready: at most %g s a rollout", self._worker.time_limit_s)

    @endpoint
    async def score(self, shares: Sequence[Sequence[Rollout]]) -> list[Score]:
        """Scores of this process's share of the rollouts, in order."""
        return await asyncio.to_thread(self._worker.score, shares[current_rank().rank])

    @endpoint
    async def close(self) -> None:
        self._worker.close()
