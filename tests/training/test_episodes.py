"""Episodes of several rows in the engine: gradients, counts, logprobs, and refused episodes."""

import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from losses.policy import GSPOLoss, ImportanceSamplingLoss
from rl.rollouts.samples import policy_samples
from rl.training.failures import read_batch, write_batch
from tests.support.branching import EpisodeMaker
from tests.support.distributed import run_ranks
from tests.training.layouts import Assets, join, make, whole_gradients
from tests.training.parts import VOCAB, assert_near, gradients, logprobs_of, make_engine

BY_SEQUENCE = ImportanceSamplingLoss(normalization="sequence_mean")
ROOM: dict[str, Any] = {"max_tokens_per_microbatch": 400}


def make_both():
    """Return the samples of six linear episodes, and those of the same episodes in rows."""
    maker = EpisodeMaker(seed=2)
    maker.logprobs_V -= 3.8  # About what a random model gives each of 320 tokens.
    prompt = maker.make_prompt()
    whole = [maker.make_linear(num_turns=1 + g % 4, sample=g, prompt=prompt) for g in range(6)]
    split = [maker.split(rollout) for rollout in whole]
    advantages = [maker.random.normal(size=r.num_completion_tokens) for r in whole]
    both = []
    for rollouts in (whole, split):
        samples = policy_samples(rollouts, advantages, temperature=1.0)
        both.append([replace(s, token_ids=s.token_ids % VOCAB) for s in samples])
    return both


WHOLE, ROWS = make_both()


@pytest.mark.parametrize(
    "loss",
    [
        BY_SEQUENCE,
        ImportanceSamplingLoss(),
        GSPOLoss(clip_low=0.9, clip_high=9.0),
    ],
    ids=["sequences", "tokens", "gspo"],
)
def test_gradient_of_rows_is_that_of_whole_episodes(assets, loss):
    whole, rows = make_engine(assets, **ROOM), make_engine(assets, **ROOM)
    expected = whole.forward_backward(WHOLE, loss=loss)
    result = rows.forward_backward(ROWS, loss=loss)
    assert_near(gradients(rows), gradients(whole))
    assert result.loss_sum == pytest.approx(expected.loss_sum, rel=1e-5)
    assert (result.denominator, result.num_samples, result.num_valid_tokens) == (
        expected.denominator,
        len(WHOLE),
        expected.num_valid_tokens,
    )
    assert len(ROWS) > len(WHOLE)
    # Later rows read the tokens that earlier rows train.
    assert result.packing is not None
    assert expected.packing is not None
    assert result.packing.num_packed < 1.1 * expected.packing.num_packed


def test_logprobs_are_those_of_each_row(assets):
    engine = make_engine(assets, **ROOM)
    alone = make_engine(assets, max_sequences_per_microbatch=1, share_prompts=False)
    together = engine.forward_backward(ROWS, return_logprobs=True)
    for ours, expected in zip(logprobs_of(together), alone.compute_logprobs(ROWS), strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_episode_that_does_not_fit_is_refused_before_any_compute(assets):
    engine = make_engine(assets, max_sequences_per_microbatch=1)
    says = r"episode \d has \d rows of \d+ tokens .* loss with normalization='sequence_mean' needs"
    with pytest.raises(ValueError, match=says):
        engine.forward_backward(ROWS, loss=BY_SEQUENCE)
    assert gradients(engine) == {}
    # A loss of tokens has no need of whole episodes, nor have logprobs.
    result = engine.forward_backward(ROWS, loss=ImportanceSamplingLoss())
    assert result.packing is not None
    assert result.packing.num_micro_batches == len(ROWS)
    whole = make_engine(assets, **ROOM)
    whole.forward_backward(WHOLE, loss=ImportanceSamplingLoss())
    assert_near(gradients(engine), gradients(whole))


def test_rows_are_written_and_read(tmp_path):
    write_batch(tmp_path / "batch.npz", ROWS)
    for read, written in zip(read_batch(tmp_path / "batch.npz"), ROWS, strict=True):
        for field in dataclasses.fields(written):
            np.testing.assert_array_equal(getattr(read, field.name), getattr(written, field.name))
        assert type(read.episode) is type(written.episode)


LAYOUTS = ("fsdp2", "pp2", "cp2", "cp2_alltoall")


def measure_rows(layouts: tuple[str, ...], assets: Assets) -> list[dict[str, Any]]:
    """Return result, gradients and logprobs of the rows on one rank, by layout of a dense model."""
    join(layouts[0])
    found = []
    for layout in layouts:
        engine = make("dense", layout, assets, max_tokens_per_microbatch=120)
        result = engine.forward_backward(ROWS, loss=BY_SEQUENCE, return_logprobs=True)
        found.append(
            {
                "numbers": (result.denominator, result.num_samples, result.num_valid_tokens),
                "gradients": whole_gradients(engine),
                "logprobs": logprobs_of(result),
            }
        )
        engine.close()
    return found


@pytest.mark.medium
def test_gradient_of_rows_on_two_ranks_is_that_of_whole_episodes(all_assets):
    one = make("dense", "one", all_assets, **ROOM)
    expected = one.forward_backward(WHOLE, loss=BY_SEQUENCE)
    numbers = (expected.denominator, expected.num_samples, expected.num_valid_tokens)
    logprobs = one.compute_logprobs(ROWS)
    for rank in run_ranks(measure_rows, 2, LAYOUTS, all_assets, timeout_s=200):
        for found in rank:
            assert found["numbers"] == numbers
            assert_near(found["gradients"], whole_gradients(one))
            for ours, row in zip(found["logprobs"], logprobs, strict=True):
                np.testing.assert_allclose(ours, row, atol=1e-5)
