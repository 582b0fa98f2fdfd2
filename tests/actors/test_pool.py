"""Loss and restart of generators in a pool and of reward processes, over fakes in virtual time."""

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from actors.cluster.clients import make_router
from actors.cluster.group import ActorGroup
from actors.cluster.parity import LogprobParityError, ParityText
from actors.cluster.publisher import GeneratorPool
from actors.cluster.recovery import RestartsUsedUpError, Supervisor
from actors.cluster.rewarder import RewardClient
from actors.config import RecoveryConfig
from actors.launch.calls import (
    LOOK_EVERY_S,
    REPORT_GRACE_S,
    ActorCallError,
    ActorLostError,
    ActorTimeoutError,
)
from rl.types import SamplingParams
from rl.utils.errors import RunError
from rl.weights.store import WeightStore
from rl.weights.types import WeightStoreError
from tests.support.mortal import Mortal, MortalGenerator
from tests.support.scored import replied
from tests.support.virtual_time import now_s, run_in_virtual_time

START_S = 20.0
DEATH = "rank 0 of 1 is dead: killed by SIGKILL"
PARITY = ParityText(token_ids=np.array([1, 2, 3], dtype=np.int32), max_diff=0.1)
SAMPLING = SamplingParams(max_tokens=8, num_samples=1, seed=1)


class PoolRun:
    """Pool whose generators take `START_S` to restart."""

    def __init__(
        self, num_generators: int = 2, *, parity: ParityText | None = None, **settings: Any
    ) -> None:
        self.trainer = Mortal("trainer")
        self.told: list[tuple] = []
        self.started_at: list[float] = []
        self.failing_starts = 0
        self.settings: dict[str, Any] = {}
        """Settings of the restarted generators."""
        self.store = WeightStore.Config().build()
        self.supervisor = Supervisor(
            RecoveryConfig(**({"pause_s": 0.0} | settings)),
            events=lambda event, /, **fields: self.told.append((event, *fields.values())),
            now_s=now_s,
        )
        self.pool = GeneratorPool(
            [MortalGenerator(f"generator_{i}").group() for i in range(num_generators)],
            trainer=self.trainer.group(),
            store=self.store,
            parity=parity,
            start=self.restart,
            supervisor=self.supervisor,
        )
        self.router = make_router(self.pool)
        self.watching: list[asyncio.Task[None]] = []

    def watch(self) -> None:
        self.watching = [asyncio.create_task(member.watch()) for member in self.pool.members]

    def close(self) -> None:
        for task in (*self.watching, *(member.restarting for member in self.pool.members)):
            if task is not None:
                task.cancel()

    async def restart(self, number: int) -> ActorGroup:
        started = await self.start(number)
        return started.group()

    def __getitem__(self, number: int) -> MortalGenerator:
        """Return the generator that is in this slot now."""
        actor = self.pool.members[number].mesh
        assert isinstance(actor, MortalGenerator)
        return actor

    async def start(self, number: int) -> MortalGenerator:
        self.started_at.append(now_s())
        await asyncio.sleep(START_S)
        if len(self.started_at) <= self.failing_starts:
            raise ActorCallError(f"start {len(self.started_at)} failed\nand its traceback")
        return MortalGenerator(f"generator_{number}", **self.settings)

    async def pull(self, version: int) -> None:
        self.trainer.version = version
        await self.pool.pull(await self.pool.push())

    async def ask(self, *numbers: int) -> list[int]:
        """Ask for completions of prompts with these numbers; return the numbers that they
        repeat.
        """
        prompts = [np.array([number], dtype=np.int32) for number in numbers]
        return [
            int(c.token_ids[0]) for (c,) in await self.router.generate(prompts, sampling=SAMPLING)
        ]

    async def all_up(self) -> None:
        while len(self.pool.list_up()) < len(self.pool.members):
            await asyncio.sleep(0.1)

    def versions(self) -> list[int | None]:
        return [self[number].version for number in self.pool.list_up()]


def run_pool(steps, **settings):
    """Return the result of `steps` on a pool whose background tasks end with it."""

    async def main():
        room = PoolRun(**settings)
        try:
            return await steps(room)
        finally:
            room.close()

    return run_in_virtual_time(main())[0]


def test_pull_tells_what_the_push_has_lost_in_the_merge():
    async def steps(room):
        room.trainer.version, room.trainer.merge_lost = 3, 0.25
        return await room.pool.pull(await room.pool.push())

    assert run_pool(steps).merge_lost == 0.25


def test_restarted_generator_serves_only_after_pulling_the_current_version():
    async def steps(room):
        await room.pull(0)
        room.watch()
        room[0].die()
        await asyncio.sleep(0.6)
        assert room.pool.list_up() == [1]
        await room.pull(1)
        with pytest.raises(
            ActorLostError, match=r"^generator_0\.generate failed: it is being started again$"
        ):
            await room.pool.members[0].call("generate", timeout="generate_s")
        await asyncio.sleep(START_S)
        await room.all_up()
        return room[0].asked, room.versions(), room.told

    asked, versions, told = run_pool(steps)
    assert asked == ["use_store", "pull_model_state_dict"]
    assert versions == [1, 1]
    assert told[0] == ("lost", "generator_0", "rank 0 is dead: its process ended")
    assert told[1] == ("recovered", "generator_0", pytest.approx(START_S + 1, abs=0.01))


def test_restarted_generator_whose_pull_fails_is_restarted_again_and_compared():
    async def steps(room):
        await room.pull(0)
        start = room.start

        async def start_silent_at_first(number):
            group = await start(number)
            group.silent_about = "pull_model_state_dict" if len(room.started_at) == 1 else ""
            return group

        room.start = start_silent_at_first
        room[0].die()
        await room.ask(1, 2)
        await room.all_up()
        assert room[0].asked == ["use_store", "pull_model_state_dict", "compute_logprobs"]
        await room.pull(1)
        with pytest.raises(WeightStoreError, match="version 0 was given up"):
            await room.pool.pull(0)
        return len(room.started_at)

    assert run_pool(steps, parity=PARITY) == 2


def test_update_and_prompts_wait_when_all_generators_are_lost():
    async def steps(room):
        await room.pull(0)
        for number in range(2):
            room[number].pull_s = 5.0
        serving = asyncio.create_task(room.pull(1))
        await asyncio.sleep(1)
        for number in range(2):
            room[number].die()
        asking = asyncio.create_task(room.ask(7))
        await serving
        return now_s(), room.versions(), await asking

    served_at, versions, answers = run_pool(steps)
    assert served_at == 1 + 1 + START_S + 1
    assert versions == [1]
    assert answers == [7]


def test_failed_engine_in_a_living_process_counts_as_lost():
    async def steps(room):
        await room.pull(0)
        room[0].engine_failed = True
        return await room.ask(1, 2), room.pool.list_up(), room.told

    answers, up, told = run_pool(steps)
    assert answers == [1, 2]
    assert up == [1]
    assert told == [
        (
            "lost",
            "generator_0",
            "generator_0: the engine of generator rank 0 failed: RuntimeError: broken",
        )
    ]


@pytest.mark.parametrize("num_generators", [1, 2])
def test_generator_that_cannot_be_restarted_ends_the_run_even_if_others_are_up(num_generators):
    async def steps(room):
        room.failing_starts = 2
        await room.pull(0)
        room.watch()
        room[0].die()
        await asyncio.sleep(1 + 2 * START_S)
        text = "generator_0 is lost again, after 2 restarts .* the last reason: start 2 failed$"
        for waiting in (room.ask(1), room.pull(1), room.pool.wait_until_one_is_up()):
            with pytest.raises(RestartsUsedUpError, match=text):
                await waiting
        return len(room.started_at)

    # The starts outlast the window.
    settings = {"max_restarts": 2, "window_s": START_S - 1}
    assert run_pool(steps, num_generators=num_generators, **settings) == 2


def test_failed_start_is_another_loss_and_recovery_time_counts_from_the_first():
    async def steps(room):
        room.failing_starts = 2
        await room.pull(0)
        room[0].die()
        await room.ask(1)
        return room.started_at, room.told

    started_at, told = run_pool(steps, num_generators=1, pause_s=2)
    assert started_at == [1, 1 + START_S + 2, 1 + 2 * START_S + 2 + 4]
    assert told == [
        (
            "lost",
            "generator_0",
            f"generator_0.generate failed: {DEATH}",
        ),
        ("lost", "generator_0", "start 1 failed"),
        ("lost", "generator_0", "start 2 failed"),
        ("recovered", "generator_0", 3 * START_S + 2 + 4 + 1),
    ]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyError("no such thing"), "generator_0 was not started again: KeyError: 'no such thing'"),
        (asyncio.CancelledError(), "generator_0 was not started again: CancelledError"),
        (LogprobParityError("differs from the trainer"), "^differs from the trainer$"),
    ],
)
def test_error_of_a_restart_that_is_no_loss_fails_waiting_calls(error, told):
    async def steps(room):
        await room.pull(0)

        async def broken(number):
            raise error

        room.start = broken
        room[0].die()
        with pytest.raises(RunError, match=told):
            await room.ask(1)

    run_pool(steps, num_generators=1)


def test_trainer_death_during_a_pull_is_raised_within_seconds():
    async def steps(room):
        room[0].pull_s = room[1].pull_s = 100.0
        serving = asyncio.create_task(room.pull(1))
        await asyncio.sleep(3)
        room.trainer.die()
        with pytest.raises(ActorLostError, match=r"^trainer\.pull of version 1 failed") as raised:
            await serving
        return now_s(), raised.value.role

    # The pull, of which the generators would need 100 s, has a grace to end with its own error.
    assert run_pool(steps) == (3 + LOOK_EVERY_S + REPORT_GRACE_S, "trainer")


def test_generators_get_the_store_of_a_new_trainer_and_wait_for_its_first_version():
    async def steps(room):
        await room.pull(5)
        room[0].die()
        asking = asyncio.create_task(room.ask(1, 2))
        await asyncio.sleep(START_S / 2)
        async with room.pool.block_pulls():
            room.store.forget()
            await room.pool.use_store()
            await asyncio.sleep(START_S)  # a generator that starts meanwhile does not join
            assert room.pool.list_up() == [1]
        await asking
        await room.all_up()
        assert "pull_model_state_dict" not in room[0].asked
        await room.pull(2)  # a lower version number than before, with other weights
        return room[1].asked[-3:], room.versions()

    asked, versions = run_pool(steps)
    assert asked == ["abort", "use_store", "pull_model_state_dict"]
    assert versions == [2, 2]


def test_generator_that_does_not_take_the_new_store_is_lost():
    async def steps(room):
        await room.pull(0)
        lost = room[0]
        lost.silent_about = "abort"
        async with room.pool.block_pulls():
            room.store.forget()
            await room.pool.use_store()
        assert room.pool.list_up() == [1]
        await room.pull(1)
        await room.all_up()
        assert room[0] is not lost
        return room.versions(), room.told[0]

    versions, told = run_pool(steps)
    assert versions == [1, 1]
    assert told == (
        "lost",
        "generator_0",
        "generator_0.abort gave no answer within 20 s (timeouts.close_s)",
    )


@pytest.mark.parametrize("seed", range(25))
def test_each_prompt_is_answered_once_with_current_weights_under_random_deaths(seed):
    """Generators die at random moments while versions are served and prompts answered."""
    rng = random.Random(seed)

    async def steps(room):
        served = -1
        num_answers: list[int] = []

        async def ask_many():
            for i in range(60):
                oldest = served
                (group,) = await room.router.generate(
                    [np.array([i], dtype=np.int32)], sampling=SAMPLING
                )
                assert group[0].policy_versions[0] >= oldest
                num_answers.append(int(group[0].token_ids[0]))

        async def kill_some():
            for _ in range(rng.randrange(1, 8)):
                await asyncio.sleep(rng.uniform(0, 25))
                victim = rng.choice(room.pool.members)
                if victim.is_up:
                    victim.mesh.die()

        await room.pull(0)
        served = 0
        room.watch()
        asking, killing = asyncio.create_task(ask_many()), asyncio.create_task(kill_some())
        for version in range(1, 12):
            room.settings = {"pull_s": rng.uniform(0.1, 8), "generate_s": rng.uniform(0.1, 6)}
            await asyncio.sleep(rng.uniform(0, 10))
            await room.pull(version)
            served = version
            living = [n for n in room.pool.list_up() if not room.pool.members[n].find_dead()]
            assert {room[n].version for n in living} <= {version}
        await asyncio.gather(asking, killing)
        return num_answers

    assert run_pool(steps, num_generators=3, max_restarts=100) == list(range(60))


def test_pauses_double_up_to_the_maximum_and_only_restarts_within_the_window_count():
    supervisor = Supervisor(
        RecoveryConfig(max_restarts=6, pause_s=2, max_pause_s=10), now_s=lambda: 0.0
    )
    counted = [supervisor.count("trainer", reason="x") for _ in range(6)]
    assert counted == [(1, 0), (2, 2), (3, 4), (4, 8), (5, 10), (6, 10)]
    times = iter([0.0, 20.0, 59.0, 59.0, 80.0])
    supervisor = Supervisor(RecoveryConfig(max_restarts=2, window_s=60), now_s=lambda: next(times))
    for _ in range(2):
        supervisor.count("generator_1", reason="before")
    with pytest.raises(
        RestartsUsedUpError, match=r"max_restarts=2, recovery\.window_s=60\); the last reason: x$"
    ):
        supervisor.count("generator_1", reason="x")
    assert (
        supervisor.count("b", reason="x") == supervisor.count("generator_1", reason="x") == (1, 0)
    )


class Process(Mortal):
    """Fake reward process."""

    async def _score(self, groups: Any, alone: bool) -> list[list[str]]:
        return [["the score"]] * len(groups)


def score_after_a_loss(
    *, starts_dead: bool = False, **settings: Any
) -> tuple[list[Any], int, float]:
    """Score for three callers of a dead process; return their answers, the number of starts and the
    time.
    """
    first, started = Process("reward"), []

    async def start() -> Any:
        await asyncio.sleep(START_S)
        started.append(Process("reward"))
        if starts_dead:
            started[-1].die()
        return started[-1].group()

    async def steps() -> list[Any]:
        first.die()
        supervisor = Supervisor(RecoveryConfig(**settings), now_s=now_s)
        role = first.group(start=start, supervisor=supervisor)
        client = RewardClient(role, num_procs=1)
        asking = [client.score([[replied("x")]]) for _ in range(3)]
        answers = await asyncio.gather(*asking, return_exceptions=True)
        # Noticed after the restart:
        role.lose(ActorLostError("late", role="reward"), mesh=first)
        return answers

    answers, took_s = run_in_virtual_time(steps())
    return answers, len(started), took_s


def test_callers_of_a_lost_reward_process_share_one_restart_and_ask_again():
    assert score_after_a_loss() == ([[["the score"]]] * 3, 1, START_S)


@pytest.mark.parametrize(
    ("max_restarts", "error", "says", "scored"),
    [
        (0, ActorLostError, "", ""),
        (1, RestartsUsedUpError, "reward is lost again, after 1 restarts (recovery.max_restarts=1, "
         "recovery.window_s=3600); the last reason: ", "; rollouts of sum-digits/47-82 were being "
                                                       "scored"),
    ],
)  # fmt: skip
def test_loss_without_another_restart_reaches_every_caller(max_restarts, error, says, scored):
    answers, num_started, _ = score_after_a_loss(starts_dead=True, max_restarts=max_restarts)
    assert num_started == max_restarts
    assert {(type(answer), str(answer)) for answer in answers} == {
        (error, f"{says}reward.score failed: {DEATH}{scored}")
    }


def test_requests_of_a_call_that_times_out_are_aborted():
    async def steps(room):
        await room.pull(1)
        room[0].silent_about = "generate"
        with pytest.raises(ActorTimeoutError):
            await room.ask(1)
        await asyncio.sleep(1)
        return room[0].asked[-2:]

    assert run_pool(steps, num_generators=1) == ["generate", "abort"]
