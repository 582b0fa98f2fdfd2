"""Loops that were killed, stopped or failed, and continue from a checkpoint, in virtual time."""

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from rl.loop.stop_request import StopRequest
from rl.training.checkpoints.config import CheckpointConfig
from rl.training.failures import NonFiniteLossError
from rl.types import LoopPosition
from rl.utils.errors import RunError, StopRequestedError
from tests.support.fakes import ListSink, SimulatedPolicy
from tests.support.loops import make_loop, number_of, problems, run, some_right
from tests.support.virtual_time import run_in_virtual_time


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint: the trainer's version and the loop's position."""

    version: int
    position: LoopPosition


@dataclass(kw_only=True)
class SavingPolicy(SimulatedPolicy):
    """Policy whose checkpoints appear after `save_s`."""

    save_s: float = 0.3
    checkpoints: list[Saved] = field(default_factory=list)

    async def save_checkpoint(  # type: ignore[override]
        self, folder: str, *, position: LoopPosition, **options: bool
    ) -> None:
        assert all(position.step != saved.position.step for saved in self.checkpoints), (
            "saved twice"
        )
        saved = Saved(version=self.version, position=position)
        await asyncio.sleep(self.save_s)
        self.checkpoints.append(saved)


@dataclass(kw_only=True)
class Lineage:
    """One run across any number of processes."""

    policy: dict[str, Any]
    """Fields of the policy of each process."""
    settings: dict[str, Any]
    sink: ListSink = field(default_factory=ListSink)
    saved: Saved | None = None
    trained: list[list[int]] = field(default_factory=list)
    """Problems of each step."""
    staleness: list[int] = field(default_factory=list)
    """Staleness of all trained tokens."""
    num_processes: int = 0

    @property
    def records(self) -> list[dict[str, float | None]]:
        """Return the records without metrics that depend on time."""
        return [without_times(record) for record in self.sink.records]

    def run(self, *, kill_at_s: float | None = None, stop_at_s: float | None = None) -> bool:
        """Continue in a new process; return True if the run finished."""
        self.num_processes += 1
        policy, stop = SavingPolicy(**self.policy), StopRequest()
        saved, first = self.saved, 0
        if saved is not None:
            policy.version, first = saved.version, saved.position.step
            del self.sink.records[saved.position.num_records :]
        else:
            self.sink.records.clear()
        del self.trained[first:]
        loop, _ = make_loop(
            policy, problems=problems(), sink=self.sink, stop=stop,
            position=None if saved is None else saved.position,
            last_saved=None if saved is None else first,
            **self.settings,
        )  # fmt: skip

        async def process() -> BaseException | None:
            running = asyncio.ensure_future(loop.run())
            if kill_at_s is not None:
                await asyncio.wait({running}, timeout=kill_at_s)
                running.cancel()
            if stop_at_s is not None:
                await asyncio.wait({running}, timeout=stop_at_s)
                stop.ask()
            return (await asyncio.gather(running, return_exceptions=True))[0]

        end, _ = run_in_virtual_time(process())
        self.trained += [_numbers(step) for step in policy.trained]
        self.staleness += policy.staleness_of_tokens
        if policy.checkpoints:
            self.saved = policy.checkpoints[-1]
        if end is not None and not isinstance(end, asyncio.CancelledError | StopRequestedError):
            raise end
        return end is None


def without_times(record: dict[str, float | None]) -> dict[str, float | None]:
    return {
        name: v for name, v in record.items() if not name.startswith(("time/", "perf/", "limit/"))
    }


def _numbers(step: list[Any]) -> list[int]:
    """Return the numbers of a step's problems, in order."""
    prompts = [bytes(s.token_ids[~s.mask].tolist()).decode() for s in step]
    return list(dict.fromkeys(map(number_of, prompts)))


SYNC = {"num_steps": 5, "groups_per_batch": 2, "eval_every": 2}


def odd_ones_fail(prompt: str, sample: int) -> str:
    return "no" if number_of(prompt) % 2 else some_right(prompt, sample)


def slow_ones(prompt: str) -> float:
    return 0.5 + number_of(prompt) % 3


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize(("end", "interval"), [("kill_at_s", 2), ("stop_at_s", 100)])
def test_a_synchronous_run_that_ends_at_any_time_has_the_same_records(end, interval, drops):
    checkpoint = CheckpointConfig(interval=interval)
    settings = SYNC | {"drop_zero_advantage_groups": drops, "checkpoint": checkpoint}
    policy = {"reply": odd_ones_fail, "generate_s": slow_ones}
    whole = Lineage(policy=policy, settings=settings)
    assert whole.run()
    assert [int(r["step"] or 0) for r in whole.records] == [0, 1, 2, 2, 3, 4, 4, 5, 5]
    num_ended = 0
    for tenth in range(1, 600, 13):
        lineage = Lineage(policy=policy, settings=settings)
        if lineage.run(**{end: 0.1 * tenth}):
            break
        num_ended += 1
        if end == "stop_at_s" and lineage.trained:
            # No trained step is lost, though no checkpoint was due.
            assert lineage.saved is not None
            assert lineage.saved.position.step == len(lineage.trained)
        assert lineage.run()
        assert lineage.records == whole.records, tenth
        assert lineage.trained == whole.trained
    assert 10 < num_ended < len(range(1, 600, 13))


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_an_asynchronous_run_killed_at_random_trains_on_every_problem_once(max_staleness):
    num_killed = 0
    for seed in range(25):
        rng = random.Random(seed)
        groups_per_batch = rng.choice([1, 2, 3])
        times = [rng.choice([0.1, 0.5, 1.0, 6.0]) for _ in range(7)]

        lineage = Lineage(
            policy={
                "reply": some_right,
                "generate_s": lambda prompt, times=times: times[number_of(prompt) % 7],
                "train_s": rng.choice([0.2, 1.0]),
                "save_s": 0.5 * (seed % 2),
            },
            settings={
                "num_steps": 8,
                "groups_per_batch": groups_per_batch,
                "max_off_policy_steps": max_staleness,
                "publish_every": rng.choice([1, 1 + max_staleness // 2]),
                "checkpoint": CheckpointConfig(interval=rng.choice([1, 2])),
                "eval_every": rng.choice([0, 3]),
            },
        )
        while not lineage.run(**{rng.choice(["kill_at_s", "stop_at_s"]): rng.uniform(0.5, 20.0)}):
            num_killed += 1
            assert lineage.num_processes < 60
        numbers = [number for step in lineage.trained for number in step]
        assert sorted(numbers) == list(range(8 * groups_per_batch)), seed
        assert max(lineage.staleness) <= max_staleness
        steps = [r["step"] for r in lineage.records if "staleness/max" in r]
        assert steps == list(range(1, 9))
    assert num_killed > 25


NAN = NonFiniteLossError("gradient norm nan", 3, None)


@pytest.mark.parametrize(
    ("failing", "num_minibatches", "saved"),
    [
        (("optim_step", 3, NAN), 1, [3]),
        (("optim_step", 4, NAN), 2, [2]),  # the first of two in step 3
        (("optim_step", 5, NAN), 2, []),  # the second of two in step 3
        (("pull", 3, RunError("the store is full")), 1, []),
    ],
)
def test_an_error_saves_the_last_completed_step_if_its_weights_are_intact(
    failing, num_minibatches, saved
):
    policy = SavingPolicy(reply=some_right, failing=failing)
    with pytest.raises(type(failing[2])):
        run(policy, num_steps=6, num_minibatches=num_minibatches)
    assert [checkpoint.position.step for checkpoint in policy.checkpoints] == saved
    assert policy.calls.count("drop_gradient") == len(saved)


def test_a_stop_finishes_the_step_saves_and_is_announced(capsys):
    stop = StopRequest()
    assert not stop.ask()  # nobody hears
    policy = SavingPolicy(reply=some_right)

    async def main() -> None:
        loop, _ = make_loop(policy, problems=problems(), num_steps=6, stop=stop)
        running = asyncio.ensure_future(loop.run())
        await asyncio.sleep(0.2 + 2.2 + 1.5)  # the second step trains
        assert stop.ask()
        assert not stop.ask()  # the second is for whoever asks
        with pytest.raises(StopRequestedError):
            await running

    _, took_s = run_in_virtual_time(main())
    assert "saving step 2, then ending; again to end at once" in capsys.readouterr().err
    assert [checkpoint.position.step for checkpoint in policy.checkpoints] == [2]
    assert policy.num_running == 0
    assert took_s == pytest.approx(0.2 + 2 * 2.2 + 0.3)  # the step's rest, and the save
