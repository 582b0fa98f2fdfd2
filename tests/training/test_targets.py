"""Samples that say their targets themselves, and what the engine returns of each of them.

T tokens of a sample, K targets of each, V vocabulary.
"""

import dataclasses
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from losses.cross_entropy import CrossEntropyLoss
from losses.grpo import GRPOLoss
from losses.gspo import GSPOLoss
from losses.ppo import PPOLoss
from losses.types import LossOutput
from rl.distributed.mesh import ParallelismConfig
from rl.models.attention import SequenceLayout
from rl.models.qwen3.model import linear_head
from rl.training.errors import NonFiniteLossError
from rl.training.failures import read_batch, write_batch
from tests.support.distributed import run_ranks
from tests.training.parts import (
    VOCAB,
    assert_near,
    gradients,
    logprobs_of,
    make_engine,
    make_sample,
    make_samples,
    plain_model,
    write_assets,
)

SAMPLES = make_samples()
WEIGHTED = CrossEntropyLoss(weights="advantages", normalization="none")


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return write_assets(tmp_path_factory.mktemp("assets") / "model")


def with_targets(sample, *, k=None, seed=0):
    """Random targets and weights, [T] or [T, K]; the mask leaves some out, and entry 0."""
    random = np.random.default_rng([seed, len(sample.token_ids), 0 if k is None else k])
    shape = (len(sample.token_ids),) if k is None else (len(sample.token_ids), k)
    mask = random.random(shape) < 0.8
    mask[0], mask[-1] = False, True
    return replace(
        sample,
        targets=random.integers(0, VOCAB, shape),
        mask=mask,
        advantages=random.normal(size=shape).astype(np.float32),
        generator_logprobs=random.normal(-5.7, 0.3, shape).astype(np.float32),
    )


def several(k):
    return [with_targets(s, k=k, seed=i) for i, s in enumerate(SAMPLES)]


def packing_of(result):
    assert result.packing is not None
    return result.packing


def plain_logprobs(model, sample):
    """[T - 1, V], of one sample alone in the plainest way."""
    ids = torch.from_numpy(sample.token_ids[:-1]).long()
    layout = SequenceLayout.from_lengths([len(ids)])
    logits = model(ids, positions=torch.arange(len(ids)), sequences=layout, head=linear_head)
    return (logits / sample.temperature).log_softmax(-1)


def plain_targets(model, sample):
    """[T - 1] or [T - 1, K] logprobs of its targets, with gradient."""
    logprobs_TV = plain_logprobs(model, sample)
    targets = torch.from_numpy(sample.targets[1:])
    columns = targets.unsqueeze(1) if targets.ndim == 1 else targets
    return logprobs_TV.gather(1, columns).view(targets.shape)


@pytest.mark.parametrize("k", [None, 1, 3])
def test_weighted_cross_entropy_of_given_targets_is_that_of_plain_pytorch(assets, k):
    engine = make_engine(assets)
    samples = several(k)
    model = plain_model(engine)
    loss = torch.zeros(())
    for sample in samples:
        weights = torch.from_numpy(np.where(sample.mask, sample.advantages, 0.0)[1:])
        loss = loss - (weights * plain_targets(model, sample)).sum()
    loss.backward()
    result = engine.forward_backward(samples, loss=WEIGHTED)
    assert result.loss_sum == pytest.approx(loss.item(), rel=1e-5)
    assert result.num_valid_tokens == sum(s.mask.sum() for s in samples)
    assert result.num_tokens == sum(len(s.token_ids) - 1 for s in samples)
    assert_near(gradients(engine), {name: p.grad for name, p in model.named_parameters()})


@pytest.mark.parametrize("k", [None, 3])
def test_packing_chunks_and_parts_change_nothing(assets, k):
    samples = several(k)
    engine = make_engine(assets, max_tokens_per_microbatch=500)
    whole = engine.forward_backward(samples, loss=WEIGHTED, return_logprobs=True)
    assert packing_of(whole).num_micro_batches == 1
    assert packing_of(whole).num_packed == whole.num_tokens
    alone = make_engine(assets, max_tokens_per_microbatch=18, logits_chunk_tokens=5)
    results = [
        alone.forward_backward(part, loss=WEIGHTED, return_logprobs=True)
        for part in (samples[:2], samples[2:9], samples[9:])
    ]
    assert packing_of(results[1]).num_micro_batches > 3
    assert sum(r.loss_sum for r in results) == pytest.approx(whole.loss_sum, rel=1e-5)
    assert_near(gradients(alone), gradients(engine))
    parts = [values for r in results for values in logprobs_of(r)]
    for ours, theirs in zip(parts, logprobs_of(whole), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("k", [None, 1, 3])
def test_logprobs_come_back_by_sample_with_nothing_first(assets, k):
    engine = make_engine(assets, max_tokens_per_microbatch=25)
    samples = several(k)
    model = plain_model(engine)
    result = engine.forward_backward(samples, loss=WEIGHTED, return_logprobs=True)
    assert packing_of(result).num_micro_batches > 3
    asked = engine.compute_logprobs(samples)
    for sample, logprobs, alike in zip(samples, logprobs_of(result), asked, strict=True):
        assert (logprobs.shape, logprobs.dtype) == (sample.targets.shape, np.float32)
        assert not logprobs[0].any()
        np.testing.assert_allclose(
            logprobs[1:], plain_targets(model, sample).detach().numpy(), atol=1e-5, rtol=1e-5
        )
        np.testing.assert_array_equal(logprobs, alike)
    assert engine.forward_backward(samples, loss=WEIGHTED).logprobs is None


def test_targets_that_are_the_tokens_change_nothing(assets):
    said = [replace(s, targets=s.token_ids.astype(np.int64)) for s in SAMPLES]
    one, other = make_engine(assets, share_prompts=False), make_engine(assets, share_prompts=False)
    plain = one.forward_backward(SAMPLES, return_logprobs=True)
    again = other.forward_backward(said, return_logprobs=True)
    assert again.loss_sum == plain.loss_sum
    assert_near(gradients(other), gradients(one), relative=0.0)
    for ours, theirs in zip(logprobs_of(again), logprobs_of(plain), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_one_column_of_targets_is_the_same_as_none(assets):
    flat = several(None)
    columns = [
        replace(
            s, **{n: getattr(s, n)[:, None] for n in ("targets", "mask", "advantages", "generator_logprobs")}
        )
        for s in flat
    ]
    for loss in (WEIGHTED, GRPOLoss(), PPOLoss(entropy_coef=0.1, normalization="sequence_mean")):
        one, other = make_engine(assets), make_engine(assets)
        of_flat, of_columns = (
            one.forward_backward(flat, loss=loss),
            other.forward_backward(columns, loss=loss),
        )
        numbers = [
            {n: v for n, v in dataclasses.asdict(r).items() if isinstance(v, float) and n != "time_s"}
            for r in (of_flat, of_columns)
        ]
        assert numbers[1] == pytest.approx(numbers[0], rel=1e-5, abs=1e-6)
        assert_near(gradients(other), gradients(one))


def test_entropy_of_a_token_counts_for_each_of_its_targets(assets):
    engine = make_engine(assets)
    samples = several(2)
    model = plain_model(engine)
    total, count = torch.zeros(()), 0
    for sample in samples:
        logprobs_TV = plain_logprobs(model, sample)
        entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
        mask_TK = torch.from_numpy(sample.mask[1:])
        total = total + (entropy_T.unsqueeze(1) * mask_TK).sum()
        count += int(mask_TK.sum())
    (-0.5 * total).backward()
    without = make_engine(assets)
    loss = PPOLoss(normalization="none")
    result = engine.forward_backward(samples, loss=replace(loss, entropy_coef=0.5))
    without.forward_backward(samples, loss=loss)
    assert result.entropy_mean == pytest.approx(total.item() / count, rel=1e-5)
    difference = {n: g - gradients(without)[n] for n, g in gradients(engine).items()}
    assert_near(difference, {n: p.grad for n, p in model.named_parameters()}, relative=1e-3)


GROUP = [make_sample(length=18, seed=seed, prompt_seed=1) for seed in range(4)]


def test_prompts_are_shared_unless_targets_are_given_or_the_ratio_counts_them(assets):
    def num_rows(samples):
        engine = make_engine(assets, max_tokens_per_microbatch=200)
        return sum(batch.input_ids.numel() for batch in engine.policy.pack(samples))

    assert num_rows(GROUP) == 5 + 4 * 12
    assert num_rows([replace(s, targets=s.token_ids) for s in GROUP]) == 4 * 17
    # Of the prompt's six tokens the ratio counts the last two: three inputs have targets that nothing counts.
    counted = [replace(s, ratio_mask=np.arange(18) >= 4) for s in GROUP]
    assert num_rows(counted) == 3 + 4 * 14


def test_a_sequences_ratio_is_over_its_ratio_mask_however_it_is_packed(assets):
    samples = [
        replace(s, ratio_mask=np.random.default_rng(i).random(len(s.token_ids)) < 0.5)
        for i, s in enumerate(SAMPLES)
    ]
    loss = GSPOLoss(clip_low=1.0, clip_high=1e9)
    engine, packed = make_engine(assets, max_tokens_per_microbatch=18), make_engine(assets)
    result, other = engine.forward_backward(samples, loss=loss), packed.forward_backward(samples, loss=loss)
    assert packing_of(result).num_micro_batches != packing_of(other).num_micro_batches
    assert_near(gradients(packed), gradients(engine))
    ratios = []
    for sample, logprobs in zip(samples, engine.compute_logprobs(samples), strict=True):
        q = sample.generator_logprobs
        counted = sample.ratio_mask & np.isfinite(q)
        counted[0] = False
        mean = (logprobs - q)[counted].mean() if counted.any() else 0.0
        ratios += [math.exp(mean)] * int((sample.mask & np.isfinite(q)).sum())
    assert result.ratio_mean == pytest.approx(np.mean(ratios), rel=1e-4)
    plain = make_engine(assets).forward_backward(SAMPLES, loss=loss)
    assert plain.ratio_mean != pytest.approx(result.ratio_mean, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"targets": None}, "targets must be there in all samples or in none: sample 1 has none"),
        ({"targets": np.zeros((6, 3), dtype=np.int64)}, r"sample 1: targets has shape \[6, 3\], that of"),
        ({"targets": np.zeros(6, dtype=np.int64)}, r"sample 1: targets has shape \[6\], that of sample 0"),
        ({"targets": np.zeros((6, 0), dtype=np.int64)}, r"sample 1: targets is int64 of shape \[6, 0\]"),
        ({"targets": np.zeros((6, 2))}, r"sample 1: targets is float64 of shape \[6, 2\]: must be whole"),
        ({"targets": np.zeros((5, 2), dtype=np.int64)}, "sample 1: targets has 5 entries for 6 tokens"),
        ({"targets": np.full((6, 2), VOCAB)}, "sample 1: targets has 320: must be token ids of 0 to 319"),
        ({"targets": np.full((6, 2), -1)}, "sample 1: targets has -1: must be token ids of 0 to 319"),
        ({"mask": np.ones(6, dtype=bool)}, r"sample 1: mask has shape \[6\]: must be \[6, 2\]"),
        ({"advantages": np.ones((6, 3))}, r"sample 1: advantages has shape \[6, 3\]: must be \[6, 2\]"),
        ({"ratio_mask": np.ones(6, dtype=bool)}, "ratio_mask must be there in all samples or in none"),
    ],
)
def test_targets_that_do_not_fit_are_refused_and_the_gradient_stays(assets, change, says):
    engine = make_engine(assets)
    samples = [with_targets(make_sample(length=n, seed=n), k=2) for n in (5, 6)]
    engine.forward_backward(samples, loss=WEIGHTED)
    with pytest.raises(ValueError, match=says):
        engine.forward_backward([samples[0], replace(samples[1], **change)], loss=WEIGHTED)
    assert engine.optim_step().grad_norm > 0.0


def test_several_targets_have_no_sequence_ratio_and_need_targets(assets):
    engine = make_engine(assets)
    sample = with_targets(make_sample(length=6, seed=1), k=2)
    with pytest.raises(ValueError, match=r"sample 0: ratio_mask must be None with targets of shape \[6, 2\]"):
        engine.forward([replace(sample, ratio_mask=np.ones(6, dtype=bool))])
    with pytest.raises(ValueError, match=r"sample 0: mask has shape \[6, 2\]: must be \[6\]"):
        engine.forward([replace(sample, targets=None)])


def test_samples_of_one_step_with_other_targets_are_written_and_read(tmp_path):
    plain = make_sample(length=5, seed=1)
    samples = [
        with_targets(make_sample(length=6, seed=2), k=3),
        with_targets(make_sample(length=4, seed=3)),
        plain,
    ]
    write_batch(tmp_path / "batch.npz", samples)
    samples[2] = replace(plain, targets=plain.token_ids)  # which it is without
    for read, written in zip(read_batch(tmp_path / "batch.npz"), samples, strict=True):
        for field in dataclasses.fields(written):
            np.testing.assert_array_equal(getattr(read, field.name), getattr(written, field.name))


class PutNaN:
    def __call__(self, inputs):
        return LossOutput(
            loss_sum=inputs.logprobs.sum() * math.nan, denominator=None, num_tokens=inputs.mask.sum()
        )


def test_a_loss_that_is_not_finite_leaves_all_samples_of_the_step(assets, tmp_path):
    engine = make_engine(assets, failure_folder=str(tmp_path))
    one, several_of_one = several(None)[:2], several(2)[2:4]
    engine.forward_backward(one, loss=WEIGHTED)
    with pytest.raises(NonFiniteLossError):
        engine.forward_backward(several_of_one, loss=PutNaN())
    read = read_batch(tmp_path / "nan_batch_version_0.npz")
    assert [s.mask.shape[1:] for s in read] == [(), (), (2,), (2,)]


def of_rank(layout, assets, k):
    """Result and gradients of one rank, whose samples are not all of them."""
    from tests.training.layouts import whole_gradients

    engine = make_engine(assets, parallelism=layout)
    result = engine.forward_backward(several(k), loss=WEIGHTED, return_logprobs=True)
    gradients = whole_gradients(engine)
    measured = engine.forward(several(k), loss=WEIGHTED)
    engine.drop_gradient()
    empty = engine.optim_step(allow_empty=True)
    engine.close()
    return result, gradients, measured, empty


LAYOUTS = {
    "fsdp2": ParallelismConfig(data_parallel_shard_degree=2),
    "ddp2": ParallelismConfig(data_parallel_replicate_degree=2),
    "tp2": ParallelismConfig(tensor_parallel_degree=2),
    "tp2 gathered": ParallelismConfig(tensor_parallel_degree=2, loss_parallel=False),
    "cp2": ParallelismConfig(context_parallel_degree=2),
}


@pytest.mark.medium
@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_return_the_logprobs_of_one_in_order(assets, layout, k):
    one, expected, _, step = of_rank(ParallelismConfig(), assets, k)
    for result, found, measured, empty in run_ranks(of_rank, 2, LAYOUTS[layout], assets, k, timeout_s=100):
        assert result.loss_sum == pytest.approx(one.loss_sum, rel=1e-5)
        assert measured.loss_sum == pytest.approx(one.loss_sum, rel=1e-5)
        assert empty.grad_norm == step.grad_norm == 0.0
        for name, gradient in expected.items():
            difference = np.linalg.norm(found[name] - gradient)
            assert difference <= 1e-5 * np.linalg.norm(gradient), name
        for logprobs, again, theirs in zip(
            logprobs_of(result), logprobs_of(measured), logprobs_of(one), strict=True
        ):
            assert logprobs.shape == theirs.shape
            np.testing.assert_allclose(logprobs, theirs, atol=1e-5)
            np.testing.assert_allclose(again, theirs, atol=1e-5)
