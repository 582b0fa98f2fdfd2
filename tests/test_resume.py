"""Loops that go on from a checkpoint, in virtual time: killed, stopped, or ended by an error anywhere."""

import asyncio
import random
from typing import Any

import pytest

from rl.errors import RunError
from rl.rollouts.settings import Sampling
from rl.stop_request import StopAskedError, StopRequest
from rl.training.checkpoint_config import CheckpointConfig
from rl.training.errors import NonFiniteLossError
from rl.types import OptimParams, OptimStepResult, ServeResult
from tests.support.fakes import FakePolicy
from tests.support.loops import make_loop, number_of, problems, run, some_right
from tests.support.resumed import Lineage, SavingPolicy
from tests.support.virtual_time import run_in_virtual_time

SYNC = {"num_steps": 5, "num_prompts": 2, "eval_every": 2, "checkpoint": CheckpointConfig(interval=2)}


def odd_ones_fail(prompt: str, sample: int) -> str:
    return "no" if number_of(prompt) % 2 else some_right(prompt, sample)


def slow_ones(prompt: str) -> float:
    return 0.5 + number_of(prompt) % 3


def one_of(times: list[float], prompt: str) -> float:
    return times[number_of(prompt) % len(times)]


def saving_policy() -> SavingPolicy:
    return SavingPolicy(reply=odd_ones_fail, generate_s=slow_ones)


def undisturbed(settings: dict[str, Any]) -> Lineage:
    lineage = Lineage(make_policy=saving_policy, settings=settings)
    assert lineage.run()
    return lineage


@pytest.mark.parametrize("equal_groups", ["train", "drop"])
def test_a_synchronous_run_killed_at_any_time_ends_with_the_records_of_an_undisturbed_one(equal_groups):
    settings = SYNC | {"equal_groups": equal_groups}
    whole = undisturbed(settings)
    assert [int(r["step"] or 0) for r in whole.records] == [0, 1, 2, 2, 3, 4, 4, 5, 5]
    killed_at = [0.1 * tenth for tenth in range(1, 600, 7)]
    for at_s in killed_at:
        lineage = Lineage(make_policy=saving_policy, settings=settings)
        if lineage.run(kill_at_s=at_s):
            break
        assert lineage.run()
        assert lineage.records == whole.records, at_s
        assert lineage.trained == whole.trained
    else:
        raise AssertionError("no time was after the end")
    assert at_s > 15  # there were many


def test_a_run_killed_again_and_again_comes_to_the_same_end():
    whole = undisturbed(SYNC)
    rng = random.Random(0)
    lineage = Lineage(make_policy=saving_policy, settings=SYNC)
    while not lineage.run(kill_at_s=rng.uniform(0.0, 14.0)):
        assert lineage.num_processes < 100
    assert lineage.num_processes > 2
    assert lineage.records == whole.records


@pytest.mark.parametrize("equal_groups", ["train", "drop"])
def test_a_run_that_is_asked_to_stop_anywhere_goes_on_as_if_it_had_not(equal_groups):
    settings = SYNC | {"equal_groups": equal_groups, "checkpoint": CheckpointConfig(interval=100)}
    whole = undisturbed(settings)
    num_stopped = 0
    for tenth in range(2, 600, 7):
        lineage = Lineage(make_policy=saving_policy, settings=settings)
        if lineage.run(stop_at_s=0.1 * tenth):
            break
        num_stopped += 1
        num_trained = len(lineage.trained)
        if num_trained:
            # Nothing that was trained is lost, though no checkpoint was due.
            assert lineage.saved is not None
            assert lineage.saved.position.step == num_trained
        assert lineage.run()
        assert lineage.records == whole.records, tenth
        assert lineage.trained == whole.trained
    assert num_stopped > 20


@pytest.mark.parametrize("max_age", [1, 2, 3])
def test_an_asynchronous_run_killed_at_random_trains_on_every_problem_once_and_within_the_bound(max_age):
    num_killed = 0
    for seed in range(25):
        rng = random.Random(seed)
        num_prompts = rng.choice([1, 2, 3])
        times = [rng.choice([0.1, 0.5, 1.0, 6.0]) for _ in range(7)]

        def make_policy(
            times: list[float] = times,
            train_s: float = rng.choice([0.2, 1.0]),
            save_s: float = 0.5 * (seed % 2),
        ) -> SavingPolicy:
            return SavingPolicy(
                reply=some_right,
                generate_s=lambda prompt: times[number_of(prompt) % 7],
                train_s=train_s,
                save_s=save_s,
            )

        lineage = Lineage(
            make_policy=make_policy,
            settings={
                "num_steps": 8,
                "num_prompts": num_prompts,
                "max_policy_age": max_age,
                "publish_every": rng.choice([1, 1 + max_age // 2]),
                "checkpoint": CheckpointConfig(interval=rng.choice([1, 2])),
                "eval_every": rng.choice([0, 3]),
            },
        )
        while not lineage.run(**{rng.choice(["kill_at_s", "stop_at_s"]): rng.uniform(0.5, 20.0)}):
            num_killed += 1
            assert lineage.num_processes < 60
        numbers = [number for step in lineage.trained for number in step]
        assert sorted(numbers) == list(range(8 * num_prompts)), seed
        assert max(lineage.ages) <= max_age
        steps = [r["step"] for r in lineage.records if "age/max" in r]
        assert steps == list(range(1, 9))
    assert num_killed > 25


def test_an_asynchronous_run_with_dropped_groups_misses_and_repeats_none():
    for seed in range(15):
        rng = random.Random(seed)
        lineage = Lineage(
            make_policy=saving_policy,
            settings={
                "num_steps": 6, "num_prompts": 2, "max_policy_age": 2, "equal_groups": "drop",
                "checkpoint": CheckpointConfig(interval=1),
            },
        )  # fmt: skip
        while not lineage.run(kill_at_s=rng.uniform(2.0, 9.0)):
            assert lineage.num_processes < 60
        numbers = sorted(number for step in lineage.trained for number in step)
        assert numbers == [2 * i for i in range(12)]
        # The odd ones before the last that was trained on, each once.
        assert sum(r["groups/dropped_equal"] or 0 for r in lineage.records) == 11


def test_finished_groups_are_not_drawn_again_and_those_under_way_are():
    drawn: list[int] = []

    class Noting(SavingPolicy):
        async def generate(self, prompts: Any, **settings: Any) -> Any:
            drawn.append(number_of(bytes(prompts[0].tolist()).decode()))
            return await super().generate(prompts, **settings)

    lineage = Lineage(
        make_policy=lambda: Noting(reply=some_right, generate_s=lambda p: 50.0 if number_of(p) == 5 else 1.0),
        settings={"num_steps": 6, "num_prompts": 2, "max_policy_age": 3},
    )
    assert not lineage.run(stop_at_s=4.0)
    assert lineage.saved is not None
    state = lineage.saved.state
    held = {group.number for group, _ in state.held.finished}
    assert held
    assert 5 in state.position.outstanding
    assert 5 not in held
    drawn.clear()
    assert lineage.run()
    assert 5 in drawn
    assert not held & set(drawn)
    assert sorted(number for step in lineage.trained for number in step) == list(range(12))


def test_groups_that_were_drawn_with_other_settings_are_drawn_again():
    lineage = Lineage(
        make_policy=saving_policy,
        settings={"num_steps": 6, "num_prompts": 2, "max_policy_age": 3, "drawn_with": "temperature 1"},
    )
    assert not lineage.run(stop_at_s=4.0)
    assert lineage.saved is not None
    held = {group.number for group, _ in lineage.saved.state.held.finished}
    assert held
    lineage.settings |= {"drawn_with": "temperature 0.5", "sampling": Sampling(temperature=0.5)}
    assert lineage.run()
    assert sorted(number for step in lineage.trained for number in step) == list(range(12))


class Failing(SavingPolicy):
    """Its sync fails once the weights have a version, or its update is not finite."""

    serve_fails_at: int = -1
    update_fails_at: int = -1

    async def serve(self, policy_version: int) -> ServeResult:
        if policy_version == self.serve_fails_at:
            raise RunError("the store is full")
        return await super().serve(policy_version)

    async def optim_step(self, params: OptimParams | None = None) -> OptimStepResult:
        if self.version == self.update_fails_at:
            raise NonFiniteLossError("gradient norm nan", self.version, None)
        return await super().optim_step(params)


@pytest.mark.parametrize(
    ("update_fails_at", "num_minibatches", "saved"),
    [(3, 1, 3), (4, 2, 2), (5, 2, None)],
    ids=["first update of step 4", "first of two in step 3", "second of two in step 3"],
)
def test_after_an_error_the_last_whole_step_is_saved_if_the_weights_are_still_its(
    update_fails_at, num_minibatches, saved
):
    policy = Failing(reply=some_right)
    policy.update_fails_at = update_fails_at
    with pytest.raises(NonFiniteLossError):
        run(policy, num_steps=6, num_minibatches=num_minibatches)
    steps = [checkpoint.position.step for checkpoint in policy.checkpoints]
    assert steps == ([] if saved is None else [saved])
    assert policy.calls.count("drop_gradient") == (saved is not None)


def test_a_failed_sync_after_the_update_saves_nothing_as_that_step_has_no_record():
    policy = Failing(reply=some_right)
    policy.serve_fails_at = 3
    with pytest.raises(RunError, match="the store is full"):
        run(policy, num_steps=6)
    assert policy.checkpoints == []


def test_a_run_goes_on_after_an_error_with_the_records_of_an_undisturbed_one():
    settings = {"num_steps": 5, "num_prompts": 2, "eval_every": 2}
    whole = undisturbed(settings)

    def make_policy() -> SavingPolicy:
        policy = Failing(reply=odd_ones_fail, generate_s=slow_ones)
        policy.update_fails_at = 3
        return policy

    lineage = Lineage(make_policy=make_policy, settings=settings)
    with pytest.raises(NonFiniteLossError):
        lineage.run()
    lineage.make_policy = saving_policy
    assert lineage.run()
    assert lineage.records == whole.records


def test_a_stop_says_what_it_does_and_is_heard_by_a_loop_alone():
    said: list[str] = []
    stop = StopRequest(say=said.append)
    assert not stop.ask()  # nobody hears
    policy = SavingPolicy(reply=some_right)

    async def main() -> None:
        loop, _ = make_loop(policy, problems=problems(), num_steps=6, stop=stop)
        running = asyncio.ensure_future(loop.run())
        await asyncio.sleep(0.2 + 2.2 + 1.5)  # the second step trains
        assert stop.ask()
        assert not stop.ask()  # the second is for whoever asks
        with pytest.raises(StopAskedError):
            await running

    _, took_s = run_in_virtual_time(main())
    assert said == ["saving step 2, then ending; again to end at once"]
    assert [checkpoint.position.step for checkpoint in policy.checkpoints] == [2]
    assert policy.num_running == 0
    assert took_s == pytest.approx(0.2 + 2 * 2.2 + 0.3)  # the step's rest, and the save


@pytest.mark.parametrize("checkpoint", [CheckpointConfig(enable=False), CheckpointConfig(load_only=True)])
def test_a_stop_where_nothing_is_saved_says_so(checkpoint):
    said: list[str] = []
    stop = StopRequest(say=said.append)
    policy = FakePolicy(reply=some_right)

    async def main() -> None:
        loop, _ = make_loop(policy, problems=problems(), num_steps=6, stop=stop, checkpoint=checkpoint)
        policy.reply = lambda prompt, sample: (stop.ask() and "") or some_right(prompt, sample)
        with pytest.raises(StopAskedError):
            await loop.run()

    run_in_virtual_time(main())
    assert said[0] in (f"stopping after step {n}, then ending; again to end at once" for n in (0, 1))
    assert policy.saved == []


def test_a_stop_that_cannot_be_told_is_heard_all_the_same():
    def say(text: str) -> None:
        raise BrokenPipeError

    async def main() -> None:
        stop = StopRequest(say=say)
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        with stop.heard(lambda: "saving"):
            asyncio.get_running_loop().call_later(1.0, stop.ask)
            with pytest.raises(StopAskedError):
                await stop.cutting_short(asyncio.sleep(3600))

    _, took_s = run_in_virtual_time(main())
    assert took_s == pytest.approx(1.0)
