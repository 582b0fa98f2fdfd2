"""The reward actor: endpoints over a scoring worker, on a mesh of its own."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from monarch.actor import Actor, concurrent_endpoint, current_rank, endpoint

from rl.config.configurable import Configurable
from rl.errors import RunError
from rl.random_states import process_states, restore_process_states
from rl.rollouts.rubric import MAX_CONCURRENCY, Rubric
from rl.rollouts.scoring import ScoringWorker
from rl.types import Rollout, Score

MAX_TIME_LIMIT_S = 86_400.0

logger = logging.getLogger(__name__)


class RewardActor(Actor, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        time_limit_s: float = 10.0
        """Longest time that the sync reward functions of one rollout may take together, and each async one;
        then its score has failed. A function of a group has it for each rollout."""
        num_procs: int = 1
        """Processes that score; rollouts go to the one that has the fewest to score."""
        max_concurrency: int = MAX_CONCURRENCY
        """Async reward functions under way at once in each process; the wait for a place is not timed."""

        def __post_init__(self) -> None:
            if not 0 < self.time_limit_s <= MAX_TIME_LIMIT_S:
                raise ValueError(
                    f"time_limit_s={self.time_limit_s}: must be above 0 and at most {MAX_TIME_LIMIT_S:g} "
                    "(a day): a reward function that never returns must end"
                )
            if self.num_procs < 1:
                raise ValueError(f"num_procs={self.num_procs} is less than 1")
            if self.max_concurrency < 1:
                raise ValueError(f"max_concurrency={self.max_concurrency} is less than 1")

    def __init__(self, *, config: Config, rubric: Rubric) -> None:
        self._worker = ScoringWorker(
            rubric=rubric, time_limit_s=config.time_limit_s, max_concurrency=config.max_concurrency
        )

    @endpoint
    async def setup(self) -> None:
        """Start the worker, so that the first score does not wait for it."""
        await self._worker.start()
        logger.info("ready: at most %g s a rollout", self._worker.time_limit_s)
        if comparing := self._worker.rubric.comparing:
            logger.info(
                "scores of greedy replies are without %s: there is nothing to compare one with",
                ", ".join(comparing),
            )

    @concurrent_endpoint
    async def score(self, groups: Sequence[Sequence[Rollout]], whole: bool, alone: bool) -> list[list[Score]]:
        """A score for each rollout, in order; calls overlap. `whole`: all rollouts of a problem are here;
        `alone`: they are not to be compared."""
        if not whole and self._worker.rubric.has_group_functions:
            raise RunError("the rubric has functions of a group, and groups were divided: keep them together")
        return await self._worker.score(groups, alone=alone)

    @concurrent_endpoint
    async def random_states(self) -> bytes:
        """Of this process and of the one that calls reward functions, for `restore_random_states`."""
        return pickle.dumps((process_states(), await self._worker.random_states()))

    @concurrent_endpoint
    async def restore_random_states(self, states: Mapping[int, bytes]) -> None:
        """Set those of this rank, if they are among `states`."""
        if (own := states.get(current_rank().rank)) is not None:
            of_actor, of_functions = pickle.loads(own)
            restore_process_states(of_actor)
            if of_functions is not None:
                await self._worker.restore_random_states(of_functions)

    @endpoint
    async def close(self) -> None:
        await self._worker.close()
