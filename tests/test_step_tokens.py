"""What is known of the tokens of recorded rollouts: whom the trainer is asked for, which token gets what."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rl.loop import Loop
from rl.observability.recorder import Recorder, RecorderConfig, TrainedRollout, read_rollouts
from rl.rollouts.grading import scored
from rl.rollouts.group import Group
from rl.rollouts.producer import Batch
from rl.step_samples import SampleMaker
from rl.step_tokens import StepTokens
from rl.types import Rollout, Score, TrainingSample
from tests.support.conversations import conversation, drawn
from tests.support.fakes import FakePolicy
from tests.support.loops import half_right, make_loop, some_right
from tests.support.loops import problems as numbered_problems


class Telling(FakePolicy):
    """The trainer's logprob of a token is minus its id; before the step, a half less."""

    def logprobs_of(self, sample: TrainingSample) -> np.ndarray:
        return -sample.token_ids.astype(np.float32)

    async def compute_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        return [self.logprobs_of(s) - np.float32(0.5) for s in samples]


def group_of(number: int, *rollouts: Rollout, failed: Sequence[int] = ()) -> Group:
    scores = [
        Score(reward=float(i % 2), correct=False, failure="raised" if i in failed else None)
        for i in range(len(rollouts))
    ]
    return Group(
        number=number,
        rollouts=list(rollouts),
        scores=scores,
        scored=scored(rollouts, scores),
        generated_at=0.0,
    )


def trained(
    *groups: Group, wanted: Sequence[tuple[int, int]], adds_proximal: bool = False, **config: Any
) -> tuple[list[list[TrainedRollout]], Telling]:
    """After all minibatches, and the learner that was asked."""
    policy = Telling(reply=half_right)

    async def train() -> list[list[TrainedRollout]]:
        loop = Loop.Config(**{"num_prompts": len(groups), "num_samples": 2} | config)
        batch = Batch(groups=list(groups), dropped=[])
        made = await SampleMaker(config=loop, learner=policy, adds_proximal=adds_proximal).make(batch)
        tokens = StepTokens(made, batch, wanted)
        for number, samples in enumerate(made.minibatches):
            tokens.add(number, await policy.forward_backward(samples, **tokens.asked(number)))
        return tokens.trained()

    return asyncio.run(train()), policy


def two_turns(sample: int) -> Rollout:
    """3 + 2 and 1 + 3 tokens."""
    return conversation((3, drawn(10, 11)), (1, drawn(12, 13, 14)), sample=sample)


def test_each_token_of_each_turn_gets_its_own_logprob_and_prompts_get_none():
    made, policy = trained(group_of(0, two_turns(0), two_turns(1)), wanted=[(0, 1)])
    (one, other) = made[0]
    assert other.trainer_logprobs is not None
    assert other.mask is not None
    assert other.trainer_logprobs.tolist() == [-10, -11, -12, -13, -14]
    assert other.mask.tolist() == [True] * 5
    assert other.advantages.tolist() == [0.5] * 5
    assert one.advantages.tolist() == [-0.5] * 5
    assert (one.mask, one.trainer_logprobs) == (None, None)
    assert policy.asked == [[1]]


def test_only_recorded_samples_are_asked_for_in_the_minibatch_that_they_are_in():
    short = [conversation((3, drawn(10 + i)), sample=0) for i in range(8)]
    groups = [group_of(g, short[2 * g], short[2 * g + 1], failed=(0,) if g == 2 else ()) for g in range(4)]
    made, policy = trained(*groups, wanted=[(0, 1), (2, 0), (3, 0)], num_minibatches=2)
    # Of the third group one failed: the other is its first scored one, and the first sample of its minibatch.
    assert policy.asked == [[1], [0, 1]]
    said = [[None if r.trainer_logprobs is None else r.trainer_logprobs.tolist() for r in of] for of in made]
    assert said == [[None, [-11]], [None, None], [[-15]], [[-16], None]]


def test_of_a_step_that_records_nothing_nothing_is_asked():
    made, policy = trained(group_of(0, two_turns(0), two_turns(1)), wanted=[])
    assert policy.asked == [False]
    assert all(r.trainer_logprobs is None and r.mask is None for of in made for r in of)


def test_logprobs_from_before_the_step_are_taken_where_they_are_known():
    groups = [group_of(g, two_turns(0), two_turns(1)) for g in range(2)]
    made, policy = trained(*groups, wanted=[(0, 0), (1, 1)], num_minibatches=2, adds_proximal=True)
    assert policy.asked == [False, False]
    for logprobs in (made[0][0].trainer_logprobs, made[1][1].trainer_logprobs):
        assert logprobs is not None
        assert logprobs.tolist() == [-10.5, -11.5, -12.5, -13.5, -14.5]


def test_tokens_that_were_cut_off_are_not_trained_on_and_have_no_logprob():
    made, _ = trained(
        group_of(0, two_turns(0), two_turns(1)), wanted=[(0, 0)], max_sample_tokens=7, long_samples="truncate"
    )
    record = made[0][0]
    assert record.mask is not None
    assert record.trainer_logprobs is not None
    assert record.mask.tolist() == [True, True, True, False, False]  # 3 + 2 + 1 + 1 tokens are left
    np.testing.assert_array_equal(record.trainer_logprobs, [-10, -11, -12, np.nan, np.nan])


def test_a_sample_that_was_left_out_is_not_trained_on_and_nobody_is_asked_for_it():
    short = conversation((3, drawn(10)), sample=1)
    made, policy = trained(
        group_of(0, two_turns(0), short), wanted=[(0, 0), (0, 1)], max_sample_tokens=7, long_samples="drop"
    )
    long, kept = made[0]
    assert policy.asked == [[0]]
    assert long.mask is not None
    assert not long.mask.any()
    assert long.trainer_logprobs is None
    assert kept.trainer_logprobs is not None
    assert kept.trainer_logprobs.tolist() == [-10]


# Over a loop


def recorded(tmp_path, policy, **settings):
    loop, _ = make_loop(policy, problems=numbered_problems(), **settings)
    loop.recorder = Recorder(tmp_path / "rollouts.jsonl", config=RecorderConfig(num_groups=1))
    return loop, lambda: read_rollouts(tmp_path / "rollouts.jsonl")


def test_a_loops_lines_have_logprobs_of_both_sides_advantages_and_mask(tmp_path):
    loop, lines = recorded(
        tmp_path, FakePolicy(reply=some_right, logprob_diff=0.25), num_steps=2, eval_every=2
    )
    asyncio.run(loop.run())
    trains = [line for line in lines() if line["kind"] == "train"]
    assert [(line["step"], line["sample"]) for line in trains] == [(s, i) for s in (1, 2) for i in range(4)]
    for line in trains:
        (turn,) = line["turns"]
        assert turn["logprobs"] == [-1.0] * len(turn["token_ids"])
        assert turn["trainer_logprobs"] == [-1.25] * len(turn["token_ids"])
        assert turn["advantages"] == line["advantage"]
        assert turn["mask"] == 1
    evals = [turn for line in lines() if line["kind"] == "eval" for turn in line["turns"]]
    assert evals
    assert not any({"trainer_logprobs", "advantages", "mask"} & set(turn) for turn in evals)


class Failing(FakePolicy):
    async def forward_backward(self, samples: Any, **options: Any) -> Any:
        raise RuntimeError("the trainer is gone")


def test_what_a_trainer_failed_on_is_recorded_without_its_logprobs(tmp_path):
    loop, lines = recorded(tmp_path, Failing(reply=some_right))
    with pytest.raises(RuntimeError, match="the trainer is gone"):
        asyncio.run(loop.run())
    said = lines()
    assert [(line["step"], line["kind"], line["sample"]) for line in said] == [
        (1, "train", i) for i in range(4)
    ]
    assert all(turn["mask"] == 1 and "trainer_logprobs" not in turn for r in said for turn in r["turns"])


class Silent(FakePolicy):
    """A learner of older code: it takes no question for logprobs."""

    async def forward_backward(self, samples: Any, *, loss: Any = None) -> Any:  # type: ignore[override]
        return await super().forward_backward(samples, loss=loss)


def test_a_learner_that_gives_no_logprobs_is_not_asked_where_no_tokens_are_recorded(tmp_path):
    loop, lines = recorded(tmp_path, Silent(reply=some_right))
    loop.recorder = Recorder(tmp_path / "rollouts.jsonl", config=RecorderConfig(tokens=False))
    asyncio.run(loop.run())
    assert len(lines()) == 8
