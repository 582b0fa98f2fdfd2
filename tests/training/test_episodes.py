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
from tests.training.parts import VOCAB, assert_near, gradients, logprobs_of, make_engine

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
        ImportanceSamplingLoss(normalization="sequence_mean"),
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
    loss = ImportanceSamplingLoss(normalization="sequence_mean")
    says = r"episode \d has \d rows of \d+ tokens .* loss with normalization='sequence_mean' needs"
    with pytest.raises(ValueError, match=says):
        engine.forward_backward(ROWS, loss=loss)
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
