"""Limits, pauses and events of restarts, and roles that are restarted as a whole, in virtual time."""

import asyncio
import logging
from typing import Any, cast

import pytest

from actors.backend import RewardClient
from actors.calls import ActorCallError, ActorLostError
from actors.config import RecoveryConfig
from actors.parity import LogprobParityError
from actors.recovery import RestartsUsedUpError, Role, Supervisor
from rl.utils.errors import RunError
from tests.support.mortal import Mortal
from tests.support.scored import replied
from tests.support.virtual_time import now_s, run_in_virtual_time

START_S = 5.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_restarts": -1}, "max_restarts=-1: must be at least 0"),
        ({"window_s": 0.0}, r"window_s=0\.0: must be above 0"),
        ({"pause_s": float("nan")}, "pause_s=nan: must be at least 0"),
        ({"pause_s": 9.0, "max_pause_s": 3.0}, r"max_pause_s=3\.0: must be at least pause_s=9"),
    ],
)
def test_invalid_settings_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        RecoveryConfig(**settings)


def test_pauses_double_up_to_the_maximum_and_only_restarts_within_the_window_count():
    supervisor = Supervisor(RecoveryConfig(max_restarts=6, pause_s=2, max_pause_s=10), now_s=lambda: 0.0)
    counted = [supervisor.count("trainer", reason="x") for _ in range(6)]
    assert counted == [(1, 0), (2, 2), (3, 4), (4, 8), (5, 10), (6, 10)]
    times = iter([0.0, 20.0, 59.0, 59.0, 80.0])
    supervisor = Supervisor(RecoveryConfig(max_restarts=2, window_s=60), now_s=lambda: next(times))
    for _ in range(2):
        supervisor.count("generator_1", reason="before")
    says = (
        r"^generator_1 is lost again, after 2 restarts \(recovery\.max_restarts=2, recovery\.window_s=60\); "
        r"the last reason: rank 0 of 1 is dead$"
    )
    with pytest.raises(RestartsUsedUpError, match=says):
        supervisor.count("generator_1", reason="rank 0 of 1 is dead")
    assert supervisor.count("b", reason="x") == supervisor.count("generator_1", reason="x") == (1, 0)


class Starts:
    """Restarts of a supervisor whose starts take 5 s and fail but for the last."""

    def __init__(self, *, num_failing: int, error: Exception | None = None) -> None:
        self.num_failing = num_failing
        self.error = error
        self.at: list[float] = []
        self.events: list[tuple[Any, ...]] = []

    async def start(self) -> str:
        self.at.append(now_s())
        await asyncio.sleep(START_S)
        if len(self.at) <= self.num_failing:
            raise self.error or ActorCallError(f"start {len(self.at)} failed\nand its traceback")
        return "group"

    def run(self, **settings: Any) -> str:
        supervisor = Supervisor(
            RecoveryConfig(**settings),
            events=lambda event, /, **fields: self.events.append((event, *fields.values())),
            now_s=now_s,
        )
        restarting = supervisor.restart("reward", reason="rank 1 of 2 is dead", start=self.start)
        return run_in_virtual_time(restarting)[0]


def test_failed_start_is_another_loss_and_recovery_time_counts_from_the_first(caplog):
    starts = Starts(num_failing=2)
    with caplog.at_level(logging.WARNING):
        assert starts.run(pause_s=2) == "group"
    assert starts.at == [0, 7, 16]
    assert starts.events == [
        ("lost", "reward", "rank 1 of 2 is dead"),
        ("lost", "reward", "start 1 failed"),
        ("lost", "reward", "start 2 failed"),
        ("recovered", "reward", 21.0),
    ]
    assert [record.message for record in caplog.records] == [
        "reward is lost: rank 1 of 2 is dead; starting it again (1 of 3)",
        "reward is lost: start 1 failed; starting it again in 2 s (2 of 3)",
        "reward is lost: start 2 failed; starting it again in 4 s (3 of 3)",
        "reward is restarted after 21.0 s",
    ]


def test_starts_that_fail_end_with_the_last_error_and_parity_errors_at_once():
    starts = Starts(num_failing=9)
    with pytest.raises(
        RestartsUsedUpError, match=r"after 2 restarts .* the last reason: start 2 failed$"
    ) as raised:
        starts.run(max_restarts=2, window_s=START_S - 1)  # the starts outlast the window
    assert str(raised.value.__cause__).startswith("start 2 failed")
    assert [event for event, *_ in starts.events] == ["lost", "lost"]
    starts = Starts(num_failing=9, error=LogprobParityError("differs from the trainer"))
    with pytest.raises(LogprobParityError):
        starts.run()
    assert len(starts.at) == 1


class Process(Mortal):
    """Fake group with a single process."""

    def at_rank(self, rank: int) -> "Process":
        assert rank == 0
        return self


class Reward:
    """Reward role whose calls fail when its process dies, with a count of its starts."""

    def __init__(self, *, starts_dead: bool = False, **settings: Any) -> None:
        self.first = cast(Any, Process("reward"))
        self.starts_dead = starts_dead
        self.num_started = 0
        start: Any = self.start
        self.role = Role(
            self.first, start=start, supervisor=Supervisor(RecoveryConfig(**settings), now_s=now_s)
        )

    async def start(self) -> Process:
        self.num_started += 1
        await asyncio.sleep(START_S)
        started = Process("reward")
        if self.starts_dead:
            started.die()
        return started

    async def until_answered(self) -> int:
        """Call until an answer comes; return the number of calls."""
        num_asked = 0
        while True:
            group = await self.role.current()
            num_asked += 1
            try:
                await asyncio.gather(group.call("score"), asyncio.sleep(1))
            except ActorLostError as error:
                self.role.lose(group, error)
            else:
                return num_asked


def run(steps):
    return run_in_virtual_time(steps())[0]


def test_callers_of_a_lost_role_share_one_restart_and_ask_again():
    async def steps():
        reward = Reward()
        reward.first.die()
        asked = await asyncio.gather(*(reward.until_answered() for _ in range(3)))
        # Another caller notices the loss after the restart.
        reward.role.lose(reward.first, ActorLostError("late", role="reward"))
        return asked, reward.num_started, now_s()

    assert run(steps) == ([2, 2, 2], 1, START_S + 1)


def test_loss_is_raised_unchanged_if_restarts_are_disabled():
    async def steps():
        reward = Reward(max_restarts=0)
        reward.first.die()
        with pytest.raises(ActorLostError, match=r"^reward\.score failed: rank 0 of 1 is dead$"):
            await reward.until_answered()
        return reward.num_started

    assert run(steps) == 0


def test_error_after_the_last_restart_reaches_every_caller():
    async def steps():
        reward = Reward(max_restarts=1, starts_dead=True)
        reward.first.die()
        scoring = RewardClient(reward.role, num_procs=1).score([[replied("x")]])
        return await asyncio.gather(scoring, reward.until_answered(), return_exceptions=True)

    scored, other = run(steps)
    assert isinstance(scored, RunError)
    assert isinstance(other, RestartsUsedUpError)
    assert str(scored) == (
        "reward is lost again, after 1 restarts (recovery.max_restarts=1, "
        "recovery.window_s=3600); the last reason: reward.score failed: rank 0 of 1 is dead"
    )
