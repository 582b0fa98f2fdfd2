"""The loop with generation running ahead, in virtual time."""

import asyncio
import random
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from rl.rollouts.producer import NothingToLearnError
from rl.rollouts.rubric import Criterion, Rubric
from rl.types import Rollout
from rl.utils.errors import RunError
from tests.support.fakes import SimulatedPolicy
from tests.support.loops import half_right, make_loop, number_of, problems, run, some_right
from tests.support.virtual_time import run_in_virtual_time


def one_of(seed: int, *seconds: float) -> Callable[[str], float]:
    """Return a function that chooses one of these times for each prompt."""
    return lambda prompt: random.Random(f"{seed} {prompt}").choice(seconds)


def test_on_policy_samples_do_not_depend_on_the_order_in_which_rollouts_finish():
    trained = []
    for generate_s in (lambda prompt: 1.0, lambda prompt: 7 * number_of(prompt) % 5 + 1.0):
        policy = SimulatedPolicy(reply=some_right, generate_s=generate_s)
        run(policy, max_off_policy_steps=0, num_steps=4, groups_per_batch=3)
        trained.append(
            [
                [
                    (s.token_ids.tolist(), s.advantages.tolist(), set(s.policy_versions[s.mask]))
                    for s in step
                ]
                for step in policy.trained
            ]
        )
    assert trained[0] == trained[1]
    for number, step in enumerate(trained[0]):
        prompts = [number_of(bytes(tokens).decode().partition(">")[0]) for tokens, _, _ in step]
        assert prompts == [3 * number + i // 4 for i in range(12)]
        assert all(versions == {number} for _, _, versions in step)


def test_one_off_policy_step_hides_generation_and_sync_behind_training():
    policy = SimulatedPolicy(reply=half_right, generate_s=lambda prompt: 0.7)
    records, took_s = run(policy, num_steps=10, max_off_policy_steps=1)
    # The first step's rollouts and the first and the last sync are all that training waits for.
    assert took_s == pytest.approx(0.2 + 0.7 + 10 * 1.0 + 0.2)
    assert max(policy.staleness_of_tokens) == 1
    times = {
        name: [record[f"time/{name}_s"] for record in records]
        for name in ("generate", "train", "step")
    }
    assert times["generate"] == pytest.approx([0.7] + [0] * 9)
    assert times["train"] == pytest.approx([1.0] * 10)
    assert times["step"] == pytest.approx([1.7] + [1.0] * 9)
    # Of each second, generators work 0.7 but in the first step, which fills the place of the next
    # one too.
    assert [record["time/generator_idle_s"] for record in records[2:-1]] == pytest.approx([0.3] * 7)
    assert [record["time/trainer_idle_s"] for record in records] == pytest.approx([0.7] + [0] * 9)


def test_push_overlaps_the_next_gradient_and_delays_the_update():
    policy = SimulatedPolicy(reply=half_right, push_s=1.5, serve_s=0.0)
    run(policy, num_steps=4, max_off_policy_steps=2)
    names = [event for _, event in policy.events if event in ("push", "forward_backward")]
    assert names == ["push", "forward_backward"] * 4 + [
        "push"
    ]  # the push is always asked for first
    begun = {
        name: [at for at, event in policy.events if event == name] for _, name in policy.events
    }
    pushes, gradients, updates = begun["push"][1:], begun["forward_backward"], begun["optim_step"]
    for push, gradient, update in zip(pushes, gradients[1:], updates[1:], strict=False):
        assert gradient == push  # both begin at once
        assert update == pytest.approx(push + 1.5)  # later than the gradient's 1 s


@pytest.mark.parametrize(
    ("max_staleness", "publish_every"), [(0, 1), (1, 1), (2, 1), (3, 1), (1, 2), (3, 3)]
)
def test_no_trained_token_exceeds_max_off_policy_steps(max_staleness, publish_every):
    for seed in range(12):
        rng = random.Random(seed)
        policy = SimulatedPolicy(
            reply=some_right,
            generate_s=one_of(seed, 0.1, 1, 1, 6),
            train_s=rng.choice([0.2, 1.0, 3.0]),
            push_s=rng.choice([0.0, 0.5, 2.0]),
            serve_s=rng.choice([0.0, 0.5, 2.0]),
        )
        records, _ = run(
            policy,
            num_steps=8,
            groups_per_batch=rng.choice([1, 2, 4]),
            max_off_policy_steps=max_staleness,
            publish_every=publish_every,
            drop_zero_advantage_groups=rng.choice([False, True]),
            eval_every=rng.choice([0, 3]),
        )
        assert max(policy.staleness_of_tokens) <= max_staleness
        steps = [record for record in records if "staleness/max" in record]
        assert len(steps) == 8
        assert max(record["staleness/max"] for record in steps) == max(policy.staleness_of_tokens)
        staleness = policy.staleness_of_tokens
        tokens = [sum(int(s.mask.sum()) for s in step) for step in policy.trained]
        mean = sum(r["staleness/mean"] * n for r, n in zip(steps, tokens, strict=True)) / sum(
            tokens
        )
        assert mean == pytest.approx(sum(staleness) / len(staleness))


def test_dropped_groups_are_replaced_and_counted():
    def reply(prompt: str, sample: int) -> str:
        return "no" if number_of(prompt) % 2 else some_right(prompt, sample)

    policy = SimulatedPolicy(reply=reply)
    records, _ = run(
        policy,
        num_steps=4,
        groups_per_batch=2,
        drop_zero_advantage_groups=True,
        max_off_policy_steps=1,
    )
    assert [len(step) for step in policy.trained] == [8] * 4
    assert all(any(a != 0 for s in step for a in s.advantages) for step in policy.trained)
    dropped = sum(record["groups/dropped_equal"] for record in records)
    assert dropped >= 7  # half of the problems, for eight groups that were trained on
    # Rewards are of all groups: half of them are of wrong answers alone.
    assert 0.3 < sum(record["reward/equal_groups"] for record in records) / 4 < 0.7


def test_too_many_consecutive_dropped_groups_stop_the_run():
    policy = SimulatedPolicy(reply=lambda prompt, i: "no")
    with pytest.raises(
        NothingToLearnError, match=r"^step 1: 7 groups in a row .*\(7 equal\).*max_empty"
    ):
        run(
            policy,
            groups_per_batch=2,
            drop_zero_advantage_groups=True,
            max_empty_steps=3,
            max_off_policy_steps=1,
        )


def test_a_rollouts_error_stops_the_loop_and_cancels_other_rollouts():
    class Failing(SimulatedPolicy):
        async def generate(self, prompts: Any, **settings: Any) -> Any:
            if number_of(bytes(prompts[0].tolist()).decode()) == 5:
                raise RunError("generator 1 is gone")
            return await super().generate(prompts, **settings)

    policy = Failing(reply=half_right, generate_s=lambda prompt: 30.0)

    async def main() -> list[str]:
        loop, _ = make_loop(policy, problems=problems(), num_steps=6, max_off_policy_steps=2)
        with pytest.raises(RunError, match=r"^step 1: generator 1 is gone"):
            await loop.run()
        return [t.get_name() for t in asyncio.all_tasks() if t is not asyncio.current_task()]

    left, took_s = run_in_virtual_time(main())
    assert left == []
    assert policy.num_running == 0
    assert took_s == pytest.approx(0.2)  # at once, not after the other rollouts' 30 s


@pytest.mark.parametrize("phase", ["push", "pull"])
def test_a_failing_sync_stops_a_loop_that_waits_for_rollouts(phase):
    policy = SimulatedPolicy(
        reply=half_right,
        generate_s=lambda prompt: 100.0 if number_of(prompt) > 3 else 1.0,
        failing=(phase, 2, RunError("the store is full")),
    )
    with pytest.raises(RunError, match=r"^step 3: the store is full"):
        run(policy, num_steps=6, max_off_policy_steps=1)


# Share of rewards that may fail, independent of the batch size


def failing_every(interval: int) -> tuple[Rubric, Iterator[int]]:
    """Return a rubric that fails for every `interval`-th rollout, and the counter of its calls."""
    calls = count(1)

    def has_answer(rollout: Rollout) -> float:
        if next(calls) % interval == 0:
            raise ValueError("no judge is there")
        return float("ANSWER" in rollout.text)

    criterion = Criterion(name="answer", function=has_answer)
    return Rubric(criteria=(criterion,), correct=lambda rollout: True), calls


def rarely_right(prompt: str, sample: int) -> str:
    """Groups of unequal rewards are one in six."""
    return some_right(prompt, sample) if number_of(prompt) % 6 == 0 else "no"


FAILING: dict[str, Any] = {
    "num_steps": 8,
    "groups_per_batch": 8,
    "group_size": 4,
    "max_failed_rewards": 0.1,
}
AHEAD, DROPPING = {"max_off_policy_steps": 3}, {"drop_zero_advantage_groups": True}


@pytest.mark.parametrize(
    ("reply", "settings"),
    [
        (some_right, {}),
        (some_right, AHEAD),
        (rarely_right, DROPPING),
        (rarely_right, DROPPING | AHEAD),
    ],
)
def test_half_the_allowed_share_of_failed_rewards_does_not_stop_a_run(reply, settings):
    rubric, calls = failing_every(20)
    records, _ = run(SimulatedPolicy(reply=reply), rubric=rubric, **FAILING | settings)
    assert len(records) == 8
    assert next(calls) > 8 * 32
    assert sum(record["reward/num_failed"] for record in records) >= 8 * 32 // 20


@pytest.mark.parametrize(
    ("interval", "settings", "says"),
    [
        *((1, settings, r"^step 1: 4 of 4 rewards failed .*; loop\.max_failed_rewards=0\.1 .*no "
                        r"judge")
          for settings in ({}, AHEAD, DROPPING)),
        *((5, settings, "rewards failed since the last batch") for settings in (AHEAD, DROPPING)),
    ],
)  # fmt: skip
def test_more_than_the_allowed_share_of_failed_rewards_stops_the_run(interval, settings, says):
    rubric, _ = failing_every(interval)
    with pytest.raises(RunError, match=says):
        run(SimulatedPolicy(reply=rarely_right), rubric=rubric, **FAILING | settings)
