import dataclasses
import itertools
import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from losses.correction import ImportanceCorrection
from losses.cross_entropy import CrossEntropyLoss
from losses.policy import DrGRPOLoss, GRPOLoss, RLOOLoss
from losses.types import LossOutput
from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.distributed.compile import CompileConfig
from rl.trainer_types import OptimParams, Packing
from rl.training.device_memory import DeviceMemoryError
from rl.training.failures import NonFiniteLossError, read_batch
from tests.training.parts import (
    assert_near,
    built,
    engine_config,
    gradients,
    logprobs_of,
    make_engine,
    make_sample,
    make_samples,
    moe_spec,
    plain_logprobs,
    plain_model,
    weights,
    windowed_spec,
)

SAMPLES = make_samples()


def naive(engine, samples):
    """Return numbers of each token, and gradients, of GRPO with bounds of 0.2, one sample after
    another.
    """
    model = plain_model(engine)
    found: dict[str, list] = {
        name: [] for name in ("loss", "ratio", "clipped", "entropy", "difference")
    }
    for sample in samples:
        logprobs_TV = plain_logprobs(model, sample)
        mask, q, advantages = (
            torch.from_numpy(values[1:])
            for values in (sample.mask, sample.generator_logprobs, sample.advantages)
        )
        valid = mask & q.isfinite()
        p = logprobs_TV[range(len(q)), sample.token_ids[1:]][valid]
        q, advantages = q[valid], advantages[valid]
        ratio = (p - q).exp()
        plain, clipped = ratio * advantages, ratio.clamp(0.8, 1.2) * advantages
        loss = -torch.minimum(plain, clipped)
        loss.sum().backward()
        found["loss"] += loss.tolist()
        found["ratio"] += ratio.tolist()
        found["clipped"] += (clipped < plain).tolist()
        found["entropy"] += (-(logprobs_TV.exp() * logprobs_TV).sum(1)[mask]).tolist()
        found["difference"] += (p - q).abs().tolist()
    return found, {name: p.grad for name, p in model.named_parameters()}


def test_result_and_gradient_equal_a_loop_over_single_samples(assets):
    engine = make_engine(assets)
    expected, expected_gradients = naive(engine, SAMPLES)
    result = engine.forward_backward(SAMPLES)
    num_valid = len(expected["loss"])
    assert result.loss_sum == pytest.approx(sum(expected["loss"]), abs=1e-4)
    assert result.denominator == result.num_valid_tokens == num_valid
    assert result.loss_mean == pytest.approx(np.mean(expected["loss"]), abs=1e-6)
    assert result.num_samples == 13
    assert result.num_tokens == sum(len(s.token_ids) - 1 for s in SAMPLES)
    assert result.ratio_mean == pytest.approx(np.mean(expected["ratio"]), rel=1e-5)
    assert result.clipped_fraction == pytest.approx(np.mean(expected["clipped"]))
    assert result.entropy_mean == pytest.approx(np.mean(expected["entropy"]), rel=1e-5)
    assert result.logprob_diff_mean == pytest.approx(np.mean(expected["difference"]), rel=1e-4)
    assert result.logprob_diff_max == pytest.approx(np.max(expected["difference"]), rel=1e-4)
    assert not result.logprobs_identical
    assert_near(gradients(engine), expected_gradients)


def test_result_reports_the_fill_of_the_micro_batches():
    samples = [
        make_sample(length=n, seed=n, prompt_seed=9) for n in (13, 13, 13, 25)
    ]  # 36 + 24 inputs
    apart = make_engine(None, share_prompts=False, max_tokens_per_microbatch=40).forward_backward(
        samples
    )
    sums = [n * (n + 1) // 2 for n in (12, 12, 12, 24)]  # causal: input i sees i tokens
    assert apart.packing == Packing(
        num_micro_batches=2, num_packed=60, num_padding=0, num_room=80, num_attended=sum(sums)
    )
    # The three samples of 13 tokens share a prompt of 4, of which 3 inputs have no trained target.
    shared = make_engine(None, share_prompts=True, max_tokens_per_microbatch=40).forward_backward(
        samples
    )
    assert shared.packing == replace(
        apart.packing, num_packed=54, num_attended=sum(sums) - 2 * (1 + 2 + 3)
    )
    assert shared.num_tokens == 60


@pytest.mark.parametrize("implementation", ["foreach", "for-loop"])
def test_optimizer_implementations_agree(assets, implementation):
    config = engine_config()
    config.optimizer.implementation = implementation
    other, fused = built(config, assets), make_engine(assets)
    for engine in (other, fused):
        for _ in range(2):
            engine.forward_backward(SAMPLES)
            engine.optim_step()
    assert_near(weights(other), weights(fused), relative=1e-6)


PLAIN_SUM = CrossEntropyLoss(normalization="none")
"""Loss without a denominator."""
NUM_VALID = sum(int((s.mask & np.isfinite(s.generator_logprobs)).sum()) for s in SAMPLES)
NORMALIZED = {
    "token_mean": (GRPOLoss(), NUM_VALID),
    "sequence_mean": (GRPOLoss(normalization="sequence_mean"), 13),
    "constant": (DrGRPOLoss(tokens_per_sequence=20), 260),
    "none": (GRPOLoss(normalization="none"), 0),
    "of sequences": (RLOOLoss(clip_low=1.0, clip_high=50.0), 13),
    "supervised": (CrossEntropyLoss(normalization="sequence_mean"), 13),
}


@pytest.mark.parametrize("name", NORMALIZED)
def test_split_calls_equal_one_call_under_every_normalization(assets, name):
    loss, denominator = NORMALIZED[name]
    whole = make_engine(assets)
    expected, expected_gradients = whole.forward_backward(SAMPLES, loss=loss), gradients(whole)
    norm = whole.optim_step().grad_norm
    size = 0.0  # of the terms: both signs nearly cancel in their sum
    for cuts in (range(14), (0, 5, 13)):
        engine = make_engine(assets)
        parts = [
            engine.forward_backward(SAMPLES[a:b], loss=loss) for a, b in itertools.pairwise(cuts)
        ]
        size = max(size, sum(abs(part.loss_sum) for part in parts))
        assert sum(part.loss_sum for part in parts) == pytest.approx(
            expected.loss_sum, abs=1e-5 * size
        )
        assert sum(part.denominator for part in parts) == expected.denominator == denominator
        assert_near(gradients(engine), expected_gradients)
        assert engine.optim_step().grad_norm == pytest.approx(norm, rel=1e-5)


COMPILED_HEAD = CompileConfig(enable=True, components=("loss",), backend="aot_eager")


@pytest.mark.parametrize(
    "settings",
    [
        {"logits_chunk_tokens": 7},
        pytest.param({"compile": COMPILED_HEAD}, marks=pytest.mark.medium),
    ],
    ids=["chunks", "compiled"],
)
def test_entropy_bonus_is_unchanged_by_chunked_logits_and_a_compiled_head(assets, settings):
    plain, other = make_engine(assets), make_engine(assets, **settings)
    sums = [
        e.forward_backward(SAMPLES, loss=GRPOLoss(entropy_coef=0.7)).loss_sum
        for e in (plain, other)
    ]
    assert sums[1] == pytest.approx(sums[0], rel=1e-5)
    assert_near(gradients(other), gradients(plain))


def test_loss_gets_the_entropy_with_its_gradient_only_on_request(assets, monkeypatch):
    seen, call = [], GRPOLoss.__call__

    def watched(loss, given):
        seen.append(given.entropy)
        return call(loss, given)

    monkeypatch.setattr(GRPOLoss, "__call__", watched)
    engine = make_engine(assets)
    engine.forward_backward(SAMPLES[:2], loss=GRPOLoss())
    assert set(seen) == {None}
    seen.clear()
    engine.forward_backward(SAMPLES[:2], loss=GRPOLoss(entropy_coef=0.1))
    assert all(entropy.requires_grad for entropy in seen)


def test_loss_without_denominator_is_not_divided(assets):
    plain, divided = make_engine(assets), make_engine(assets)
    result = plain.forward_backward(SAMPLES, loss=PLAIN_SUM)
    mean = divided.forward_backward(SAMPLES, loss=CrossEntropyLoss())
    assert result.denominator == 0
    assert result.loss_mean == result.loss_sum == mean.loss_sum
    ratio = plain.optim_step().grad_norm / divided.optim_step().grad_norm
    assert ratio == pytest.approx(mean.denominator)


def test_mixing_losses_with_and_without_denominator_is_an_error(assets):
    engine = make_engine(assets)
    engine.forward_backward(SAMPLES, loss=PLAIN_SUM)
    with pytest.raises(ValueError, match="denominator"):
        engine.forward_backward(SAMPLES, loss=GRPOLoss())
    with pytest.raises(ValueError, match="without an accumulated gradient"):
        engine.optim_step()


def test_supervised_loss_reports_no_comparison_with_a_generator(assets):
    sample = make_sample(length=8, seed=1)
    nothing_drawn = replace(sample, generator_logprobs=np.full(8, np.nan, np.float32))
    result = make_engine(assets).forward_backward([nothing_drawn], loss=CrossEntropyLoss())
    assert result.num_valid_tokens == 6
    assert (result.ratio_mean, result.clipped_fraction) == (1.0, 0.0)
    assert (result.logprob_diff_mean, result.logprob_diff_max) == (0.0, 0.0)
    assert not result.logprobs_identical


def test_equal_logprobs_are_identical_with_ratio_one(assets):
    engine = make_engine(assets)
    own = engine.compute_logprobs(SAMPLES)
    assert engine.compute_logprobs([]) == []
    on_policy = [replace(s, generator_logprobs=q) for s, q in zip(SAMPLES, own, strict=True)]
    result = engine.forward_backward(on_policy)
    assert result.logprobs_identical
    assert (result.ratio_mean, result.logprob_diff_max, result.clipped_fraction) == (1.0, 0.0, 0.0)


GROUP = [make_sample(length=18, seed=seed, prompt_seed=1) for seed in range(8)]
"""Samples whose prompts have six tokens, five of them shared."""


def num_rows(engine, samples=GROUP):
    return sum(batch.input_ids.numel() for batch in engine.policy.pack(samples))


def test_sharing_prompts_changes_no_number(windowed_assets):
    loss = GRPOLoss(correction=ImportanceCorrection(level="sequence"))
    shared, apart = (
        make_engine(
            windowed_assets,
            spec=windowed_spec(),
            max_tokens_per_microbatch=200,
            share_prompts=share,
        )
        for share in (True, False)
    )
    assert (num_rows(shared), num_rows(apart)) == (5 + 8 * 12, 8 * 17)
    results = [engine.forward_backward(GROUP, loss=loss) for engine in (shared, apart)]
    measured = [dataclasses.asdict(replace(r, packing=None)) for r in results]
    # Metrics beside the other numbers, without the fields that are None.
    of_both = [
        {k: v for k, v in (m | m.pop("loss_metrics")).items() if v is not None} for m in measured
    ]
    assert of_both[0] == pytest.approx(of_both[1], rel=1e-5, abs=1e-6)
    assert_near(gradients(shared), gradients(apart))
    of_shared, of_apart = (
        np.concatenate(engine.compute_logprobs(GROUP)) for engine in (shared, apart)
    )
    np.testing.assert_allclose(of_shared, of_apart, atol=2e-6)


def test_compiled_blocks_share_prompts_and_change_no_number(assets):
    compiled = CompileConfig(enable=True, backend="aot_eager")
    apart = make_engine(assets, max_tokens_per_microbatch=200, share_prompts=False)
    shared = make_engine(assets, max_tokens_per_microbatch=200, compile=compiled)
    assert num_rows(shared) < num_rows(apart)
    losses = [engine.forward_backward(GROUP).loss_sum for engine in (shared, apart)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5, abs=1e-5)
    assert_near(gradients(shared), gradients(apart), relative=1e-4)


def test_prompts_are_not_shared_if_trained_or_routed_to_experts():
    trained_on_prompts = [replace(s, mask=np.ones_like(s.mask)) for s in GROUP]
    for settings, samples in (
        ({"spec": moe_spec()}, GROUP),
        ({}, trained_on_prompts),
    ):
        engine = make_engine(None, max_tokens_per_microbatch=200, **settings)
        assert num_rows(engine, samples) == 8 * 17


def test_lack_of_memory_is_explained_with_the_options_that_need_less(assets, monkeypatch):
    engine = make_engine(assets, activation_checkpoint=ActivationCheckpointConfig(mode="full"))
    engine.forward_backward(SAMPLES)
    monkeypatch.setattr(
        engine.policy, "run", mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    )
    with pytest.raises(DeviceMemoryError) as raised:
        engine.forward_backward(SAMPLES)
    message = str(raised.value)
    assert message.startswith(
        "forward_backward of policy version 0: a rank of the trainer ran out of GPU memory"
    )
    assert "GB a rank at the peak (parameters" in message
    assert "lower training.max_tokens_per_microbatch=" in message
    assert "activation_checkpoint" not in message
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
    assert not gradients(engine)


def test_step_without_a_gradient_or_a_valid_token_is_refused(assets):
    engine = make_engine(assets)
    with pytest.raises(ValueError, match="there are no samples"):
        engine.forward_backward([])
    engine.forward(SAMPLES)
    assert not gradients(engine)
    with pytest.raises(ValueError, match="without an accumulated gradient"):
        engine.optim_step()
    nothing = replace(SAMPLES[3], mask=np.zeros_like(SAMPLES[3].mask))
    engine.forward_backward([nothing])
    with pytest.raises(ValueError, match="no sample had a valid token"):
        engine.optim_step()
    other = make_engine(assets)
    assert (
        engine.optim_step(allow_empty=True).grad_norm
        == other.optim_step(allow_empty=True).grad_norm
        == 0.0
    )
    assert_near(weights(engine), weights(other), relative=0.0)


def test_params_out_of_range_are_refused_and_the_gradient_is_kept(assets):
    engine = make_engine(assets)
    engine.forward_backward(SAMPLES)
    for params, message in [
        (OptimParams(lr=-1.0), "lr=-1"),
        (OptimParams(max_norm=0.0), "max_norm=0"),
        (OptimParams(betas=(0.9, 1.0)), r"betas=\(0\.9, 1\.0\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.optim_step(params)
    assert engine.optim_step().policy_version == 1


def test_loss_that_is_not_finite_stops_with_its_batch_saved(assets, tmp_path):
    engine = make_engine(assets, failure_folder=str(tmp_path / "failures"))
    engine.forward_backward(SAMPLES[:3])
    engine.optim_step()
    broken = replace(SAMPLES[4], advantages=np.full_like(SAMPLES[4].advantages, np.nan))
    engine.forward_backward(SAMPLES[:2])
    with pytest.raises(NonFiniteLossError, match="loss nan at policy version 1") as caught:
        engine.forward_backward([broken, SAMPLES[5]])

    assert caught.value.batch_file == str(tmp_path / "failures" / "nan_batch_version_1.npz")
    saved = read_batch(caught.value.batch_file)
    for sample, original in zip(saved, [*SAMPLES[:2], broken, SAMPLES[5]], strict=True):
        assert sample.temperature == original.temperature
        for name in ("token_ids", "mask", "generator_logprobs", "advantages", "policy_versions"):
            np.testing.assert_array_equal(getattr(sample, name), getattr(original, name))
    with pytest.raises(ValueError, match="without an accumulated gradient"):
        engine.optim_step()
    engine.forward_backward(SAMPLES)
    assert math.isfinite(engine.optim_step().grad_norm)


def infinite_slope(inputs):
    """Return a loss of 0 whose gradient is not finite."""
    loss_sum = (inputs.logprobs * 0.0).abs().sqrt().sum()
    return LossOutput(loss_sum=loss_sum, denominator=None, num_tokens=inputs.mask.sum())


def test_gradient_that_is_not_finite_stops_before_the_step(assets):
    engine = make_engine(assets)
    before = weights(engine)
    engine.forward_backward(SAMPLES, loss=infinite_slope)
    with pytest.raises(NonFiniteLossError, match="gradient norm nan at policy version 0") as caught:
        engine.optim_step()
    assert caught.value.batch_file is None
    assert engine.policy_version == 0
    assert_near(weights(engine), before, relative=0.0)


def test_weights_without_assets_are_drawn_from_the_seed():
    a, b, c = make_engine(None, seed=5), make_engine(None, seed=5), make_engine(None, seed=6)
    assert_near(weights(a), weights(b), relative=0.0)
    name = "layers.0.attention.qkv_proj.weight"
    assert (weights(a)[name] - weights(c)[name]).norm() > 0.1


def test_offloaded_parameters_take_the_same_steps(assets):
    engine = make_engine(assets, cpu_offload=True)
    try:
        engine.forward_backward(SAMPLES)
        plain = make_engine(assets)
        plain.forward_backward(SAMPLES)
        assert engine.optim_step().grad_norm == plain.optim_step().grad_norm
        whole = {name: p.full_tensor() for name, p in weights(engine).items()}
        assert_near(whole, weights(plain), relative=0.0)
    finally:
        engine.close()
    assert not dist.is_initialized()


def test_forward_returns_the_result_of_forward_backward_and_keeps_the_gradient(assets):
    engine, other = make_engine(assets), make_engine(assets)
    for each in (engine, other):
        each.forward_backward(SAMPLES[:4], loss=PLAIN_SUM)
    before = gradients(engine)
    loss = GRPOLoss(entropy_coef=0.1)  # another denominator than the gradient's
    measured = engine.forward(SAMPLES, loss=loss)
    assert_near(gradients(engine), before, relative=0.0)
    reference = make_engine(assets).forward_backward(SAMPLES, loss=loss, return_logprobs=True)
    assert measured == reference
    for ours, theirs in zip(logprobs_of(measured), logprobs_of(reference), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert engine.optim_step().grad_norm == other.optim_step().grad_norm


def test_dropped_gradient_does_not_reach_the_step(assets):
    engine, other = make_engine(assets), make_engine(assets)
    engine.forward_backward(SAMPLES[5:], loss=PLAIN_SUM)
    engine.drop_gradient()
    for each in (engine, other):
        each.forward_backward(SAMPLES[:5], loss=GRPOLoss())
    assert_near(gradients(engine), gradients(other), relative=0.0)
    engine.drop_gradient()
    with pytest.raises(ValueError, match="without an accumulated gradient"):
        engine.optim_step()


# Logprobs of some samples


def test_selected_logprobs_equal_those_of_all_and_change_no_bit_of_the_gradient(assets):
    places = [11, 2, 7]
    whole, some, none = (make_engine(assets) for _ in range(3))
    expected = logprobs_of(whole.forward_backward(SAMPLES, return_logprobs=True))
    with mock.patch.object(some.policy, "run", wraps=some.policy.run) as run:
        result = some.forward_backward(SAMPLES, return_logprobs=places)
    # Where no logprob is wanted, the head computes the loss's tokens alone.
    batches, only_loss_rows = (
        run.call_args.args[0],
        [*map(run.call_args.kwargs["only_loss_rows"], run.call_args.args[0])],
    )
    assert only_loss_rows == [{*places}.isdisjoint(batch.sample_indices) for batch in batches]
    assert {*only_loss_rows} == {False, True}
    for ours, place in zip(logprobs_of(result), places, strict=True):
        np.testing.assert_array_equal(ours, expected[place])
    plain = none.forward_backward(SAMPLES)
    assert plain.logprobs is None
    assert plain == result
    assert_near(gradients(some), gradients(none), relative=0.0)
    assert none.forward_backward(SAMPLES, return_logprobs=[]).logprobs is None


@pytest.mark.parametrize("places", [[0, 13], [3, 3]])
def test_invalid_sample_indices_are_refused_before_computing(assets, places):
    engine = make_engine(assets)
    with pytest.raises(
        ValueError, match=r"return_logprobs=.*: must be different .* indices from 0 to 12"
    ):
        engine.forward_backward(SAMPLES, return_logprobs=places)
    assert not gradients(engine)
