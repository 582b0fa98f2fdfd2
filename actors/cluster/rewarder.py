"""Client of a run's reward processes, which implements `rl.protocols.Rewarder` by calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from actors.cluster.group import ActorGroup
from actors.cluster.recovery import RestartsUsedUpError
from actors.launch.calls import ActorLostError
from actors.reward import RewardActor
from rl.protocols import Rewarder
from rl.rollouts.rewards import RewardProcess, compute_longest_s
from rl.rollouts.rubric import Rubric
from rl.types import Rollout, Score
from rl.utils.clock import now_s
from rl.utils.threads import gather_or_cancel

GATHER_S = 0.002
"""Time from the first group to be scored until it is sent, with those that have come since: groups
of a batch are ready within a few milliseconds, and a message costs two processes one of them."""
MAX_GATHERED = 64
"""Rollouts with which a call takes no further groups."""
QUICK_S = 0.05
"""Seconds for a group up to which groups share calls. All scores of a call come at its end: beside
a judge that takes a minute, no group should wait."""


@dataclass(kw_only=True, slots=True, eq=False)
class _ScoreCall:
    """Groups that are sent to a reward process together."""

    groups: list[Sequence[Rollout]] = field(default_factory=list)
    answers: asyncio.Task[list[list[Score]]] | None = None
    num_waiting: int = 0
    """Groups whose caller still waits."""


class RewardClient:
    """A `Rewarder` over the processes of a `RewardActor`.

    Each group goes to the process with the fewest rollouts. While groups are scored quickly, those
    that come within `GATHER_S` share a call.

    The run stops if an answer takes longer than `timeouts.score_s` and `longest_s` together: the
    time limits of the reward functions for a number of rollouts
    (`rl.rollouts.rewards.compute_longest_s`).
    """

    def __init__(
        self,
        reward: ActorGroup,
        *,
        num_procs: int,
        longest_s: Callable[[int], float] = lambda num_rollouts: 0.0,
    ) -> None:
        self._reward = reward
        self._longest_s = longest_s
        self._num_asked = [0] * num_procs
        """Rollouts that each process has yet to score."""
        self._gathering: dict[tuple[int, bool], _ScoreCall] = {}
        """Calls that are not sent yet, by process and `alone`."""
        self._takes_s = float("inf")
        """Seconds that a group took in the latest call."""

    async def score(
        self, groups: Sequence[Sequence[Rollout]], *, alone: bool = False
    ) -> list[list[Score]]:
        return await gather_or_cancel(self._score(group, alone=alone) for group in groups)

    async def _score(self, group: Sequence[Rollout], *, alone: bool) -> list[Score]:
        """Return the scores of one group; ask again after a restart if a process is lost."""
        rank = self._num_asked.index(min(self._num_asked))
        self._num_asked[rank] += len(group)
        try:
            while True:
                try:
                    await self._reward.wait_until_up()
                except RestartsUsedUpError as error:
                    ids = ", ".join(dict.fromkeys(rollout.prompt.problem.id for rollout in group))
                    raise RestartsUsedUpError(
                        f"{error}; rollouts of {ids} were being scored"
                    ) from error
                try:
                    return await self._ask(group, rank=rank, alone=alone)
                except ActorLostError:
                    continue  # `wait_until_up` raises the loss if nothing is restarted.
        finally:
            # Also after a cancellation: the process would get less work than others forever.
            self._num_asked[rank] -= len(group)

    async def _ask(self, group: Sequence[Rollout], *, rank: int, alone: bool) -> list[Score]:
        """Return the scores of a group, which may share a call with others."""
        if self._takes_s > QUICK_S:
            (scores,) = await self._call([group], rank=rank, alone=alone)
            return list(scores)

        to = rank, alone
        call = self._gathering.get(to)
        if call is None:
            call = self._gathering[to] = _ScoreCall()
            call.answers = asyncio.create_task(self._send(call, to))
        assert call.answers is not None
        place = len(call.groups)
        call.groups.append(group)
        if sum(map(len, call.groups)) >= MAX_GATHERED:
            self._stop_gathering(call, to)

        call.num_waiting += 1
        try:
            # The cancellation of one caller leaves the others their scores.
            return list((await asyncio.shield(call.answers))[place])
        finally:
            call.num_waiting -= 1
            # A caller that gives up before the call is sent takes its group away.
            call.groups[place] = ()
            if not call.num_waiting:
                call.answers.cancel()
                self._stop_gathering(call, to)

    def _stop_gathering(self, call: _ScoreCall, to: tuple[int, bool]) -> None:
        if self._gathering.get(to) is call:
            del self._gathering[to]

    async def _send(self, call: _ScoreCall, to: tuple[int, bool]) -> list[list[Score]]:
        """Return the scores of the groups that have come together."""
        await asyncio.sleep(GATHER_S)
        self._stop_gathering(call, to)
        rank, alone = to
        return await self._call(tuple(call.groups), rank=rank, alone=alone)

    async def _call(
        self, groups: Sequence[Sequence[Rollout]], *, rank: int, alone: bool
    ) -> list[list[Score]]:
        # The process first scores what it was sent before, so all of its rollouts count.
        work_s = self._longest_s(self._num_asked[rank])
        started = now_s()
        (scores,) = await self._reward.call(
            RewardActor.score, groups, alone, rank=rank, timeout="score_s", extra_s=work_s
        )
        self._takes_s = (now_s() - started) / len(groups)
        answers: list[list[Score]] = scores
        return answers


@asynccontextmanager
async def open_rewarder(
    reward: ActorGroup | None, *, config: RewardActor.Config, rubric: Rubric
) -> AsyncIterator[Rewarder]:
    """Yield the client of the reward processes, or a scoring process of this one without them."""
    if reward is not None:
        limit = partial(
            compute_longest_s,
            rubric,
            time_limit_s=config.time_limit_s,
            start_timeout_s=config.start_timeout_s,
        )
        yield RewardClient(reward, num_procs=config.num_procs, longest_s=limit)
        return

    process = RewardProcess(
        rubric=rubric,
        time_limit_s=config.time_limit_s,
        max_concurrency=config.max_concurrency,
        start_timeout_s=config.start_timeout_s,
    )
    await process.start()
    try:
        yield process
    finally:
        await process.close()
