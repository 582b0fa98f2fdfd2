"""A role that is started again whole, over fakes in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from actors.backend import ActorScorer
from actors.background import end_background
from actors.calls import ActorLostError
from actors.replaceable import Replaceable
from actors.supervision import RecoveryConfig, RestartsUsedUpError, Supervisor
from rl.errors import RunError
from rl.tasks.sum_digits import make_problem
from tests.support.fakes import prompt_of
from tests.support.mortal import Mortal
from tests.support.scored import replied
from tests.support.virtual_time import now_s, run_in_virtual_time

START_S = 5.0


class Process(Mortal):
    """Its only one, by its number."""

    def at_rank(self, rank: int) -> Process:
        assert rank == 0
        return self


class Reward:
    """Two callers, and the starts that they cause."""

    def __init__(self, *, starts_dead: bool = False, **settings: Any) -> None:
        self.first = cast(Any, Process("reward"))
        self.starts_dead = starts_dead
        self.num_started = 0
        start: Any = self.start
        self.role = Replaceable(
            self.first,
            start=start,
            supervisor=Supervisor(RecoveryConfig(**settings), now_s=now_s),
        )

    async def start(self) -> Process:
        self.num_started += 1
        await asyncio.sleep(START_S)
        started = Process("reward")
        if self.starts_dead:
            started.die()
        return started

    async def until_answered(self) -> int:
        """How often it was asked."""
        num_asked = 0
        while True:
            group = await self.role.group()
            num_asked += 1
            try:
                await asyncio.gather(group.call("score", limit="score_s"), asyncio.sleep(1))
            except ActorLostError as error:
                await self.role.replace(group, error)
            else:
                return num_asked


def run(steps):
    async def main():
        try:
            return await steps()
        finally:
            await end_background(timeout_s=10)

    return run_in_virtual_time(main())[0]


def test_all_who_lost_their_answer_wait_for_one_restart_and_ask_again():
    async def steps():
        reward = Reward()
        reward.first.die()
        asked = await asyncio.gather(*(reward.until_answered() for _ in range(3)))
        # One more finds out after the restart that what it was asking is gone.
        await reward.role.replace(reward.first, ActorLostError("late", role="reward"))
        return asked, reward.num_started, now_s()

    assert run(steps) == ([2, 2, 2], 1, START_S + 1)


def test_where_nothing_is_started_again_the_loss_is_raised_as_it_is():
    async def steps():
        reward = Reward(max_restarts=0)
        reward.first.die()
        with pytest.raises(ActorLostError, match=r"^reward\.score failed: rank 0 of 1 is dead$"):
            await reward.until_answered()
        return reward.num_started

    assert run(steps) == 0


def test_restarts_that_are_used_up_are_told_to_everybody():
    async def steps():
        reward = Reward(max_restarts=1)
        reward.first.die()
        await reward.until_answered()
        second: Any = await reward.role.group()
        second.die()
        told = await asyncio.gather(*(reward.until_answered() for _ in range(2)), return_exceptions=True)
        return [type(error) for error in told]

    assert run(steps) == [RestartsUsedUpError] * 2


def test_after_the_last_restart_the_error_names_the_problems_that_were_being_scored():
    prompts = [prompt_of(make_problem([n, 11])) for n in (12, 13)]
    groups = [[replace(replied("x", sample=i), prompt=prompt) for i in range(2)] for prompt in prompts]

    async def steps():
        reward = Reward(max_restarts=1, starts_dead=True)
        reward.first.die()
        with pytest.raises(RunError) as raised:
            await ActorScorer(reward.role, num_procs=1).score(groups)
        return str(raised.value)

    assert run(steps) == (
        "reward is lost once more, after 1 restarts within 3600 s (recovery.max_restarts=1, "
        "recovery.window_s=3600); the last reason: reward.score failed: rank 0 of 1 is dead; rollouts of "
        "these problems were being scored: sum-digits/12-11, sum-digits/13-11"
    )
