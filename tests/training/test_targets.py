"""Samples with explicit targets, and the engine's results for each of them.

T tokens of a sample, K targets of each, V vocabulary.
"""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
import torch

from losses.cross_entropy import CrossEntropyLoss
from losses.policy import GSPOLoss
from rl.training.failures import read_batch, write_batch
from tests.training.parts import (
    VOCAB,
    assert_near,
    gradients,
    logprobs_of,
    make_engine,
    make_sample,
    make_samples,
    plain_logprobs,
    plain_model,
    with_targets,
)

SAMPLES = make_samples()
WEIGHTED = CrossEntropyLoss(weights="advantages", normalization="none")


def several(k):
    return [with_targets(s, k=k, seed=i) for i, s in enumerate(SAMPLES)]


def num_micro_batches(result):
    return result.packing.num_micro_batches


def plain_targets(model, sample):
    """Return logprobs [T - 1] or [T - 1, K] of the sample's targets, with gradient."""
    logprobs_TV = plain_logprobs(model, sample)
    targets = torch.from_numpy(sample.targets[1:])
    columns = targets.unsqueeze(1) if targets.ndim == 1 else targets
    return logprobs_TV.gather(1, columns).view(targets.shape)


@pytest.mark.parametrize("k", [None, 3])
def test_weighted_cross_entropy_of_given_targets_equals_plain_pytorch(assets, k):
    engine = make_engine(assets)
    samples = several(k)
    model = plain_model(engine)
    loss = torch.zeros(())
    for sample in samples:
        weights = torch.from_numpy(np.where(sample.mask, sample.advantages, 0.0)[1:])
        loss = loss - (weights * plain_targets(model, sample)).sum()
    loss.backward()
    result = engine.forward_backward(samples, loss=WEIGHTED)
    assert num_micro_batches(result) > 3
    assert result.loss_sum == pytest.approx(loss.item(), rel=1e-5)
    assert result.num_valid_tokens == sum(s.mask.sum() for s in samples)
    assert result.num_tokens == sum(len(s.token_ids) - 1 for s in samples)
    assert_near(gradients(engine), {name: p.grad for name, p in model.named_parameters()})


@pytest.mark.parametrize("k", [None, 1])
def test_logprobs_are_returned_by_sample_with_a_zero_first_entry(assets, k):
    engine = make_engine(assets, max_tokens_per_microbatch=25)
    samples = several(k)
    model = plain_model(engine)
    result = engine.forward_backward(samples, loss=WEIGHTED, return_logprobs=True)
    assert num_micro_batches(result) > 3
    asked = engine.compute_logprobs(samples)
    for sample, logprobs, alike in zip(samples, logprobs_of(result), asked, strict=True):
        assert (logprobs.shape, logprobs.dtype) == (sample.targets.shape, np.float32)
        assert not logprobs[0].any()
        np.testing.assert_allclose(
            logprobs[1:], plain_targets(model, sample).detach().numpy(), atol=1e-5, rtol=1e-5
        )
        np.testing.assert_array_equal(logprobs, alike)
    assert engine.forward_backward(samples, loss=WEIGHTED).logprobs is None


def test_sequence_ratio_uses_the_ratio_mask_in_every_packing(assets):
    samples = [
        replace(s, ratio_mask=np.random.default_rng(i).random(len(s.token_ids)) < 0.5)
        for i, s in enumerate(SAMPLES)
    ]
    loss = GSPOLoss(clip_low=1.0, clip_high=1e9)
    engine, packed = make_engine(assets, max_tokens_per_microbatch=18), make_engine(assets)
    result, other = (
        engine.forward_backward(samples, loss=loss),
        packed.forward_backward(samples, loss=loss),
    )
    assert num_micro_batches(result) != num_micro_batches(other)
    assert_near(gradients(packed), gradients(engine))
    assert result.ratio_mean == pytest.approx(other.ratio_mean, rel=1e-5)
    plain = make_engine(assets).forward_backward(SAMPLES, loss=loss)
    assert plain.ratio_mean != pytest.approx(result.ratio_mean, rel=1e-3)


ZEROS = np.zeros((6, 4), dtype=np.int64)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"targets": None}, "sample 1: targets must be set in all samples or in none"),
        ({"targets": ZEROS[:, :3]}, r"sample 1: targets has shape \[6, 3\]: must be \[6, 2\]"),
        ({"targets": ZEROS[:, 0]}, r"sample 1: targets has shape \[6\]: must be \[6, 2\]"),
        (
            {"targets": np.full((6, 2), VOCAB)},
            "sample 1: targets has 320: must be token ids of 0 to 319",
        ),
        (
            {"targets": np.full((6, 2), -1)},
            "sample 1: targets has -1: must be token ids of 0 to 319",
        ),
        (
            {"token_ids": np.full(6, VOCAB, np.int32)},
            "sample 1: token_ids has 320: must be token ids of 0 to 319",
        ),
        ({"mask": np.ones(6, dtype=bool)}, r"sample 1: mask has shape \[6\]: must be \[6, 2\]"),
        ({"ratio_mask": np.ones(6, dtype=bool)}, "ratio_mask must be "),
    ],
)
def test_invalid_targets_are_refused_and_the_gradient_is_kept(assets, change, says):
    engine = make_engine(assets)
    samples = [with_targets(make_sample(length=n, seed=n), k=2) for n in (5, 6)]
    engine.forward_backward(samples, loss=WEIGHTED)
    with pytest.raises(ValueError, match=says):
        engine.forward_backward([samples[0], replace(samples[1], **change)], loss=WEIGHTED)
    assert engine.optim_step().grad_norm > 0.0
    with pytest.raises(ValueError, match=r"sample 0: mask has shape \[5, 2\]: must be \[5\]"):
        engine.forward([replace(samples[0], targets=None)])


def test_samples_with_other_targets_are_written_and_read(tmp_path):
    samples = [
        with_targets(make_sample(length=6, seed=2), k=3),
        with_targets(make_sample(length=4, seed=3)),
        make_sample(length=5, seed=1),
    ]
    write_batch(tmp_path / "batch.npz", samples)
    for read, written in zip(read_batch(tmp_path / "batch.npz"), samples, strict=True):
        for field in dataclasses.fields(written):
            np.testing.assert_array_equal(getattr(read, field.name), getattr(written, field.name))
