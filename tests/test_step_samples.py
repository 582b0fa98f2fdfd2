"""From a batch to the samples of its minibatches: penalties, long samples, logprobs from before the step."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rl.errors import RunError
from rl.loop import Loop
from rl.observability.metrics import reduced
from rl.rollouts.advantage import Advantage
from rl.rollouts.grading import scored
from rl.rollouts.group import Group
from rl.rollouts.kl_reward import KLReward
from rl.rollouts.producer import Batch
from rl.step_samples import SampleMaker, StepSamples
from rl.types import Score, TrainingSample
from tests.support.conversations import conversation, drawn
from tests.support.fakes import FakePolicy
from tests.support.loops import half_right, make_loop, number_of, run
from tests.support.simulated import SimulatedPolicy


class Referred(FakePolicy):
    """Its reference policy's logprobs are -2, its own before the step those of the sample plus 1."""

    async def compute_reference_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        self.calls.append("compute_reference_logprobs")
        return [np.full(len(s.token_ids), -2.0, dtype=np.float32) for s in samples]

    async def compute_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        self.calls.append("compute_logprobs")
        return [s.token_ids.astype(np.float32) + 1 for s in samples]


def group(
    number: int, *completions: int, rewards: Sequence[float] = (1.0, 0.0), failed: Sequence[int] = ()
) -> Group:
    """Rollouts of a prompt of 3 tokens and completions of so many."""
    rollouts = [conversation((3, drawn(*range(10, 10 + n))), sample=i) for i, n in enumerate(completions)]
    scores = [
        Score(reward=rewards[i % len(rewards)], correct=False, failure="raised" if i in failed else None)
        for i in range(len(rollouts))
    ]
    return Group(
        number=number, rollouts=rollouts, scores=scores, scored=scored(rollouts, scores), generated_at=0.0
    )


def make(
    *groups: Group, adds_proximal: bool = False, policy: FakePolicy | None = None, **config: Any
) -> StepSamples:
    settings = {"num_prompts": len(groups), "num_samples": 2} | config
    maker = SampleMaker(
        config=Loop.Config(**settings),
        learner=policy or Referred(reply=lambda prompt, i: ""),
        adds_proximal=adds_proximal,
    )
    return asyncio.run(maker.make(Batch(groups=list(groups), dropped=[])))


def lengths(made: StepSamples) -> list[list[int]]:
    return [[len(s.token_ids) for s in part] for part in made.minibatches]


def counted(made: StepSamples) -> dict[str, float | None]:
    return {name: reduced(metric) for name, metric in made.metrics.items()}


def test_minibatches_are_cut_by_prompts_in_order_and_failed_rollouts_are_left_out():
    groups = [group(i, 1 + i, 11 + i, failed=(0,) if i == 2 else ()) for i in range(4)]
    made = make(*groups, num_minibatches=2)
    assert lengths(made) == [[4, 14, 5, 15], [16, 7, 17]]
    assert made.metrics == {}
    assert made.teaches
    assert [s.advantages[-1] for s in made.minibatches[0]] == [0.5, -0.5, 0.5, -0.5]
    assert made.minibatches[1][0].advantages[-1] == 0.0  # alone in its group
    assert {s.temperature for part in made.minibatches for s in part} == {1.0}


def test_a_step_of_equal_rewards_teaches_nothing():
    assert not make(group(0, 3, 4, rewards=(0.5,)), group(1, 3, 4, rewards=(1.0,))).teaches


# Long samples


def test_dropped_samples_have_counted_for_their_groups_advantages():
    made = make(group(0, 4, 2), group(1, 5, 6), num_minibatches=1, max_sample_tokens=7, long_samples="drop")
    assert lengths(made) == [[7, 5]]
    assert [s.advantages[-1] for s in made.minibatches[0]] == [0.5, -0.5]
    made = make(group(0, 5, 2), group(1, 5, 2), max_sample_tokens=7, long_samples="drop")
    assert [s.advantages[-1] for s in made.minibatches[0]] == [-0.5, -0.5]
    assert counted(made) == {"samples/dropped": 2}


def test_truncated_samples_keep_their_first_tokens():
    made = make(group(0, 4, 5), group(1, 9, 2), max_sample_tokens=7, long_samples="truncate")
    assert lengths(made) == [[7, 7, 7, 5]]
    assert made.minibatches[0][1].token_ids.tolist() == [1, 1, 1, 10, 11, 12, 13]
    assert [int(s.mask.sum()) for s in made.minibatches[0]] == [4, 4, 4, 2]
    assert counted(made) == {"samples/dropped": 0, "samples/truncated": 2}


def test_what_has_no_token_to_train_on_after_the_cut_is_dropped():
    rollouts = [conversation((n, drawn(5, 6)), sample=i) for i, n in enumerate((7, 3))]
    scores = [Score(reward=1.0, correct=True), Score(reward=0.0, correct=False)]
    mixed = Group(
        number=0, rollouts=rollouts, scores=scores, scored=scored(rollouts, scores), generated_at=0.0
    )
    made = make(mixed, max_sample_tokens=7, long_samples="truncate")
    assert lengths(made) == [[5]]
    assert counted(made) == {"samples/dropped": 1, "samples/truncated": 0}


def test_a_minibatch_that_is_empty_is_left_out():
    groups = [group(0, 9, 9), group(1, 9, 2), group(2, 9, 8)]
    made = make(*groups, num_minibatches=3, max_sample_tokens=7, long_samples="drop", adds_proximal=True)
    assert lengths(made) == [[5]]
    assert counted(made) == {"samples/dropped": 5}
    assert made.teaches  # the one that is left has an advantage
    alone = make(group(0, 9, 9), group(1, 2, 2, rewards=(1.0,)), max_sample_tokens=7, long_samples="drop")
    assert not alone.teaches  # those with one are dropped


@pytest.mark.parametrize("policy", ["drop", "truncate"])
def test_a_step_without_any_sample_stops_the_run_and_names_the_limit(policy):
    says = (
        r"none of the step's 4 samples can be trained on: the shortest has 5 tokens, "
        rf"loop\.max_sample_tokens=3 with loop\.long_samples={policy}"
    )
    with pytest.raises(RunError, match=says):
        make(group(0, 2, 9), group(1, 9, 9), max_sample_tokens=3, long_samples=policy)


def test_groups_are_dropped_by_the_producer_and_not_here():
    made = make(group(0, 9, 2), max_sample_tokens=7)
    assert lengths(made) == [[12, 5]]
    assert made.metrics == {}


def long_odd(prompt: str, sample: int) -> str:
    right = f"[ANSWER] {sum(map(int, str(1000 + number_of(prompt)) + '10'))}"
    return right if sample % 2 == 0 else "x" * 40


@pytest.mark.parametrize(
    ("policy", "dropped", "truncated", "num_tokens"),
    [("drop", 4, None, {20, 21}), ("truncate", 0, 4, {20, 21, 30})],
)
def test_a_loop_trains_on_what_is_left_and_counts_the_rest(policy, dropped, truncated, num_tokens):
    simulated = SimulatedPolicy(reply=long_odd)
    (record,), _ = run(simulated, num_prompts=2, num_samples=4, max_sample_tokens=30, long_samples=policy)
    (trained,) = simulated.trained
    assert len(trained) == 8 - dropped
    assert {len(s.token_ids) for s in trained} <= num_tokens
    assert record["samples/dropped"] == dropped
    assert record.get("samples/truncated") == truncated
    assert record["groups/dropped_oversize"] == 0
    assert (np.array([s.advantages[-1] for s in trained if len(s.token_ids) < 30]) > 0).all()


def test_a_loop_whose_samples_are_all_too_long_stops_at_its_step():
    loop, _ = make_loop(FakePolicy(reply=half_right), max_sample_tokens=9, long_samples="drop")
    with pytest.raises(RunError, match=r"^step 1: none of the step's 8 samples .*loop\.max_sample_tokens=9"):
        asyncio.run(loop.run())


# Rewards by token, and the penalty in them


def kept(seen: list[list[np.ndarray]], **settings: Any) -> Advantage:
    """Adds the rewards of each group to `seen`."""

    class Kept(Advantage):
        def __call__(self, rewards_PG: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
            seen.extend([r.copy() for r in rewards] for rewards in rewards_PG)
            return super().__call__(rewards_PG)

    return Kept(**settings)


@pytest.mark.parametrize("credit", ["sequence", "token"])
def test_a_penalty_is_taken_off_the_reward_of_each_token_before_advantages_are(credit):
    seen: list[list[np.ndarray]] = []
    policy = Referred(reply=lambda prompt, i: "")
    made = make(
        group(0, 2, 4),
        group(1, 3, 1),
        policy=policy,
        advantage=kept(seen, credit=credit),
        kl_reward=KLReward(coef=0.25),
    )
    # k1 of logprobs -1 against -2 is 1 for every token; rewards are 1 and 0, at the last.
    first, second = seen
    assert [r.tolist() for r in first] == [[-0.25, 0.75], [-0.25] * 4]
    assert [r.tolist() for r in second] == [[-0.25, -0.25, 0.75], [-0.25]]
    assert counted(made) == {"reward/kl": 1.0}
    assert policy.calls == ["compute_reference_logprobs"]


@pytest.mark.parametrize(("credit", "turns"), [("sequence", [0.0, 0.0]), ("token", [0.25, 0.0])])
def test_credit_by_token_leaves_each_turn_what_its_environment_gave_it(credit, turns):
    rollouts = [
        conversation((3, drawn(5, 6)), (2, drawn(7)), rewards=(given, 0.5), sample=i)
        for i, given in enumerate((0.25, 0.0))
    ]
    scores = [Score(reward=1.0, correct=True), Score(reward=0.5, correct=False)]
    of_turns = Group(
        number=0, rollouts=rollouts, scores=scores, scored=scored(rollouts, scores), generated_at=0.0
    )
    seen: list[list[np.ndarray]] = []
    make(of_turns, advantage=kept(seen, credit=credit))
    ((first, second),) = seen
    assert first.tolist() == [0.0, turns[0], 1.0 - turns[0]]
    assert second.tolist() == [0.0, turns[1], 0.5]


def test_without_a_coefficient_nobody_asks_for_the_reference():
    policy = Referred(reply=lambda prompt, i: "")
    assert make(group(0, 2, 4), policy=policy).metrics == {}
    assert policy.calls == []


def test_a_penalty_makes_equal_rewards_unequal():
    made = make(group(0, 2, 6, rewards=(1.0,)), kl_reward=KLReward(coef=0.25))
    short, long = made.minibatches[0]
    assert made.teaches
    # 1 - 2 / 4 and 1 - 6 / 4, less their mean.
    assert (short.advantages[-1], long.advantages[-1]) == (0.5, -0.5)


# Logprobs from before the step


def test_logprobs_before_the_step_are_of_the_samples_as_they_are_trained_on():
    policy = Referred(reply=lambda prompt, i: "")
    groups = [group(0, 9, 2), group(1, 3, 1)]
    made = make(
        *groups,
        policy=policy,
        adds_proximal=True,
        num_minibatches=2,
        max_sample_tokens=7,
        long_samples="truncate",
    )
    assert policy.calls == ["compute_logprobs"]
    assert lengths(made) == [[7, 5], [6, 4]]
    for sample in (s for part in made.minibatches for s in part):
        assert sample.proximal_logprobs is not None
        assert sample.proximal_logprobs.tolist() == (sample.token_ids + 1).tolist()
    assert all(s.proximal_logprobs is None for part in make(*groups).minibatches for s in part)
