import asyncio
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import numpy as np
import pytest

from rl.errors import RunError
from rl.loop import Loop
from rl.loop_checks import LogprobMismatchError
from rl.rollouts.ages import StalePolicyError
from rl.rollouts.environment import SingleTurn
from rl.rollouts.producer import NothingToLearnError
from rl.rollouts.rubric import Criterion, Rubric
from rl.rollouts.settings import Sampling
from rl.tasks.sum_digits import SumDigits, is_correct, make_problem
from rl.training.checkpoint_config import CheckpointConfig
from rl.types import LoopPosition, Observation, Reply, Rollout, ServeResult
from tests.support.fakes import FakePolicy
from tests.support.loops import PROBLEM, half_right, make_loop


def run_loop(policy: FakePolicy, **settings: Any) -> list[dict]:
    loop, sink = make_loop(policy, **settings)
    asyncio.run(loop.run())
    return sink.records


def test_a_step_is_generate_train_publish_in_that_order_and_the_last_saves():
    policy = FakePolicy(reply=half_right)
    run_loop(policy, num_steps=2)
    step = ["generate", "generate", "forward_backward", "optim_step", "push", "serve"]
    assert policy.calls == ["push", "serve", *step, *step, "save ckpt/step-2"]


def test_checkpoints_are_saved_when_due_and_only_the_last_is_waited_for():
    policy = FakePolicy(reply=half_right)
    every = CheckpointConfig(
        interval=2, enable_first_step_checkpoint=True, create_seed_checkpoint=True, last_save_model_only=True
    )
    run_loop(policy, num_steps=5, num_prompts=3, checkpoint=every)
    assert [call for call in policy.calls if call.startswith("save")] == [
        f"save ckpt/step-{step}" for step in (0, 1, 2, 4, 5)
    ]
    assert policy.calls[2] == "save ckpt/step-0"  # before the first step
    positions = [LoopPosition(step=step, num_problems=3 * step, evaluated=True) for step in (0, 1, 2, 4, 5)]
    assert policy.saved == [(position, False, False) for position in positions[:-1]] + [
        (positions[-1], True, True)
    ]


@pytest.mark.parametrize("off", [{"enable": False}, {"load_only": True}])
def test_nothing_is_saved_where_checkpoints_are_off(off):
    policy = FakePolicy(reply=half_right)
    run_loop(policy, num_steps=2, checkpoint=CheckpointConfig(interval=1, **off))
    assert policy.saved == []


def test_a_loop_continues_with_the_steps_problems_and_seeds_of_one_that_did_not_stop():
    def problems():
        return (make_problem([11 + i % 80, 34]) for i in range(100))

    def seen(policy):
        trained = [[sample.token_ids.tolist() for sample in step] for step in policy.trained]
        seeds = [params.seed for params in policy.sampled]
        return list(zip(trained, zip(seeds[::2], seeds[1::2], strict=True), strict=True))

    whole, rest = FakePolicy(reply=half_right), FakePolicy(reply=half_right)
    every = CheckpointConfig(interval=2, create_seed_checkpoint=True)
    records = run_loop(whole, num_steps=4, problems=problems(), checkpoint=every)
    position, *_ = whole.saved[1]
    assert position == LoopPosition(step=2, num_problems=4, evaluated=True)
    continued = run_loop(rest, num_steps=4, problems=problems(), checkpoint=every, state=position)
    assert seen(rest) == seen(whole)[2:]
    assert [record["step"] for record in continued] == [record["step"] for record in records[2:]] == [3, 4]
    assert rest.saved == whole.saved[2:]  # and the seed is not saved again


def test_samples_carry_prompt_mask_logprobs_and_group_advantages():
    policy = FakePolicy(reply=half_right)
    run_loop(policy, num_prompts=1, num_samples=2)
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


def test_record_has_the_promised_keys_and_the_means_of_the_step():
    policy = FakePolicy(reply=lambda prompt, i: "[ANSWER] 10" if i == 0 else "[ANSWER] 9")
    (record,) = run_loop(policy)
    assert record["step"] == 1
    assert record["policy_version"] == 1
    assert record["reward/correct"] == 0.25
    assert record["reward/mean"] == pytest.approx(0.25 * 1.0 + 0.75 * 0.1)
    assert record["completion/tokens_mean"] == pytest.approx(np.mean([12, 11, 11, 11]))
    assert record["loss/mean"] == -1.0
    for key in ("logprob_diff/mean", "logprob_diff/max", "time/step_s", "perf/generated_tokens_per_s"):
        assert key in record


def test_equal_replies_of_a_group_toss_a_coin_each_and_the_same_in_every_run():
    def rewarded() -> list[bool]:
        rubric = SumDigits.Config(num_integers=2, reward="noise").build().rubric(seed=0)
        policy = FakePolicy(reply=lambda prompt, i: "no")
        run_loop(policy, rubric=rubric, num_prompts=1, num_samples=16)
        return [bool(s.advantages[-1] > 0) for s in policy.trained[0]]

    assert 4 <= sum(rewarded()) <= 12
    assert rewarded() == rewarded()


def test_minibatches_cut_a_step_by_prompts_into_optimizer_steps():
    policy = FakePolicy(reply=half_right)
    (record,) = run_loop(policy, num_prompts=4, num_samples=2, num_minibatches=2)
    assert [len(samples) for samples in policy.trained] == [4, 4]
    assert policy.calls.count("optim_step") == 2
    assert record["policy_version"] == 2
    # The first step's gradient norm is 1, the second's 2.
    assert (record["loss/grad_norm"], record["loss/grad_norm_max"]) == (1.5, 2)


@pytest.mark.parametrize(("num_minibatches", "asks"), [(1, 0), (2, 1)])
def test_logprobs_before_the_first_of_several_updates_come_with_the_samples(num_minibatches, asks):
    class Asked(FakePolicy):
        async def compute_logprobs(self, samples):
            self.calls.append("compute_logprobs")
            return [s.token_ids.astype(np.float32) for s in samples]

    policy = Asked(reply=half_right)
    run_loop(policy, num_prompts=4, num_minibatches=num_minibatches, proximal_logprobs=True)
    assert policy.calls.count("compute_logprobs") == asks
    if asks:
        assert policy.calls.index("compute_logprobs") < policy.calls.index("forward_backward")
        for sample in policy.trained[0] + policy.trained[1]:
            assert sample.proximal_logprobs is not None
            assert np.array_equal(sample.proximal_logprobs, sample.token_ids)
    else:
        assert all(sample.proximal_logprobs is None for sample in policy.trained[0])


def test_evaluation_is_greedy_before_every_n_steps_and_after():
    policy = FakePolicy(reply=half_right)
    records = run_loop(policy, num_steps=3, eval_every=2)
    evaluations = {r["step"]: r["eval/correct"] for r in records if "eval/correct" in r}
    assert evaluations == {0: 1.0, 2: 1.0, 3: 1.0}  # the one greedy sample is number 0, which is right
    greedy = [s for s in policy.sampled if s.temperature == 0]
    assert len(greedy) == 3
    assert all(s.num_samples == 1 for s in greedy)


def test_whoever_waits_is_shown_each_evaluation_while_it_goes_on():
    policy = FakePolicy(reply=half_right)

    @contextmanager
    def watch(title):
        policy.calls.append(f"begin {title}")
        yield
        policy.calls.append("end")

    run_loop(policy, eval_every=1, watch=watch)
    before, after = ([f"begin evaluation at step {n} (1 problems)", "generate", "end"] for n in (0, 1))
    assert policy.calls[2:5] == before
    assert policy.calls[-4:-1] == after
    assert sum(call.startswith("begin") for call in policy.calls) == 2


def test_every_problem_samples_with_a_seed_of_its_own():
    policy = FakePolicy(reply=half_right)
    run_loop(policy, num_steps=3, num_prompts=2)
    assert len({s.seed for s in policy.sampled}) == 6


def test_a_completion_of_another_policy_version_stops_the_run():
    policy = FakePolicy(reply=half_right)

    async def serve_nothing(policy_version: int) -> ServeResult:
        return ServeResult()  # the generator kept its old weights

    policy.serve = serve_nothing  # type: ignore[method-assign]
    says = r"^step 2: .*34' was drawn by policy versions \[0\]: .*age=0, step 2 may train on those of \[1\]"
    with pytest.raises(StalePolicyError, match=says):
        run_loop(policy, num_steps=2)


def test_logprobs_that_differ_beyond_the_bound_stop_the_run_before_the_update():
    policy = FakePolicy(reply=half_right, logprob_diff=3e-4)
    with pytest.raises(LogprobMismatchError, match=r"^step 1: .*0.0003 nats"):
        run_loop(policy, max_logprob_diff=1e-4)
    assert "optim_step" not in policy.calls


def raises_on_wrong(rollout: Rollout) -> float:
    if not is_correct(rollout):
        raise KeyError("missing")
    return 1.0


def nan_on_wrong(rollout: Rollout) -> float:
    return 1.0 if is_correct(rollout) else float("nan")


@pytest.mark.parametrize(
    ("function", "says"), [(raises_on_wrong, "raised KeyError"), (nan_on_wrong, "is nan")]
)
def test_a_failing_reward_stops_the_run_and_names_function_and_problem(function, says):
    rubric = Rubric(criteria=(Criterion(name="answer", function=function),), correct=is_correct)
    with pytest.raises(RuntimeError, match=rf"reward 'answer' {says}.*sum-digits/12-34"):
        run_loop(FakePolicy(reply=half_right), rubric=rubric)


def test_a_tolerated_failure_is_counted_and_left_out_of_the_groups_mean():
    rubric = Rubric(criteria=(Criterion(name="answer", function=nan_on_wrong),), correct=is_correct)
    policy = FakePolicy(reply=half_right)
    (record,) = run_loop(policy, rubric=rubric, max_failed_rewards=0.5)
    assert record["reward/num_failed"] == 4
    assert record["reward/mean"] == 1.0
    assert len(policy.trained[0]) == 4
    assert all((s.advantages == 0).all() for s in policy.trained[0])


@dataclass(frozen=True, kw_only=True)
class BreaksOnNo(SingleTurn):
    async def step(self, reply: Reply) -> Observation:
        if reply.text == "no":
            raise KeyError("board")
        return Observation()


def test_rollouts_whose_environment_breaks_are_counted_and_not_trained_on():
    policy = FakePolicy(reply=half_right)
    (record,) = run_loop(policy, environment=BreaksOnNo.of, max_failed_rewards=0.5)
    assert record["reward/num_failed"] == 4
    assert record["reward/mean"] == 1.0
    assert [len(samples) for samples in policy.trained] == [4]
    assert all(b"[ANSWER]" in bytes(s.token_ids.tolist()) for s in policy.trained[0])


def test_a_group_whose_rewards_all_failed_gives_its_place_to_another_problem():
    replies = iter(["no", "no", "[ANSWER] 10", "[ANSWER] 10", "[ANSWER] 10", "[ANSWER] 10"])
    rubric = Rubric(criteria=(Criterion(name="answer", function=nan_on_wrong),), correct=is_correct)
    policy = FakePolicy(reply=lambda prompt, i: next(replies))
    (record,) = run_loop(policy, rubric=rubric, num_prompts=2, num_samples=2, max_failed_rewards=0.5)
    assert policy.calls.count("generate") == 3
    assert [len(samples) for samples in policy.trained] == [4]
    assert record["groups/dropped_failed"] == 1
    assert record["reward/num_failed"] == 2


def test_a_problem_whose_prompt_is_too_long_stops_the_run_or_gives_its_place_to_another():
    def problems():
        long = replace(PROBLEM, id="long", question="1" * 60)
        return iter([long, PROBLEM, PROBLEM])

    with pytest.raises(ValueError, match=r"^the prompt of problem 'long' has 62 tokens; .* room for 32 "):
        run_loop(FakePolicy(reply=half_right), problems=problems(), sampling=Sampling(max_tokens=64))
    policy = FakePolicy(reply=half_right)
    (record,) = run_loop(policy, problems=problems(), sampling=Sampling(max_tokens=64), long_prompts="drop")
    assert record["groups/dropped_long_prompt"] == 1
    assert record["reward/equal_groups"] == 0  # of the two others
    assert [len(samples) for samples in policy.trained] == [8]


def test_a_task_that_runs_out_of_problems_stops_the_run_and_says_so():
    run_loop(FakePolicy(reply=half_right), num_steps=2, problems=repeat(PROBLEM, 4))  # just enough
    says = r"^step 2: the task's training problems are used up: 1 are left, of loop\.num_prompts=2 "
    with pytest.raises(RunError, match=says):
        run_loop(FakePolicy(reply=half_right), num_steps=2, problems=repeat(PROBLEM, 3))


def test_steps_without_any_gradient_stop_with_a_message():
    policy = FakePolicy(reply=lambda prompt, i: "[ANSWER] 10")
    with pytest.raises(NothingToLearnError, match=r"3 steps in a row .*max_empty_steps=2"):
        run_loop(policy, num_steps=9, max_empty_steps=2)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"temperature": 0.0}, "temperature=0"),
        ({"top_p": 0.9}, "top_p=0.9"),
        ({"top_k": 5}, "top_k=5"),
        ({"max_tokens": 0}, "max_tokens=0"),
    ],
)
def test_sampling_that_cannot_be_trained_on_is_refused(settings, names):
    with pytest.raises(ValueError, match=names):
        Sampling(**settings)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"num_samples": 1}, "num_samples=1"),
        ({"num_prompts": 3, "num_minibatches": 2}, "num_minibatches=2 does not divide"),
        ({"max_failed_rewards": 1.0}, "max_failed_rewards=1.0"),
        ({"num_steps": -1}, "num_steps=-1"),
    ],
)
def test_loop_settings_out_of_range_are_refused(settings, names):
    with pytest.raises(ValueError, match=names):
        Loop.Config(**settings)
