import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from losses.correction import ImportanceCorrection
from losses.cross_entropy import CrossEntropyLoss
from losses.grpo import GRPOLoss
from losses.types import LossOutput
from rl.distributed.compile import CompileConfig
from rl.distributed.mesh import ParallelismConfig
from rl.models.attention import SequenceLayout
from rl.models.qwen3.model import linear_head
from rl.observability.spans import read_spans
from rl.training.errors import NonFiniteLossError
from rl.training.failures import read_batch
from rl.types import OptimParams, Packing
from tests.support.kept_spans import kept_spans
from tests.training.moe_layouts import moe_spec
from tests.training.parts import (
    engine_config,
    make_engine,
    make_sample,
    make_samples,
    small_spec,
    write_assets,
)

SAMPLES = make_samples()


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return write_assets(tmp_path_factory.mktemp("assets") / "model")


def gradients(engine):
    return {name: p.grad.clone() for name, p in engine.policy.parameters.items()}


def weights(engine):
    return {name: p.detach().clone() for name, p in engine.policy.parameters.items()}


def assert_near(actual, expected, *, relative=1e-5):
    """Each tensor by the norm of the difference."""
    for name, tensor in expected.items():
        assert (actual[name] - tensor).norm() <= relative * tensor.norm(), name


def bare_model(engine):
    model = small_spec().model.build()
    model.load_state_dict(weights(engine), strict=True)
    return model


def bare_logprobs(model, sample):
    """[T - 1] of the targets and [T - 1, V] of all tokens, one sample alone in the plainest way."""
    ids = torch.from_numpy(sample.token_ids).long()
    length = len(ids) - 1
    logits = model(
        ids[:-1],
        positions=torch.arange(length),
        sequences=SequenceLayout.from_lengths([length]),
        head=linear_head,
    )
    logprobs_TV = (logits / sample.temperature).log_softmax(-1)
    return logprobs_TV[torch.arange(length), ids[1:]], logprobs_TV


@dataclasses.dataclass(kw_only=True)
class Naive:
    """What a loop over samples and tokens makes of them, for GRPO with bounds of 0.2."""

    gradients: dict
    loss_sum: float = 0.0
    ratios: list = dataclasses.field(default_factory=list)
    clipped: int = 0
    entropies: list = dataclasses.field(default_factory=list)
    differences: list = dataclasses.field(default_factory=list)


def naive(engine, samples):
    model = bare_model(engine)
    result = Naive(gradients={})
    for sample in samples:
        logprobs_T, logprobs_TV = bare_logprobs(model, sample)
        loss = torch.zeros(())
        for t, p in enumerate(logprobs_T):
            if sample.mask[t + 1]:
                result.entropies.append(-(logprobs_TV[t].exp() * logprobs_TV[t]).sum().item())
            q = float(sample.generator_logprobs[t + 1])
            if not sample.mask[t + 1] or math.isnan(q):
                continue
            advantage = float(sample.advantages[t + 1])
            ratio = (p - q).exp()
            plain, clipped = ratio * advantage, ratio.clamp(0.8, 1.2) * advantage
            loss = loss - torch.minimum(plain, clipped)
            result.ratios.append(ratio.item())
            result.clipped += int(clipped < plain)
            result.differences.append(abs(p.item() - q))
        result.loss_sum += loss.item()
        if loss.requires_grad:
            loss.backward()
    result.gradients = {name: p.grad for name, p in model.named_parameters()}
    return result


def test_gradient_is_that_of_a_loop_over_single_samples(assets):
    engine = make_engine(assets)
    engine.forward_backward(SAMPLES)
    assert_near(gradients(engine), naive(engine, SAMPLES).gradients)


def test_result_is_what_the_loop_counts(assets):
    engine = make_engine(assets)
    expected = naive(engine, SAMPLES)
    result = engine.forward_backward(SAMPLES)
    num_valid = len(expected.ratios)
    advantages = np.concatenate([s.advantages[s.mask] for s in SAMPLES]).astype(np.float64)
    assert result.loss_sum == pytest.approx(expected.loss_sum, abs=1e-4)
    assert result.denominator == num_valid
    assert result.num_valid_tokens == num_valid
    assert result.loss_mean == pytest.approx(expected.loss_sum / num_valid, abs=1e-6)
    assert result.num_samples == 13
    assert result.num_tokens == sum(len(s.token_ids) - 1 for s in SAMPLES)
    assert result.ratio_mean == pytest.approx(np.mean(expected.ratios), rel=1e-5)
    assert result.clipped_fraction == pytest.approx(expected.clipped / num_valid)
    assert result.entropy_mean == pytest.approx(np.mean(expected.entropies), rel=1e-5)
    assert result.logprob_diff_mean == pytest.approx(np.mean(expected.differences), rel=1e-4)
    assert result.logprob_diff_max == pytest.approx(np.max(expected.differences), rel=1e-4)
    assert result.advantage_mean == pytest.approx(advantages.mean())
    assert result.advantage_std == pytest.approx(advantages.std())
    assert not result.logprobs_identical
    assert result.time_s > 0


def test_result_says_how_full_the_micro_batches_were():
    samples = [make_sample(length=n, seed=n, prompt_seed=9) for n in (13, 13, 13, 25)]  # 36 + 24 inputs
    apart = make_engine(None, share_prompts=False, max_tokens_per_microbatch=40).forward_backward(samples)
    sums = [n * (n + 1) // 2 for n in (12, 12, 12, 24)]  # causal: input i sees i tokens
    assert apart.packing == Packing(
        num_micro_batches=2, num_packed=60, num_padding=0, num_room=80, num_attended=sum(sums)
    )
    # The three of 13 tokens have a prompt of 4 in common, of which 3 inputs have no trained target.
    shared = make_engine(None, share_prompts=True, max_tokens_per_microbatch=40).forward_backward(samples)
    assert shared.packing == Packing(
        num_micro_batches=2,
        num_packed=54,
        num_padding=0,
        num_room=80,
        num_attended=sum(sums) - 2 * (1 + 2 + 3),
    )
    assert shared.num_tokens == 60


def test_packing_is_an_activity_of_its_own(tmp_path):
    engine = make_engine(None)
    with kept_spans(tmp_path):
        engine.forward_backward(SAMPLES)
        engine.compute_logprobs(SAMPLES)
    assert [(span.name, span.kind) for span in read_spans(tmp_path)] == [("pack", "pack")] * 2


def test_packing_changes_nothing(assets):
    packed = make_engine(assets, max_tokens_per_microbatch=500)
    alone = make_engine(assets, max_tokens_per_microbatch=max(len(s.token_ids) for s in SAMPLES) - 1)
    assert len(packed.policy.pack(SAMPLES)) == 1
    assert len(alone.policy.pack(SAMPLES)) > 6
    a, b = packed.forward_backward(SAMPLES), alone.forward_backward(SAMPLES)
    assert_near(gradients(packed), gradients(alone))
    assert a.denominator == b.denominator
    assert a.entropy_mean == pytest.approx(b.entropy_mean, rel=1e-6)


def test_chunked_logits_change_nothing(assets):
    whole, chunked = make_engine(assets), make_engine(assets, logits_chunk_tokens=7)
    whole.forward_backward(SAMPLES)
    chunked.forward_backward(SAMPLES)
    assert_near(gradients(chunked), gradients(whole))


def test_calls_on_parts_equal_one_call(assets):
    once, parts = make_engine(assets), make_engine(assets)
    whole = once.forward_backward(SAMPLES)
    results = [parts.forward_backward(part) for part in (SAMPLES[:2], SAMPLES[2:9], SAMPLES[9:])]
    assert_near(gradients(parts), gradients(once))
    assert sum(r.denominator for r in results) == whole.denominator
    assert parts.optim_step().grad_norm == pytest.approx(once.optim_step().grad_norm, rel=1e-5)
    assert_near(weights(parts), weights(once))


def test_step_divides_by_the_denominator_then_clips_then_steps(assets):
    engine = make_engine(assets)
    model = bare_model(engine)
    num_valid = engine.forward_backward(SAMPLES).denominator
    mean = {name: grad / num_valid for name, grad in gradients(engine).items()}
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in mean.values()))
    assert norm > 0.5  # the config's max_norm, or this clips nothing
    result = engine.optim_step()

    for name, parameter in model.named_parameters():
        parameter.grad = mean[name] * (0.5 / norm)
    torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-2, weight_decay=0.1, foreach=False
    ).step()
    assert result.grad_norm == pytest.approx(norm, rel=1e-6)
    assert result.lr == 1e-2
    assert result.policy_version == engine.policy_version == 1
    assert_near(weights(engine), dict(model.named_parameters()), relative=1e-6)
    assert all(p.grad is None for p in engine.policy.parameters.values())


def test_infinite_max_norm_measures_and_does_not_clip(assets):
    a, b = make_engine(assets, max_norm=math.inf), make_engine(assets)
    for engine in (a, b):
        engine.forward_backward(SAMPLES)
    assert a.optim_step().grad_norm == b.optim_step(OptimParams(max_norm=math.inf)).grad_norm
    assert_near(weights(b), weights(a), relative=0.0)


@pytest.mark.parametrize("implementation", ["foreach", "for-loop"])
def test_optimizer_implementations_agree(assets, implementation):
    config = engine_config()
    config.optimizer.implementation = implementation
    other = config.build(model_spec=small_spec(), hf_assets_path=assets, device="cpu")
    fused = make_engine(assets)
    for engine in (other, fused):
        for _ in range(2):
            engine.forward_backward(SAMPLES)
            engine.optim_step()
    assert_near(weights(other), weights(fused), relative=1e-6)


class Sum:
    """The plain sum of logprobs: asks for no division."""

    def __call__(self, inputs):
        return LossOutput(
            loss_sum=-torch.where(inputs.mask, inputs.logprobs, 0.0).sum(),
            denominator=None,
            num_tokens=inputs.mask.sum(),
        )


def test_loss_without_denominator_is_not_divided(assets):
    plain, divided = make_engine(assets), make_engine(assets)
    result = plain.forward_backward(SAMPLES, loss=Sum())
    mean = divided.forward_backward(SAMPLES, loss=CrossEntropyLoss())
    assert result.denominator == 0
    assert result.loss_mean == result.loss_sum == mean.loss_sum
    ratio = plain.optim_step().grad_norm / divided.optim_step().grad_norm
    assert ratio == pytest.approx(mean.denominator)


@pytest.mark.parametrize("losses", [(Sum(), GRPOLoss()), (GRPOLoss(), Sum())])
def test_mixing_losses_with_and_without_denominator_is_an_error(assets, losses):
    engine = make_engine(assets)
    engine.forward_backward(SAMPLES, loss=losses[0])
    with pytest.raises(ValueError, match="denominator"):
        engine.forward_backward(SAMPLES, loss=losses[1])
    with pytest.raises(ValueError, match="without an accumulated gradient"):
        engine.optim_step()


def test_supervised_loss_reports_no_comparison_with_a_generator(assets):
    sample = make_sample(length=8, seed=1)
    nothing_drawn = dataclasses.replace(sample, generator_logprobs=np.full(8, np.nan, np.float32))
    result = make_engine(assets).forward_backward([nothing_drawn], loss=CrossEntropyLoss())
    assert result.num_valid_tokens == 6
    assert (result.ratio_mean, result.clipped_fraction) == (1.0, 0.0)
    assert (result.logprob_diff_mean, result.logprob_diff_max) == (0.0, 0.0)
    assert not result.logprobs_identical


def test_equal_logprobs_are_identical_with_ratio_one(assets):
    engine = make_engine(assets)
    own = engine.compute_logprobs(SAMPLES)
    on_policy = [dataclasses.replace(s, generator_logprobs=q) for s, q in zip(SAMPLES, own, strict=True)]
    result = engine.forward_backward(on_policy)
    assert result.logprobs_identical
    assert (result.ratio_mean, result.logprob_diff_max, result.clipped_fraction) == (1.0, 0.0, 0.0)


GROUP = [make_sample(length=18, seed=seed, prompt_seed=1) for seed in range(8)]
"""Prompts of six tokens, of which five are shared."""


def num_rows(engine, samples=GROUP):
    return sum(batch.input_ids.numel() for batch in engine.policy.pack(samples))


@pytest.mark.parametrize("loss", [GRPOLoss(), GRPOLoss(correction=ImportanceCorrection(level="sequence"))])
def test_a_prompt_that_samples_share_changes_no_number(assets, loss):
    shared, apart = (
        make_engine(assets, max_tokens_per_microbatch=200, share_prompts=share) for share in (True, False)
    )
    assert (num_rows(shared), num_rows(apart)) == (5 + 8 * 12, 8 * 17)
    results = [engine.forward_backward(GROUP, loss=loss) for engine in (shared, apart)]
    measured = [
        dataclasses.asdict(dataclasses.replace(r, time_s=0.0, expert_load=None, packing=None))
        for r in results
    ]
    metrics = [values.pop("loss_metrics") for values in measured]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5, abs=1e-6)
    numbers = [{k: v for k, v in values.items() if v is not None} for values in measured]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5, abs=1e-6)
    assert_near(gradients(shared), gradients(apart))
    of_shared, of_apart = (np.concatenate(engine.compute_logprobs(GROUP)) for engine in (shared, apart))
    np.testing.assert_allclose(of_shared, of_apart, atol=2e-6)


def test_demonstrations_are_not_shared_where_that_would_change_a_number_or_compile_again(assets):
    compiled = engine_config(max_tokens_per_microbatch=200)
    compiled.compile = CompileConfig(enable=True, backend="eager")
    mixture = engine_config(max_tokens_per_microbatch=200)
    for config, spec in ((compiled, small_spec()), (mixture, moe_spec())):
        engine = config.build(model_spec=spec, hf_assets_path=None, device="cpu")
        assert num_rows(engine) == 8 * 17
    trained_on_prompts = [dataclasses.replace(s, mask=np.ones_like(s.mask)) for s in GROUP]
    engine = make_engine(assets, max_tokens_per_microbatch=200)
    assert num_rows(engine, trained_on_prompts) == 8 * 17


def test_step_without_gradient_is_an_error(assets):
    engine = make_engine(assets)
    with pytest.raises(ValueError, match="without an accumulated gradient"):
        engine.optim_step()
    engine.forward_backward(SAMPLES)
    engine.optim_step()
    with pytest.raises(ValueError, match="without an accumulated gradient"):
        engine.optim_step()


def test_step_without_a_valid_token_is_an_error(assets):
    engine = make_engine(assets)
    sample = make_sample(length=5, seed=1)
    engine.forward_backward([dataclasses.replace(sample, mask=np.zeros(5, dtype=bool))])
    with pytest.raises(ValueError, match="no sample had a valid token"):
        engine.optim_step()


def test_no_samples_is_an_error(assets):
    with pytest.raises(ValueError, match="no samples"):
        make_engine(assets).forward_backward([])


def test_logprobs_are_those_of_single_samples(assets):
    engine = make_engine(assets)
    model = bare_model(engine)
    for sample, logprobs in zip(SAMPLES, engine.compute_logprobs(SAMPLES), strict=True):
        expected, _ = bare_logprobs(model, sample)
        assert logprobs.dtype == np.float32
        assert logprobs[0] == 0.0
        np.testing.assert_allclose(logprobs[1:], expected.detach().numpy(), rtol=1e-5, atol=1e-5)
    assert engine.compute_logprobs([]) == []


def test_params_replace_settings_for_one_step(assets):
    engine = make_engine(assets)
    engine.forward_backward(SAMPLES)
    before = weights(engine)
    assert engine.optim_step(OptimParams(lr=0.0)).lr == 0.0
    assert_near(weights(engine), before, relative=0.0)
    engine.forward_backward(SAMPLES)
    assert engine.optim_step().lr == 1e-2


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


def test_schedule_sets_the_learning_rate_of_each_step(assets):
    config = engine_config()
    config.lr_scheduler.warmup_steps = 4
    engine = config.build(model_spec=small_spec(), hf_assets_path=assets, device="cpu")
    rates = []
    for _ in range(5):
        engine.forward_backward(SAMPLES[:1])
        rates.append(engine.optim_step().lr)
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])


def test_loss_that_is_not_finite_stops_with_its_batch_saved(assets, tmp_path):
    engine = make_engine(assets, failure_folder=str(tmp_path / "failures"))
    engine.forward_backward(SAMPLES[:3])
    engine.optim_step()
    broken = dataclasses.replace(SAMPLES[4], advantages=np.full_like(SAMPLES[4].advantages, np.nan))
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


class InfiniteSlope:
    """A loss of 0 whose gradient is not finite."""

    def __call__(self, inputs):
        return LossOutput(
            loss_sum=(inputs.logprobs * 0.0).abs().sqrt().sum(),
            denominator=None,
            num_tokens=inputs.mask.sum(),
        )


def test_gradient_that_is_not_finite_stops_before_the_step(assets):
    engine = make_engine(assets)
    before = weights(engine)
    engine.forward_backward(SAMPLES, loss=InfiniteSlope())
    with pytest.raises(NonFiniteLossError, match="gradient norm nan at policy version 0") as caught:
        engine.optim_step()
    assert caught.value.batch_file is None
    assert engine.policy_version == 0
    assert_near(weights(engine), before, relative=0.0)


def test_error_survives_the_way_between_processes():
    error = pickle.loads(pickle.dumps(NonFiniteLossError("loss nan", 3, "a.npz")))
    assert (error.what, error.policy_version, error.batch_file) == ("loss nan", 3, "a.npz")
    assert str(error) == "loss nan at policy version 3; the batch is in a.npz"


def test_half_precision_computes_in_bfloat16_and_keeps_float32_gradients(assets):
    half, full = make_engine(assets, param_dtype="bfloat16"), make_engine(assets)
    for engine in (half, full):
        engine.forward_backward(SAMPLES, loss=CrossEntropyLoss())
    assert {g.dtype for g in gradients(half).values()} == {torch.float32}
    assert_near(gradients(half), gradients(full), relative=0.1)
    with pytest.raises(AssertionError):  # or nothing was computed in bfloat16
        assert_near(gradients(half), gradients(full), relative=1e-4)


def test_weights_without_assets_are_drawn_from_the_seed():
    a, b, c = make_engine(None, seed=5), make_engine(None, seed=5), make_engine(None, seed=6)
    assert_near(weights(a), weights(b), relative=0.0)
    name = "layers.0.attention.qkv_proj.weight"
    assert (weights(a)[name] - weights(c)[name]).norm() > 0.1


def test_state_dict_is_the_parameters_themselves(assets):
    engine = make_engine(assets)
    state = engine.model_state_dict()
    assert list(state) == [name for name, _ in bare_model(engine).named_parameters()]
    assert all(not tensor.requires_grad for tensor in state.values())
    engine.forward_backward(SAMPLES)
    engine.optim_step()
    assert_near(state, weights(engine), relative=0.0)


def test_single_process_makes_no_process_group(assets):
    make_engine(assets)
    assert not dist.is_initialized()


def test_offloaded_parameters_and_their_gradients_stay_on_the_host(assets):
    engine = make_engine(assets, cpu_offload=True)
    try:
        units = [module for module in engine.policy.model.modules() if isinstance(module, FSDPModule)]
        assert len(units) == 3  # two blocks, and the rest
        for unit in units:
            group = unit._get_fsdp_state()._fsdp_param_group
            assert group is not None
            assert isinstance(group.offload_policy, CPUOffloadPolicy)
            assert not group.offload_policy.pin_memory  # there is no GPU to copy to
        engine.forward_backward(SAMPLES)
        plain = make_engine(assets)
        plain.forward_backward(SAMPLES)
        assert engine.optim_step().grad_norm == plain.optim_step().grad_norm
        whole = {name: p.full_tensor() for name, p in weights(engine).items()}
        assert_near(whole, weights(plain), relative=0.0)
    finally:
        engine.close()
    assert not dist.is_initialized()


def test_degrees_beyond_the_world_are_refused_before_anything_starts(assets):
    with pytest.raises(ValueError, match="world size of 1 process"):
        make_engine(assets, parallelism=ParallelismConfig(data_parallel_shard_degree=2))


def test_deterministic_kernels_are_enough(assets):
    try:
        engine = make_engine(assets, deterministic=True)
        engine.forward_backward(SAMPLES)
        engine.optim_step()
    finally:
        torch.use_deterministic_algorithms(False)
