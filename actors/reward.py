"""Reward actor: endpoints over a reward process, on a mesh of its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from monarch.actor import Actor, concurrent_endpoint, endpoint

from rl.config.configurable import Configurable
from rl.config.tree import check_bounds
from rl.observability.spans import span
from rl.rollouts.rewards import START_S, RewardProcess
from rl.rollouts.rubric import MAX_CONCURRENCY, Rubric
from rl.types import Rollout, Score

DAY_S = 86_400.0

logger = logging.getLogger(__name__)


class RewardActor(Actor, Configurable):
    """Actor over a child process that runs the reward functions (`RewardProcess`)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Limits of the reward functions, and the number of their processes."""

        time_limit_s: float = 10.0
        """Longest time in seconds for all sync reward functions of one rollout together, and for
        each async one; a score that takes longer has failed. A function of a group has it for each
        rollout."""
        num_procs: int = 1
        """Number of reward processes; a group goes to the one with the fewest rollouts. 0: no
        actors, the rewards are computed by a process of the controller."""
        max_concurrency: int = MAX_CONCURRENCY
        """Concurrent calls of each async reward function in each process, unless it has a
        `max_concurrency` of its own; the wait for one to finish is not part of the time limit."""
        start_timeout_s: float = START_S
        """Longest time in seconds for a process of the reward functions to start and to import
        their modules.
        """

        def __post_init__(self) -> None:
            check_bounds(self, "time_limit_s", above=0, at_most=DAY_S)
            check_bounds(self, "num_procs", at_least=0)
            check_bounds(self, "max_concurrency", at_least=1)
            check_bounds(self, "start_timeout_s", above=0, at_most=DAY_S)

    def __init__(self, *, config: Config, rubric: Rubric) -> None:
        self._process = RewardProcess(
            rubric=rubric,
            time_limit_s=config.time_limit_s,
            max_concurrency=config.max_concurrency,
            start_timeout_s=config.start_timeout_s,
        )

    @endpoint
    @span("setup")
    async def setup(self) -> None:
        """Start the process in advance of the first score."""
        # Its modules may take longer to import than a score may take.
        await self._process.start()
        logger.info("ready: at most %g s a rollout", self._process.time_limit_s)
        comparing = self._process.rubric.comparing
        if comparing:
            logger.info(
                "scores of greedy replies omit %s, which compare the rollouts of a group",
                ", ".join(comparing),
            )

    @concurrent_endpoint
    @span("score")
    async def score(self, groups: Sequence[Sequence[Rollout]], alone: bool) -> list[list[Score]]:
        """Return a score for each rollout, in order; with `alone`, rollouts are not compared."""
        # Calls overlap: async reward functions wait for judges and tools.
        return await self._process.score(groups, alone=alone)

    @endpoint
    @span("close")
    async def close(self) -> None:
        await self._process.close()
