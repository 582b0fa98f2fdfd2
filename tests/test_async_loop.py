"""The loop with generation running ahead, in virtual time."""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from rl.errors import RunError
from rl.rollouts.producer import NothingToLearnError
from rl.rollouts.samples import policy_sample
from rl.rollouts.settings import Sampling
from rl.tasks.sum_digits import SumDigits
from rl.training.checkpoint_config import CheckpointConfig
from rl.types import Message, Observation, Problem, Reply, SamplingParams, ServeResult
from tests.support.fakes import FakePolicy, RubricScorer, prompt_of, rollout_of
from tests.support.loops import half_right, make_loop, number_of, problems, run, some_right
from tests.support.simulated import SimulatedPolicy
from tests.support.virtual_time import DeadlockError, run_in_virtual_time


def one_of(seed: int, *seconds: float) -> Callable[[str], float]:
    """One of these times for each prompt, drawn by its text."""
    return lambda prompt: random.Random(f"{seed} {prompt}").choice(seconds)


def synchronous_losses_see(*, num_steps: int, num_prompts: int, num_samples: int) -> list[list[tuple]]:
    """What a loop of a dozen lines, one call after another, trains on in each step."""
    policy = FakePolicy(reply=some_right)
    rubric = SumDigits.Config(num_integers=2).build().rubric(seed=0)
    numbered = enumerate(problems())

    async def loop() -> None:
        for _ in range(num_steps):
            samples = []
            for number, problem in (next(numbered) for _ in range(num_prompts)):
                prompt = prompt_of(problem)
                sampling = SamplingParams(max_tokens=32, num_samples=num_samples, seed=number)
                (group,) = await policy.generate([prompt.token_ids], sampling=sampling)
                rollouts = [rollout_of(prompt, c, sample=i) for i, c in enumerate(group)]
                (scores,) = await RubricScorer(rubric=rubric).score([rollouts])
                rewards = [s.reward for s in scores]
                mean = sum(rewards) / len(rewards)
                samples += [
                    policy_sample(
                        rollout,
                        advantages_C=np.full(rollout.num_completion_tokens, reward - mean),
                        temperature=1.0,
                    )
                    for rollout, reward in zip(rollouts, rewards, strict=True)
                ]
            await policy.forward_backward(samples)
            await policy.optim_step()
            await policy.serve(await policy.push())

    asyncio.run(loop())
    return seen(policy)


def seen(policy: FakePolicy) -> list[list[tuple]]:
    return [
        [(s.token_ids.tolist(), s.advantages.tolist(), s.policy_versions.tolist()) for s in step]
        for step in policy.trained
    ]


@pytest.mark.parametrize("slow", [False, True])
def test_with_age_0_it_trains_on_exactly_what_a_plain_synchronous_loop_does(slow):
    def generate_s(prompt: str) -> float:
        return (7 * number_of(prompt) % 5 + 1.0) if slow else 1.0  # they finish in another order

    sizes = {"num_steps": 4, "num_prompts": 3, "num_samples": 4}
    policy = SimulatedPolicy(reply=some_right, generate_s=generate_s)
    run(policy, max_policy_age=0, **sizes)
    expected = synchronous_losses_see(**sizes)
    assert [[s[0] for s in step] for step in seen(policy)] == [[s[0] for s in step] for step in expected]
    assert seen(policy) == expected


def test_with_age_0_generation_training_and_sync_take_turns():
    policy = SimulatedPolicy(reply=half_right)
    _, took_s = run(policy, num_steps=3)
    # Each step: 1 s of generation, 1 s of training, 0.2 s of sync; one sync before.
    assert took_s == pytest.approx(0.2 + 3 * 2.2)


def test_with_age_1_generation_and_sync_are_hidden_behind_training():
    policy = SimulatedPolicy(reply=half_right, generate_s=lambda prompt: 0.7)
    records, took_s = run(policy, num_steps=10, max_policy_age=1)
    # The first step's rollouts and the first and the last sync are all that training waits for.
    assert took_s == pytest.approx(0.2 + 0.7 + 10 * 1.0 + 0.2)
    assert max(policy.age_of_tokens) == 1
    times = {name: [record[f"time/{name}_s"] for record in records] for name in ("generate", "train", "step")}
    assert times["generate"] == pytest.approx([0.7] + [0] * 9)
    assert times["train"] == pytest.approx([1.0] * 10)
    assert times["step"] == pytest.approx([1.7] + [1.0] * 9)
    # Of each second, generators work 0.7 but in the first step, which fills the place of the next one too.
    assert [record["time/generator_idle_s"] for record in records[2:-1]] == pytest.approx([0.3] * 7)
    assert [record["time/trainer_idle_s"] for record in records] == pytest.approx([0.7] + [0] * 9)


def test_the_push_runs_beside_the_next_gradient_and_the_update_waits_for_it():
    policy = SimulatedPolicy(reply=half_right, push_s=1.5, serve_s=0.0)
    run(policy, num_steps=4, max_policy_age=2)
    names = [event for _, event in policy.events if event in ("push", "forward_backward")]
    assert names == ["push", "forward_backward"] * 4 + ["push"]  # the push is always asked for first
    begun = {name: [at for at, event in policy.events if event == name] for _, name in policy.events}
    pushes, gradients, updates = begun["push"][1:], begun["forward_backward"], begun["optim_step"]
    for push, gradient, update in zip(pushes, gradients[1:], updates[1:], strict=False):
        assert gradient == push  # both begin at once
        assert update == pytest.approx(push + 1.5)  # later than the gradient's 1 s


def test_no_more_groups_are_under_way_than_the_bound_has_places_for():
    policy = SimulatedPolicy(reply=half_right, generate_s=lambda prompt: 50.0)
    run(policy, num_steps=6, num_prompts=3, max_policy_age=2)
    assert policy.most_running == 9


@pytest.mark.parametrize(("max_age", "publish_every"), [(0, 1), (1, 1), (2, 1), (3, 1), (1, 2), (3, 3)])
def test_no_trained_token_is_older_than_the_bound_whatever_takes_how_long(max_age, publish_every):
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
            num_prompts=rng.choice([1, 2, 4]),
            max_policy_age=max_age,
            publish_every=publish_every,
            equal_groups=rng.choice(["train", "drop"]),
            eval_every=rng.choice([0, 3]),
        )
        assert max(policy.age_of_tokens) <= max_age
        steps = [record for record in records if "age/max" in record]
        assert len(steps) == 8
        assert max(record["age/max"] for record in steps) == max(policy.age_of_tokens)
        ages = policy.age_of_tokens
        tokens = [sum(int(s.mask.sum()) for s in step) for step in policy.trained]
        mean = sum(r["age/mean"] * n for r, n in zip(steps, tokens, strict=True)) / sum(tokens)
        assert mean == pytest.approx(sum(ages) / len(ages))


class Twice:
    """Asks the same once more."""

    runs_inline = True  # in virtual time

    def __init__(self, problem: Problem) -> None:
        self.said = (Message(role="user", content=problem.question),)
        self.num_steps = 0

    def opening(self) -> Sequence[Message]:
        return self.said

    async def step(self, reply: Reply) -> Observation:
        self.num_steps += 1
        return Observation(messages=self.said if self.num_steps == 1 else ())

    async def close(self) -> None:
        """Nothing is held."""


def test_turns_that_newer_weights_drew_are_trained_on_with_their_own_versions_and_ages():
    def reply(prompt: str, sample: int) -> str:
        return "[ANSWER] 10" if len(prompt) < 30 else f"again {sample}"

    policy = SimulatedPolicy(reply=reply, generate_s=lambda prompt: 0.7)
    records, _ = run(
        policy, num_steps=6, num_prompts=1, num_samples=2, max_policy_age=2, environment=Twice,
        sampling=Sampling(max_tokens=24), max_empty_steps=6,
    )  # fmt: skip
    drawn = [s.policy_versions[s.mask] for step in policy.trained for s in step]
    # The first turn's tokens are older than the second's in some, and never newer.
    assert all((np.diff(versions) >= 0).all() for versions in drawn)
    assert any(versions[0] < versions[-1] for versions in drawn)
    assert 0 < max(policy.age_of_tokens) <= 2
    assert max(record["age/max"] for record in records) == max(policy.age_of_tokens)
    assert {record["rollout/turns_mean"] for record in records} == {2}


def test_a_straggler_is_overtaken_until_it_would_be_too_old():
    policy = SimulatedPolicy(
        reply=half_right, generate_s=lambda prompt: 5.0 if number_of(prompt) == 0 else 1.0, train_s=1.0
    )
    _, took_s = run(policy, num_steps=6, num_prompts=2, max_policy_age=4)
    first_prompts = [bytes(step[0].token_ids[:9].tolist()).decode() for step in policy.trained]
    trained_at = [number_of(prompt.split(">")[0]) for prompt in first_prompts].index(0)
    assert trained_at == 4  # step 5: its tokens are four versions old; the steps before went on
    assert took_s == pytest.approx(0.2 + 1 + 6 * 1.0 + 0.2, abs=0.3)


def test_every_problem_is_trained_on_exactly_once_or_dropped():
    rng = random.Random(3)
    policy = SimulatedPolicy(reply=some_right, generate_s=lambda prompt: rng.choice([0.1, 1.0, 4.0]))
    run(policy, num_steps=10, num_prompts=3, max_policy_age=2)
    numbers = [
        number_of(bytes(s.token_ids[~s.mask].tolist()).decode()) for step in policy.trained for s in step[::4]
    ]
    assert sorted(numbers) == list(range(30))


def test_dropped_groups_free_their_places_and_are_counted():
    def reply(prompt: str, sample: int) -> str:
        return "no" if number_of(prompt) % 2 else some_right(prompt, sample)

    policy = SimulatedPolicy(reply=reply)
    records, _ = run(policy, num_steps=4, num_prompts=2, equal_groups="drop", max_policy_age=1)
    assert [len(step) for step in policy.trained] == [8] * 4
    assert all(any(a != 0 for s in step for a in s.advantages) for step in policy.trained)
    dropped = sum(record["groups/dropped_equal"] for record in records)
    assert dropped >= 7  # half of the problems, for eight groups that were trained on
    # Rewards are of all groups: half of them are of wrong answers alone.
    assert 0.3 < sum(record["reward/equal_groups"] for record in records) / 4 < 0.7


def test_oversize_groups_are_dropped_and_counted():
    def reply(prompt: str, sample: int) -> str:
        return "x" * (40 if number_of(prompt) == 1 else 3) if sample else "[ANSWER] 10"

    policy = SimulatedPolicy(reply=reply)
    records, _ = run(policy, num_steps=2, num_prompts=2, max_sample_tokens=30)
    assert records[0]["groups/dropped_oversize"] == 1
    assert max(len(s.token_ids) for step in policy.trained for s in step) <= 30


def test_an_endless_run_of_groups_that_cannot_be_trained_on_stops_with_a_message():
    policy = SimulatedPolicy(reply=lambda prompt, i: "no")
    with pytest.raises(NothingToLearnError, match=r"^step 1: 7 groups in a row .*\(7 equal\).*max_empty"):
        run(policy, num_prompts=2, equal_groups="drop", max_empty_steps=3, max_policy_age=1)


def test_an_error_of_a_rollout_stops_the_loop_and_nothing_is_left_running():
    class Failing(SimulatedPolicy):
        async def generate(self, prompts: Any, **settings: Any) -> Any:
            if number_of(bytes(prompts[0].tolist()).decode()) == 5:
                raise RunError("generator 1 is gone")
            return await super().generate(prompts, **settings)

    policy = Failing(reply=half_right, generate_s=lambda prompt: 30.0)

    async def main() -> list[str]:
        loop, _ = make_loop(policy, problems=problems(), num_steps=6, max_policy_age=2)
        with pytest.raises(RunError, match=r"^step 1: generator 1 is gone"):
            await loop.run()
        return [t.get_name() for t in asyncio.all_tasks() if t is not asyncio.current_task()]

    left, took_s = run_in_virtual_time(main())
    assert left == []
    assert policy.num_running == 0
    assert took_s == pytest.approx(0.2)  # at once, not after the other rollouts' 30 s


def test_rollouts_that_something_else_cancels_stop_the_loop_instead_of_being_waited_for_for_ever():
    class Cancelled(SimulatedPolicy):
        async def generate(self, prompts: Any, **settings: Any) -> Any:
            if number_of(bytes(prompts[0].tolist()).decode()) == 2:
                raise asyncio.CancelledError
            return await super().generate(prompts, **settings)

    says = r"^step 2: the rollouts of problem '.*' were cancelled by their own code"
    with pytest.raises(RunError, match=says):
        run(Cancelled(reply=half_right), num_steps=6, num_prompts=2, max_policy_age=0)


@pytest.mark.parametrize("phase", ["push", "serve"])
def test_a_failing_sync_stops_the_loop_even_while_it_waits_for_rollouts(phase):
    class Failing(SimulatedPolicy):
        async def push(self) -> int:
            if phase == "push" and self.version == 2:
                raise RunError("the store is full")
            return await super().push()

        async def serve(self, policy_version: int) -> ServeResult:
            if phase == "serve" and policy_version == 2:
                raise RunError("the store is full")
            return await super().serve(policy_version)

    policy = Failing(reply=half_right, generate_s=lambda prompt: 100.0 if number_of(prompt) > 3 else 1.0)
    with pytest.raises(RunError, match=r"^step 3: the store is full"):
        run(policy, num_steps=6, max_policy_age=1)


class Checked(SimulatedPolicy):
    """Its canary differs by its version."""

    async def serve(self, policy_version: int) -> ServeResult:
        await super().serve(policy_version)
        if policy_version == 4:
            await asyncio.sleep(0.25)
        return ServeResult(canary_diff=policy_version * 1e-6, canary_s=0.25 * (policy_version == 4))


@pytest.mark.parametrize(("max_age", "versions"), [(0, [1, 2, 3, 4]), (2, [0, 1, 2, 3])])
def test_records_name_the_version_whose_sync_they_tell_of_and_the_log_has_all(max_age, versions, caplog):
    caplog.set_level(logging.INFO, logger="rl.weights.sync")
    records, _ = run(Checked(reply=half_right), num_steps=4, max_policy_age=max_age)
    assert [record["sync/version"] for record in records] == versions
    assert [record["canary/logprob_diff"] for record in records] == [v * 1e-6 for v in versions]
    assert [record["time/pull_s"] for record in records] == pytest.approx([0.1] * 4)
    assert [record["time/canary_s"] for record in records] == [0.25 * (v == 4) for v in versions]
    assert [m.partition(" is")[0] for m in caplog.messages] == [f"policy version {v}" for v in range(5)]
    assert caplog.messages[-1].endswith("push 0.100 s, pull 0.100 s, canary 4e-06 nats a token in 0.250 s")


def test_a_failing_last_pull_names_its_place():
    class Failing(SimulatedPolicy):
        async def serve(self, policy_version: int) -> ServeResult:
            if policy_version == 3:
                raise RunError("the store is full")
            return await super().serve(policy_version)

    with pytest.raises(RunError, match=r"^after step 3: the store is full"):
        run(Failing(reply=half_right), num_steps=3, max_policy_age=1)


@pytest.mark.parametrize(
    ("during", "num_running"), [({"generate_s": lambda prompt: 30.0}, 6), ({"push_s": 30.0}, 0)]
)
def test_cancelling_the_loop_ends_its_rollouts_and_its_sync(during, num_running):
    policy = SimulatedPolicy(reply=half_right, **during)

    async def main() -> int:
        loop, _ = make_loop(policy, problems=problems(), num_steps=6, max_policy_age=2)
        task = asyncio.create_task(loop.run())
        await asyncio.sleep(10)
        assert policy.num_running == num_running
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return len(asyncio.all_tasks())

    num_tasks, took_s = run_in_virtual_time(main())
    assert num_tasks == 1
    assert policy.num_running == 0
    assert took_s == pytest.approx(10)


def test_evaluation_is_of_the_version_that_it_names():
    class Evaluated(SimulatedPolicy):
        async def generate(self, prompts: Any, *, sampling: SamplingParams, **settings: Any) -> Any:
            if sampling.temperature > 0:
                return await super().generate(prompts, sampling=sampling)
            before = self.served_version
            groups = await super().generate(prompts, sampling=sampling)
            evaluated.append((before, self.served_version))
            return groups

    evaluated: list[tuple[int, int]] = []
    policy = Evaluated(reply=half_right, generate_s=lambda prompt: 2.5)
    records, _ = run(policy, num_steps=5, max_policy_age=2, eval_every=2)
    of_evaluations = [(r["step"], r["policy_version"]) for r in records if "eval/correct" in r]
    assert of_evaluations == [(0, 0), (2, 2), (4, 4), (5, 5)]
    assert evaluated == [(0, 0), (2, 2), (4, 4), (5, 5)]


def test_a_continued_loop_draws_again_what_was_under_way_and_nothing_twice():
    def generate_s(prompt: str) -> float:
        return 9.0 if number_of(prompt) == 1 else 1.0

    whole, rest = (SimulatedPolicy(reply=some_right, generate_s=generate_s) for _ in range(2))
    settings = {"num_steps": 6, "num_prompts": 2, "max_policy_age": 3}
    run(whole, checkpoint=CheckpointConfig(interval=2), **settings)
    position = whole.saved[0][0]
    assert position is not None
    assert position.step == 2
    assert 1 in position.outstanding  # the slow one was overtaken
    rest.version = rest.served_version = 2
    run(rest, state=position, **settings)

    def trained(policy: SimulatedPolicy) -> list[int]:
        samples = [s for step in policy.trained for s in step[::4]]
        return [number_of(bytes(s.token_ids[~s.mask].tolist()).decode()) for s in samples]

    assert sorted(trained(whole)[:4] + trained(rest)) == list(range(12))


def test_a_loop_in_which_everybody_waits_would_be_seen():
    class Silent(SimulatedPolicy):
        async def serve(self, policy_version: int) -> ServeResult:
            await asyncio.Event().wait()
            return ServeResult()

    with pytest.raises(DeadlockError):
        run(Silent(reply=half_right))


def test_a_bound_that_no_batch_can_meet_is_refused():
    with pytest.raises(ValueError, match=r"max_policy_age=1 is a bound that no batch can meet .*every=3"):
        make_loop(FakePolicy(reply=half_right), max_policy_age=1, publish_every=3)
