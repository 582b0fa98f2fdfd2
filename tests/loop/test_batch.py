"""Samples of a batch: minibatches, KL penalty, long samples, proximal logprobs, recorded tokens."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest

from rl.loop.batch import TrainingBatch, collect_trained_rollouts, make_training_batch
from rl.loop.loop import Loop
from rl.observability.metrics import reduce_metric
from rl.observability.recorder import Recorder, RecorderConfig, read_rollouts
from rl.rollouts.advantage import Advantage, KLReward
from rl.rollouts.group import Group
from rl.rollouts.producer import Batch, NothingToLearnError
from rl.rollouts.trained import TrainedRollout
from rl.trainer_types import TrainedTokens
from rl.types import FinishReason, Rollout, Score, TrainingSample
from rl.utils.errors import RunError
from tests.support.conversations import conversation, drawn
from tests.support.fakes import FakePolicy
from tests.support.loops import make_loop, some_right
from tests.support.loops import problems as numbered_problems


def group(
    number: int,
    *completions: int,
    rewards: Sequence[float] = (1.0, 0.0),
    failed: Sequence[int] = (),
) -> Group:
    """Rollouts of a prompt of 3 tokens and completions of so many."""
    rollouts = [
        conversation((3, drawn(*range(10, 10 + n))), sample=i) for i, n in enumerate(completions)
    ]
    return group_of(number, *rollouts, rewards=rewards, failed=failed)


def group_of(
    number: int,
    *rollouts: Rollout,
    rewards: Sequence[float] = (0.0, 1.0),
    failed: Sequence[int] = (),
) -> Group:
    scores = [
        Score(
            reward=rewards[i % len(rewards)],
            correct=False,
            failure="raised" if i in failed else None,
        )
        for i in range(len(rollouts))
    ]
    return Group(number=number, rollouts=list(rollouts), scores=scores)


def make(
    *groups: Group, adds_proximal: bool = False, policy: FakePolicy | None = None, **config: Any
) -> TrainingBatch:
    settings = {"groups_per_batch": len(groups), "group_size": 2} | config
    return asyncio.run(
        make_training_batch(
            Batch(groups=list(groups), dropped=[]),
            config=Loop.Config(**settings),
            trainer=policy or FakePolicy(reply=lambda prompt, i: ""),
            adds_proximal_logprobs=adds_proximal,
        )
    )


def samples(made: TrainingBatch) -> list[list[TrainingSample]]:
    return [[*part.values()] for part in made.minibatches]


def lengths(made: TrainingBatch) -> list[list[int]]:
    return [[len(s.token_ids) for s in part] for part in samples(made)]


def counted(made: TrainingBatch) -> dict[str, float | None]:
    return {name: reduce_metric(metric) for name, metric in made.metrics.items()}


def test_minibatches_are_divided_by_prompts_without_failed_rollouts():
    groups = [group(i, 1 + i, 11 + i, failed=(0,) if i == 2 else ()) for i in range(4)]
    made = make(*groups, num_minibatches=2)
    assert lengths(made) == [[4, 14, 5, 15], [16, 7, 17]]
    assert made.metrics == {}
    assert made.has_gradient
    assert [s.advantages[-1] for s in samples(made)[0]] == [0.5, -0.5, 0.5, -0.5]
    assert samples(made)[1][0].advantages[-1] == 0.0  # alone in its group
    assert {s.temperature for part in samples(made) for s in part} == {1.0}


# Long samples


def test_dropped_samples_count_for_their_groups_advantages():
    made = make(
        group(0, 4, 2), group(1, 5, 6), num_minibatches=1, max_sample_tokens=7, long_samples="drop"
    )
    assert lengths(made) == [[7, 5]]
    assert [s.advantages[-1] for s in samples(made)[0]] == [0.5, -0.5]
    made = make(group(0, 5, 2), group(1, 5, 2), max_sample_tokens=7, long_samples="drop")
    assert [s.advantages[-1] for s in samples(made)[0]] == [-0.5, -0.5]
    assert counted(made) == {"samples/dropped": 2}


def test_truncated_samples_keep_their_first_tokens():
    made = make(group(0, 4, 5), group(1, 9, 2), max_sample_tokens=7, long_samples="truncate")
    assert lengths(made) == [[7, 7, 7, 5]]
    assert samples(made)[0][1].token_ids.tolist() == [1, 1, 1, 10, 11, 12, 13]
    assert [int(s.mask.sum()) for s in samples(made)[0]] == [4, 4, 4, 2]
    assert counted(made) == {"samples/dropped": 0, "samples/truncated": 2}


@pytest.mark.parametrize("policy", ["drop", "truncate"])
def test_a_step_without_samples_is_an_error_that_names_the_limit(policy):
    says = (
        r"none of the step's 4 samples can be trained on: the shortest has 5 tokens, "
        rf"loop\.max_sample_tokens=3 with loop\.long_samples={policy}"
    )
    with pytest.raises(RunError, match=says):
        make(group(0, 2, 9), group(1, 9, 9), max_sample_tokens=3, long_samples=policy)


# Rollouts that ran out of tokens


def cut_off(number: int, *finish_reasons: FinishReason) -> Group:
    """Rollouts of 4 tokens that end so."""
    members = group(number, *[4] * len(finish_reasons))
    rollouts = [
        replace(
            rollout,
            turns=(replace(turn, completion=replace(turn.completion, finish_reason=reason)),),
        )
        for rollout, reason in zip(members.rollouts, finish_reasons, strict=True)
        for turn in rollout.turns
    ]
    return group_of(number, *rollouts, rewards=(1.0, 0.0))


def test_truncated_rollouts_count_for_their_group_and_have_no_loss():
    groups = [cut_off(0, "length", "stop"), cut_off(1, "stop", "stop")]
    made = make(*groups, mask_truncated_completions=True)
    assert lengths(made) == [[7, 7, 7, 7]]
    assert [int(s.mask.sum()) for s in samples(made)[0]] == [0, 4, 4, 4]
    assert [s.advantages[-1] for s in samples(made)[0]] == [0.5, -0.5, 0.5, -0.5]
    assert counted(made) == {"samples/masked": 1}
    assert made.has_gradient
    out_of_tokens = replace(groups[1].rollouts[0], end="tokens")
    made = make(group_of(0, out_of_tokens, groups[1].rollouts[1]), mask_truncated_completions=True)
    assert [int(s.mask.sum()) for s in samples(made)[0]] == [0, 4]
    assert [int(s.mask.sum()) for s in samples(make(*groups))[0]] == [4] * 4


def test_batch_of_truncated_rollouts_alone_has_no_gradient():
    made = make(cut_off(0, "length", "length"), mask_truncated_completions=True)
    assert lengths(made) == [[7, 7]]
    assert not made.has_gradient
    assert counted(made) == {"samples/masked": 2}


def test_steps_of_truncated_rollouts_alone_are_empty_and_stop_the_run():
    policy = FakePolicy(reply=some_right, finish_reason="length")
    loop, _ = make_loop(
        policy,
        problems=numbered_problems(),
        mask_truncated_completions=True,
        max_empty_steps=2,
        num_steps=9,
    )
    with pytest.raises(
        NothingToLearnError,
        match=r"3 steps in a row .* in every group .* or only truncated replies, .* more than",
    ):
        asyncio.run(loop.run())
    assert policy.calls.count("optim_step") == policy.num_empty_updates == 3


# Rewards by token, and the penalty in them


def kept(seen: list[list[np.ndarray]], **settings: Any) -> Advantage:
    """Adds the rewards of each group to `seen`."""

    class Kept(Advantage):
        def __call__(self, rewards_PG: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
            seen.extend([r.copy() for r in rewards] for rewards in rewards_PG)
            return super().__call__(rewards_PG)

    return Kept(**settings)


@pytest.mark.parametrize("credit", ["sequence", "token"])
def test_the_kl_penalty_is_subtracted_from_token_rewards_before_advantages(credit):
    seen: list[list[np.ndarray]] = []
    policy = FakePolicy(reply=lambda prompt, i: "")
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
def test_token_credit_keeps_the_environments_reward_at_its_turn(credit, turns):
    rollouts = [
        conversation((3, drawn(5, 6)), (2, drawn(7)), rewards=(given, 0.5), sample=i)
        for i, given in enumerate((0.25, 0.0))
    ]
    scores = [Score(reward=1.0, correct=True), Score(reward=0.5, correct=False)]
    of_turns = Group(number=0, rollouts=rollouts, scores=scores)
    seen: list[list[np.ndarray]] = []
    make(of_turns, advantage=kept(seen, credit=credit))
    ((first, second),) = seen
    assert first.tolist() == [0.0, turns[0], 1.0 - turns[0]]
    assert second.tolist() == [0.0, turns[1], 0.5]


# Logprobs from before the step


def test_proximal_logprobs_belong_to_the_truncated_samples():
    policy = FakePolicy(reply=lambda prompt, i: "")
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
    for sample in (s for part in samples(made) for s in part):
        assert sample.proximal_logprobs is not None
        assert sample.proximal_logprobs.tolist() == (sample.token_ids + 1).tolist()
    assert all(s.proximal_logprobs is None for part in samples(make(*groups)) for s in part)


# Recorded tokens


def trained(
    *groups: Group, wanted: Sequence[tuple[int, int]], adds_proximal: bool = False, **config: Any
) -> list[list[TrainedRollout]]:
    """Return the training data if the trainer's logprob of a token is minus its id."""
    made = make(*groups, adds_proximal=adds_proximal, **config)
    of_sample = chain(*(part.items() for part in made.minibatches))
    tokens = {i: read_tokens(s) for i, s in of_sample if i in wanted}
    batch = Batch(groups=list(groups), dropped=[])
    return collect_trained_rollouts(batch, made, recorded=wanted, tokens=tokens)


def read_tokens(sample: TrainingSample) -> TrainedTokens:
    """Return what the loss reads if the trainer's logprob of a token is minus its id."""
    logprobs = np.where(sample.mask, -sample.token_ids, np.nan).astype(np.float32)
    return TrainedTokens(logprobs=logprobs, advantages=sample.advantages)


def two_turns(sample: int) -> Rollout:
    """3 + 2 and 1 + 3 tokens."""
    return conversation((3, drawn(10, 11)), (1, drawn(12, 13, 14)), sample=sample)


@pytest.mark.parametrize("adds_proximal", [False, True])
def test_truncated_tokens_are_masked_and_proximal_logprobs_are_recorded_if_known(adds_proximal):
    ((record, other),) = trained(
        group_of(0, two_turns(0), two_turns(1)),
        wanted=[(0, 0)],
        adds_proximal=adds_proximal,
        max_sample_tokens=7,
        long_samples="truncate",
    )
    assert record.mask is not None
    assert record.trainer_logprobs is not None
    assert record.mask.tolist() == [True, True, True, False, False]  # 3 + 2 + 1 + 1 tokens are left
    np.testing.assert_array_equal(record.trainer_logprobs, [-10, -11, -12, np.nan, np.nan])
    if adds_proximal:
        np.testing.assert_array_equal(record.proximal_logprobs, [11, 12, 13, np.nan, np.nan])
    else:
        assert record.proximal_logprobs is None
    assert (record.advantages.tolist(), other.advantages.tolist()) == ([-0.5] * 5, [0.5] * 5)
    assert (other.mask, other.trainer_logprobs) == (None, None)


# Over a loop


def recorded(tmp_path, policy, *, num_groups=1, **settings):
    loop, _ = make_loop(policy, problems=numbered_problems(), **settings)
    loop.recorder = Recorder(
        tmp_path / "rollouts.jsonl", config=RecorderConfig(num_groups=num_groups)
    )
    return loop, lambda: read_rollouts(tmp_path / "rollouts.jsonl")


class Telling(FakePolicy):
    def logprobs_of(self, sample: TrainingSample) -> np.ndarray:
        return -sample.token_ids.astype(np.float32)


def test_recorded_lines_have_both_logprobs_advantages_and_mask(tmp_path):
    policy = Telling(reply=some_right)
    sizes = {"num_steps": 2, "groups_per_batch": 4, "num_minibatches": 2, "eval_every": 2}
    loop, lines = recorded(tmp_path, policy, num_groups=3, **sizes)
    asyncio.run(loop.run())
    trains = [line for line in lines() if line["kind"] == "train"]
    assert [(line["step"], line["sample"]) for line in trains] == [
        (step, i) for step in (1, 2) for _ in range(3) for i in range(4)
    ]
    # The third recorded group is the first of the second minibatch.
    assert policy.asked == [[*range(8)], [*range(4)]] * 2
    for line in trains:
        (turn,) = line["turns"]
        assert turn["logprobs"] == [-1.0] * len(turn["token_ids"])
        assert turn["trainer_logprobs"] == [-token_id for token_id in turn["token_ids"]]
        assert turn["advantages"] == line["advantage"]
        assert turn["mask"] == 1
    evals = [turn for line in lines() if line["kind"] == "eval" for turn in line["turns"]]
    assert evals
    assert not any({"trainer_logprobs", "advantages", "mask"} & set(turn) for turn in evals)


def test_a_batch_that_the_trainer_failed_on_is_recorded(tmp_path):
    failing = ("forward_backward", 0, RuntimeError("the trainer is gone"))
    loop, lines = recorded(tmp_path, FakePolicy(reply=some_right, failing=failing))
    with pytest.raises(RuntimeError, match="the trainer is gone"):
        asyncio.run(loop.run())
    said = lines()
    assert [(line["step"], line["kind"], line["sample"]) for line in said] == [
        (1, "train", i) for i in range(4)
    ]
    assert all(
        turn["mask"] == 1 and "trainer_logprobs" not in turn for r in said for turn in r["turns"]
    )
