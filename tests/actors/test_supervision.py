"""How often a lost role is started again, after which pauses, and how that is told."""

import asyncio
import logging

import pytest

from actors.calls import ActorCallError
from actors.canary import CanaryError
from actors.supervision import RecoveryConfig, Restarts, RestartsUsedUpError, Supervisor
from tests.support.virtual_time import now_s, run_in_virtual_time


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_restarts": -1}, "max_restarts=-1: must be at least 0"),
        ({"spare_generators": -2}, "spare_generators=-2: must be at least 0"),
        ({"window_s": 0.0}, r"window_s=0\.0: must be above 0"),
        ({"pause_s": float("nan")}, "pause_s=nan: must be at least 0"),
        ({"pause_s": 9.0, "max_pause_s": 3.0}, r"max_pause_s=3\.0: must be at least pause_s=9"),
        (
            {"max_restarts": 0, "spare_generators": 1},
            "spare_generators=1 with max_restarts=0: no spare would",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        RecoveryConfig(**settings)


def test_the_first_restart_is_at_once_and_pauses_double_up_to_the_longest():
    config = RecoveryConfig(max_restarts=6, pause_s=2, max_pause_s=10)
    restarts = Restarts(config, now_s=Clock())
    made = [restarts.next("trainer", reason="x") for _ in range(6)]
    assert [restart.number for restart in made] == [1, 2, 3, 4, 5, 6]
    assert [restart.pause_s for restart in made] == [0, 2, 4, 8, 10, 10]


def test_one_restart_too_many_names_role_number_window_and_the_last_reason():
    clock = Clock()
    restarts = Restarts(RecoveryConfig(max_restarts=2, window_s=60), now_s=clock)
    for clock.now_s in (0.0, 20.0):
        restarts.next("generator_1", reason="before")
    clock.now_s = 59.0
    with pytest.raises(RestartsUsedUpError) as raised:
        restarts.next("generator_1", reason="rank 0 of 1 is dead")
    assert str(raised.value) == (
        "generator_1 is lost once more, after 2 restarts within 60 s (recovery.max_restarts=2, "
        "recovery.window_s=60); the last reason: rank 0 of 1 is dead"
    )


def test_restarts_of_longer_ago_and_of_other_roles_are_not_counted():
    clock = Clock()
    restarts = Restarts(RecoveryConfig(max_restarts=1, window_s=60), now_s=clock)
    restarts.next("a", reason="x")
    assert restarts.next("b", reason="x").number == 1
    clock.now_s = 60.0
    again = restarts.next("a", reason="x")
    assert (again.number, again.pause_s) == (1, 0)


class Told:
    def __init__(self) -> None:
        self.events: list[tuple] = []

    def add(self, event, /, **fields):
        self.events.append((event, *fields.values()))


def supervisor(told, **settings):
    return Supervisor(RecoveryConfig(**settings), events=told.add, now_s=now_s)


def test_a_start_that_fails_is_another_loss_and_the_time_counts_from_the_first(caplog):
    told, starts = Told(), []

    async def start():
        starts.append(now_s())
        await asyncio.sleep(5)
        if len(starts) < 3:
            raise ActorCallError(f"start {len(starts)} failed\nand its traceback")
        return "group"

    async def main():
        return await supervisor(told, pause_s=2).again("reward", reason="rank 1 of 2 is dead", start=start)

    with caplog.at_level(logging.WARNING):
        started, _ = run_in_virtual_time(main())
    assert started == "group"
    assert starts == [0, 7, 16]
    assert told.events == [
        ("lost", "reward", "rank 1 of 2 is dead"),
        ("lost", "reward", "start 1 failed"),
        ("lost", "reward", "start 2 failed"),
        ("recovered", "reward", 21.0),
    ]
    assert [record.message for record in caplog.records] == [
        "reward is lost: rank 1 of 2 is dead; starting it again (1 of 3)",
        "reward is lost: start 1 failed; starting it again in 2 s (2 of 3)",
        "reward is lost: start 2 failed; starting it again in 4 s (3 of 3)",
        "reward works again after 21.0 s",
    ]


def test_a_role_that_never_comes_up_again_ends_with_what_it_failed_with_last():
    told, starts = Told(), []

    async def start():
        starts.append(now_s())
        raise ActorCallError(f"start {len(starts)} failed")

    with pytest.raises(RestartsUsedUpError, match=r"after 2 restarts .* the last reason: start 2 failed$"):
        run_in_virtual_time(supervisor(told, max_restarts=2).again("reward", reason="x", start=start))
    assert len(starts) == 2
    assert [event for event, *_ in told.events] == ["lost", "lost"]


def test_wrong_weights_are_not_tried_again():
    starts = []

    async def start():
        starts.append(1)
        raise CanaryError("differs from the trainer")

    with pytest.raises(CanaryError):
        run_in_virtual_time(supervisor(Told()).again("generator", reason="x", start=start))
    assert starts == [1]


def test_starts_of_one_loss_that_fail_are_counted_however_long_each_takes():
    starts = []

    async def start():
        starts.append(now_s())
        await asyncio.sleep(1800)
        raise ActorCallError("setup gave no answer")

    again = supervisor(Told(), max_restarts=2, window_s=60).again("reward", reason="x", start=start)
    with pytest.raises(RestartsUsedUpError, match=r"after 2 restarts .* last reason: setup gave no answer$"):
        run_in_virtual_time(again)
    assert len(starts) == 2
