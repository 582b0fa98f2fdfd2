import asyncio
from dataclasses import replace
from itertools import cycle, repeat
from typing import Any

import numpy as np
import pytest

from rl.loop.loop import LogprobMismatchError, Loop
from rl.loop.warmup import SupervisedWarmup
from rl.rollouts.advantage import Advantage
from rl.rollouts.environment import Environments, SingleTurn
from rl.rollouts.episode import Sampling
from rl.rollouts.producer import NothingToLearnError
from rl.rollouts.rubric import Criterion, Rubric
from rl.rollouts.staleness import StalePolicyError
from rl.tasks.sum_digits import SumDigits, is_correct, make_problem
from rl.types import PullResult, Rollout
from rl.utils.errors import RunError
from tests.support.fakes import RENDERER, FakePolicy
from tests.support.loops import PROBLEM, half_right, make_loop, number_of, problems


def run_loop(policy: FakePolicy, **settings: Any) -> list[dict]:
    loop, sink = make_loop(policy, **settings)
    asyncio.run(loop.run())
    return sink.records


def test_a_step_generates_trains_and_publishes_in_this_order():
    policy = FakePolicy(reply=half_right)
    run_loop(policy, num_steps=2)
    step = ["generate", "generate", "forward_backward", "optim_step", "push", "pull"]
    assert policy.calls == ["push", "pull", *step, *step, "save ckpt/step-2"]


def test_a_loop_alone_refuses_options_that_contradict_each_other():
    with pytest.raises(ValueError, match=r"loop.num_minibatches=3: must be a divisor of"):
        make_loop(FakePolicy(reply=half_right), num_minibatches=3)


def test_samples_carry_prompt_mask_logprobs_and_group_advantages():
    policy = FakePolicy(reply=half_right)
    run_loop(policy, groups_per_batch=1, group_size=2)
    right, wrong = policy.trained[0]
    prompt = list(b"<12 34>")
    assert right.token_ids.tolist() == [*prompt, *b"[ANSWER] 10", 0]
    assert right.mask.tolist() == [False] * len(prompt) + [True] * 12
    assert np.isnan(right.generator_logprobs[: len(prompt)]).all()
    assert (right.generator_logprobs[len(prompt) :] == -1).all()
    # Rewards 1 and 0: the mean is 0.5, advantages are +-0.5 on the completion and 0 before it.
    assert right.advantages.tolist() == [0.0] * len(prompt) + [0.5] * 12
    assert wrong.advantages[len(prompt) :].tolist() == [-0.5] * 3
    assert right.policy_versions.tolist() == [-1] * len(prompt) + [0] * 12


def test_one_sample_a_prompt_is_compared_with_the_batch():
    problems = cycle([PROBLEM, make_problem([12, 35])])  # the reply is right for the first alone
    policy = FakePolicy(reply=lambda prompt, sample: "[ANSWER] 10")
    advantage = Advantage(baseline="batch_mean", scale="batch_std", eps=0.0)
    (record,) = run_loop(
        policy, groups_per_batch=4, group_size=1, advantage=advantage, problems=problems
    )
    assert [s.advantages[-1] for s in policy.trained[0]] == pytest.approx(
        [0.866, -0.866] * 2, abs=1e-3
    )
    assert "reward/equal_groups" not in record


def test_each_group_has_a_seed_and_a_session_of_its_own():
    policy = FakePolicy(reply=half_right)
    run_loop(policy, num_steps=2, groups_per_batch=3)
    assert [sampling.seed for sampling in policy.sampled] == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]  # the run's seed is 0
    assert policy.sessions == [f"problem {number}" for number in range(6)]


def test_group_with_a_long_sample_is_replaced_by_default():
    def reply(prompt: str, sample: int) -> str:
        return "[ANSWER] 10" + "0" * 20 * (number_of(prompt) == 1 and sample == 3)

    policy = FakePolicy(reply=reply)
    (record,) = run_loop(policy, problems=problems(), groups_per_batch=2, max_sample_tokens=30)
    assert record["groups/dropped_oversize"] == 1
    # The first and the third problem; the second has a sample of 42 tokens.
    prompts = {bytes(s.token_ids[:9].tolist()) for s in policy.trained[0]}
    assert prompts == {b"<10 1000>", b"<10 1002>"}


def test_only_groups_dropped_in_a_row_stop_a_run():
    def reply(prompt: str, sample: int) -> str:
        return (
            "no"
            if number_of(prompt) % 2 == 0
            else ["no", f"[ANSWER] {number_of(prompt) + 2}"][sample % 2]
        )

    records = run_loop(
        FakePolicy(reply=reply),
        problems=problems(),
        num_steps=4,
        groups_per_batch=1,
        drop_zero_advantage_groups=True,
        max_empty_steps=1,
    )
    assert [record["groups/dropped_equal"] for record in records] == [1, 1, 1, 1]


def test_weights_are_published_when_they_are_due_and_for_evaluations():
    config = Loop.Config(num_steps=7, publish_every=2, eval_every=3, max_off_policy_steps=1)
    assert [step for step in range(1, 8) if config.is_push_due(step)] == [2, 3, 4, 6, 7]


def test_every_minibatch_is_one_optimizer_step():
    policy = FakePolicy(reply=half_right)
    (record,) = run_loop(policy, groups_per_batch=4, group_size=2, num_minibatches=2)
    assert [len(samples) for samples in policy.trained] == [4, 4]
    assert policy.calls.count("optim_step") == 2
    assert record["policy_version"] == 2
    # The first step's gradient norm is 1, the second's 2.
    assert (record["loss/grad_norm"], record["loss/grad_norm_max"]) == (1.5, 2)


@pytest.mark.parametrize(("num_minibatches", "asks"), [(1, 0), (2, 1)])
def test_proximal_logprobs_are_computed_only_for_several_updates(num_minibatches, asks):
    policy = FakePolicy(reply=half_right)
    run_loop(policy, groups_per_batch=4, num_minibatches=num_minibatches, proximal_logprobs=True)
    assert policy.calls.count("compute_logprobs") == asks
    if asks:
        assert policy.calls.index("compute_logprobs") < policy.calls.index("forward_backward")
    for sample in policy.trained[0] + policy.trained[-1]:
        assert (sample.proximal_logprobs is not None) == asks


def test_evaluations_are_greedy_and_run_first_every_n_steps_and_last():
    policy = FakePolicy(reply=half_right)
    records = run_loop(policy, num_steps=3, eval_every=2)
    evaluations = {r["step"]: r["eval/correct"] for r in records if "eval/correct" in r}
    assert evaluations == {
        0: 1.0,
        2: 1.0,
        3: 1.0,
    }  # the one greedy sample is number 0, which is right
    greedy = [s for s in policy.sampled if s.temperature == 0]
    assert len(greedy) == 3
    assert all(s.num_samples == 1 for s in greedy)


def test_a_completion_of_another_policy_version_stops_the_run():
    policy = FakePolicy(reply=half_right)

    async def serve_nothing(policy_version: int) -> PullResult:
        return PullResult()  # the generator kept its old weights

    policy.pull = serve_nothing  # type: ignore[method-assign]
    says = (
        r"^step 2: .*34' was drawn by policy versions \[0\]: .*steps=0, step 2 may train only "
        r"on versions \[1\]"
    )
    with pytest.raises(StalePolicyError, match=says):
        run_loop(policy, num_steps=2)


def test_a_logprob_mismatch_stops_the_run_before_the_update():
    policy = FakePolicy(reply=half_right, logprob_diff=3e-4)
    with pytest.raises(LogprobMismatchError, match=r"^step 1: .*0.0003 nats"):
        run_loop(policy, max_logprob_diff=1e-4)
    assert "optim_step" not in policy.calls


def nan_on_wrong(rollout: Rollout) -> float:
    return 1.0 if is_correct(rollout) else float("nan")


RIGHT_OR_NAN = Rubric(
    criteria=(Criterion(name="answer", function=nan_on_wrong),), correct=is_correct
)


def test_a_failing_reward_stops_the_run_and_names_function_and_problem():
    with pytest.raises(RuntimeError, match=r"reward 'answer' gave nan.*sum-digits/12-34"):
        run_loop(FakePolicy(reply=half_right), rubric=RIGHT_OR_NAN)


def test_a_group_without_any_score_is_replaced():
    replies = iter(["no", "no", "[ANSWER] 10", "[ANSWER] 10", "[ANSWER] 10", "[ANSWER] 10"])
    policy = FakePolicy(reply=lambda prompt, i: next(replies))
    settings = {"groups_per_batch": 2, "group_size": 2, "max_failed_rewards": 0.5}
    (record,) = run_loop(policy, rubric=RIGHT_OR_NAN, **settings)
    assert policy.calls.count("generate") == 3
    assert [len(samples) for samples in policy.trained] == [4]
    assert record["groups/dropped_failed"] == 1
    assert record["reward/num_failed"] == 2


def test_a_prompt_that_is_too_long_stops_the_run_or_is_replaced():
    def problems():
        long = replace(PROBLEM, id="long", question="1" * 60)
        return iter([long, PROBLEM, PROBLEM])

    with pytest.raises(
        ValueError, match=r"^the prompt of problem 'long' has 62 tokens; .* room for 32 "
    ):
        run_loop(
            FakePolicy(reply=half_right), problems=problems(), sampling=Sampling(max_tokens=64)
        )
    policy = FakePolicy(reply=half_right)
    (record,) = run_loop(
        policy, problems=problems(), sampling=Sampling(max_tokens=64), long_prompts="drop"
    )
    assert record["groups/dropped_long_prompt"] == 1
    assert record["reward/equal_groups"] == 0  # of the two others
    assert [len(samples) for samples in policy.trained] == [8]


def test_a_prompt_with_a_text_that_is_refused_is_replaced(caplog):
    refused = replace(PROBLEM, id="nul", question="1\0" + "2")
    problems = iter([refused, PROBLEM, PROBLEM])
    (record,) = run_loop(FakePolicy(reply=half_right), problems=problems)
    assert record["groups/dropped_failed"] == 1
    assert record["groups/dropped_long_prompt"] == 0
    (message,) = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert message.startswith("the prompt of problem 'nul': ")


def test_a_task_without_enough_problems_stops_the_run():
    run_loop(FakePolicy(reply=half_right), num_steps=2, problems=repeat(PROBLEM, 4))  # just enough
    says = r"^step 2: the task's training problems are used up: 1 are left, but a step takes "
    with pytest.raises(RunError, match=says):
        run_loop(FakePolicy(reply=half_right), num_steps=2, problems=repeat(PROBLEM, 3))


def test_too_many_steps_without_gradient_stop_the_run():
    policy = FakePolicy(reply=lambda prompt, i: "[ANSWER] 10")
    with pytest.raises(NothingToLearnError, match=r"3 steps in a row .*max_empty_steps=2"):
        run_loop(policy, num_steps=9, max_empty_steps=2)


# Supervised warm-up

DEMONSTRATED = next(SumDigits.Config(num_integers=2).build().warmup_problems(seed=0))


def warm_up(policy, *, num_problems, **settings):
    config = SupervisedWarmup.Config(**{"num_steps": 2, "num_demonstrations": 3} | settings)
    warmup = config.build(
        trainer=policy, renderer=RENDERER, environments=Environments(make=SingleTurn.of)
    )
    losses: list[float] = []
    asyncio.run(warmup.run(repeat(DEMONSTRATED, num_problems), on_step=losses.append))
    return losses


def test_each_warm_up_step_trains_on_its_demonstrations_and_too_few_are_an_error():
    policy = FakePolicy(reply=lambda prompt, i: "")
    assert warm_up(policy, num_problems=6) == [-1.0, -1.0]
    assert [len(samples) for samples in policy.trained] == [3, 3]
    assert policy.calls == ["forward_backward", "optim_step"] * 2
    says = r"warm-up problems are used up: 2 left, of warmup\.num_demonstrations=3"
    with pytest.raises(RunError, match=says):
        warm_up(policy, num_problems=5)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # From 3 to 1 by half of a cosine: 3, 2 + cos(45 degrees), 2, 2 - cos(45 degrees).
        ({"lr_warmup_steps": 0, "min_lr_ratio": 1 / 3}, [3.0, 2.7071, 2.0, 1.2929]),
        ({"lr_warmup_steps": 3, "min_lr_ratio": 1.0}, [1.0, 2.0, 3.0, 3.0]),
    ],
)
def test_warm_up_steps_have_a_rate_that_rises_and_then_decays(settings, expected):
    policy = FakePolicy(reply=lambda prompt, i: "")
    warm_up(policy, num_problems=12, num_steps=4, lr=3.0, **settings)
    assert [params.lr for params in policy.stepped if params] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("most", [0, 2])
def test_versions_that_no_step_can_train_on_any_more_are_forgotten(most):
    loop, _ = make_loop(FakePolicy(reply=half_right), num_steps=12, max_off_policy_steps=most)
    asyncio.run(loop.run())
    assert sorted(loop._versions.step_of_version.values()) == list(range(12 - most, 13))
