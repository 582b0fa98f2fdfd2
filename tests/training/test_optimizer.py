import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from losses.policy import GRPOLoss
from rl.trainer_types import OptimParams
from rl.training.failures import CheckpointError, NonFiniteLossError
from rl.training.muon import Muon, MuonConfig
from rl.training.optimizer import LRSchedule, Optimizer, check_total_steps
from tests.training.layouts import whole_parameters
from tests.training.parts import (
    assert_near,
    built,
    engine_config,
    gradients,
    make_engine,
    make_samples,
    plain_model,
    small_spec,
    weights,
)

SAMPLES = make_samples()
ADAMW_NAMES = ("embed_tokens.weight", "norm.weight")


def one_parameter(value, gradient):
    parameter = nn.Parameter(torch.tensor(value))
    parameter.grad = torch.tensor(gradient)
    return parameter


@pytest.mark.parametrize(
    ("name", "expected"), [("AdamW", 2.0 - 0.1 * 0.5 * 2.0 + 0.1), ("Adam", 2.0 - 0.1)]
)
def test_adamw_decays_separately_from_the_gradient_and_adam_within_it(name, expected):
    # The first step is lr times the gradient's sign: -3, and with Adam's decay -3 + 2 * 2 = 1.
    weight_decay = {"AdamW": 0.5, "Adam": 2.0}[name]
    parameter = one_parameter([2.0], [-3.0])
    config = Optimizer.Config(name=name, lr=0.1, eps=0.0, weight_decay=weight_decay)
    optimizer = config.build(parameters={"norm.weight": parameter})
    optimizer.step(optimizer.make_settings(lr=0.1))
    assert parameter.item() == pytest.approx(expected)


@pytest.mark.parametrize("shape", [(24, 10), (10, 24)])
def test_plain_matrices_step_like_pytorchs_muon(shape):
    generator = torch.Generator().manual_seed(2)
    ours = nn.Parameter(torch.randn(shape, generator=generator))
    theirs = nn.Parameter(ours.detach().clone())
    muon = Muon(
        config=MuonConfig(),
        parameters={"layers.0.attention.o_proj.weight": ours},
        adapter=None,
    )
    reference = torch.optim.Muon(
        [theirs],
        lr=0.1,
        weight_decay=0.1,
        momentum=0.9,
        nesterov=True,
        adjust_lr_fn="match_rms_adamw",
    )
    for _ in range(3):
        ours.grad = torch.randn(shape, generator=generator)
        theirs.grad = ours.grad.clone()
        muon.step(lr=0.1, weight_decay=0.1, momentum=0.9)
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def muon_engine(assets, **muon):
    config = engine_config()
    config.optimizer.name, config.optimizer.muon = "Muon", MuonConfig(**muon)
    return built(config, assets)


def train(engine, num_steps=3, params=None):
    for _ in range(num_steps):
        engine.forward_backward(make_samples())
        engine.optim_step(params)


def stepped_alone(optimizer, tensor, gradient):
    parameter = nn.Parameter(tensor.clone())
    parameter.grad = gradient
    optimizer([parameter]).step()
    return parameter.detach()


def test_matrices_of_a_fused_weight_step_alone_and_the_rest_with_adamw(assets):
    engine = muon_engine(assets)
    adapter = small_spec().adapter(small_spec().model)
    before = whole_parameters(engine)
    engine.forward_backward(make_samples())
    # Too large to clip: the step's gradient is the sum over the denominator.
    denominator = engine._gradient.denominator
    gradients = {name: p.grad / denominator for name, p in engine.policy.parameters.items()}
    engine.optim_step(OptimParams(max_norm=np.inf))

    def muon(parameters):
        return torch.optim.Muon(
            parameters, lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        )

    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-2, weight_decay=0.1)

    num_matrices = 0
    for name, after in whole_parameters(engine).items():
        is_adamw = name in ADAMW_NAMES or name.endswith("norm.weight")
        parts = [
            adapter.to_hf(name, torch.from_numpy(x))
            for x in (before[name], gradients[name].numpy())
        ]
        expected = [
            stepped_alone(adamw if is_adamw else muon, parts[0][key], parts[1][key])
            for key in parts[0]
        ]
        num_matrices += 0 if is_adamw else len(expected)
        change = torch.from_numpy(after - before[name])
        wanted = adapter.from_hf(name, expected) - torch.from_numpy(before[name])
        assert (change - wanted).norm() <= (1e-5 if is_adamw else 5e-3) * wanted.norm(), name
    assert num_matrices == 2 * 7  # q, k, v, o, gate, up and down of each layer


def test_momentum_of_one_step_is_accepted_by_muon_only(assets):
    given, configured = muon_engine(assets), muon_engine(assets, momentum=0.5)
    train(given, params=OptimParams(momentum=0.5))
    train(configured)
    for name, tensor in whole_parameters(given).items():
        np.testing.assert_array_equal(tensor, whole_parameters(configured)[name])
    given.forward_backward(make_samples())
    with pytest.raises(ValueError, match=r"momentum=1\.5"):
        given.optim_step(OptimParams(momentum=1.5))
    adam = make_engine(assets)
    adam.forward_backward(make_samples())
    with pytest.raises(
        ValueError, match=r"momentum=0\.5: is Muon's; optimizer\.name='AdamW' has betas"
    ):
        adam.optim_step(OptimParams(momentum=0.5))


@pytest.mark.parametrize(
    "params",
    [{"lr": 3e-3, "weight_decay": 5.0}, {"betas": (0.5, 0.95), "eps": 0.3}, {"max_norm": 0.05}],
)
def test_step_divides_clips_and_takes_the_settings_of_this_step(assets, params):
    engine = make_engine(assets)
    model = plain_model(engine)
    configured: dict[str, Any] = {
        "lr": 1e-2,
        "betas": (0.9, 0.95),
        "eps": 1e-2,
        "weight_decay": 0.1,
    }
    reference = torch.optim.AdamW(model.parameters(), **configured, foreach=False)
    nothing: dict[str, Any] = {}
    for version, given in enumerate((nothing, params, nothing)):
        num_tokens = engine.forward_backward(SAMPLES).num_valid_tokens
        mean = {name: gradient / num_tokens for name, gradient in gradients(engine).items()}
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in mean.values()))
        settings = configured | given
        max_norm = settings.pop("max_norm", 0.5)
        assert norm > max_norm  # so that the step clips
        result = engine.optim_step(OptimParams(**given))
        for name, parameter in model.named_parameters():
            parameter.grad = mean[name] * (max_norm / norm)
        reference.param_groups[0].update(settings)
        reference.step()
        assert result.grad_norm == pytest.approx(norm, rel=1e-6)
        assert (result.lr, result.policy_version) == (settings["lr"], version + 1)
        assert_near(weights(engine), dict(model.named_parameters()), relative=1e-6)
        assert all(p.grad is None for p in engine.policy.parameters.values())


def early_engine(assets, *, early, **settings):
    """Return an engine whose parameters are perhaps stepped in the backward, and its numbers of
    live gradients.
    """
    config = engine_config(loss=GRPOLoss(normalization="none"), max_norm=math.inf, **settings)
    config.optimizer.early_step_in_backward = early
    engine, alive = built(config, assets), []
    parameters = engine.policy.parameters.values()

    def count(own):
        # The gradient of `own` was there until its step.
        alive.append(sum(p.numel() for p in parameters if p is own or p.grad is not None))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(count)
    return engine, alive


@pytest.mark.parametrize("max_tokens", [40, 400])
def test_step_in_the_backward_takes_the_same_steps_and_frees_gradients(assets, max_tokens):
    (late, of_late), (early, of_early) = (
        early_engine(assets, early=early, max_tokens_per_microbatch=max_tokens)
        for early in (False, True)
    )
    for _ in range(3):
        results = [engine.forward_backward(SAMPLES) for engine in (late, early)]
        assert results[0].loss_sum == pytest.approx(results[1].loss_sum, rel=1e-6)
        assert all(p.grad is None for p in early.policy.parameters.values())
        steps = [engine.optim_step() for engine in (late, early)]
        assert steps[0].grad_norm == pytest.approx(steps[1].grad_norm, rel=1e-6)
        assert steps[0].policy_version == steps[1].policy_version
        assert_near(weights(early), weights(late), relative=1e-6)
    sizes = [p.numel() for p in early.policy.parameters.values()]
    assert max(of_late) == sum(sizes)
    # With several micro-batches all gradients wait for the last one.
    assert max(of_early) == (sum(sizes) if max_tokens == 40 else max(sizes))


def test_step_in_the_backward_refuses_what_comes_too_late(assets):
    engine, _ = early_engine(assets, early=True)
    with pytest.raises(
        ValueError, match="with a loss that has a denominator: give it normalization 'none'"
    ):
        engine.forward_backward(SAMPLES, loss=GRPOLoss())
    engine.forward_backward(SAMPLES)
    with pytest.raises(ValueError, match="call optim_step after each call"):
        engine.forward_backward(SAMPLES)
    with pytest.raises(ValueError, match="must have no settings"):
        engine.optim_step(OptimParams(lr=1e-3))
    assert engine.optim_step().policy_version == 1


def test_parameter_that_the_last_micro_batch_misses_is_stepped_by_optim_step(assets):
    late, early = (early_engine(assets, early=early)[0] for early in (False, True))
    for engine in (late, early):
        norm = engine.policy.model.layers[0].attention_norm
        outputs = [norm.forward]  # Of the first micro-batch.
        norm.forward = lambda x, outputs=outputs: outputs.pop()(x) if outputs else x
        assert engine.forward_backward(SAMPLES).packing.num_micro_batches > 1
    assert late.optim_step().grad_norm == pytest.approx(early.optim_step().grad_norm, rel=1e-6)
    assert_near(weights(early), weights(late), relative=1e-6)


def test_weights_of_a_failed_step_in_the_backward_are_not_saved(assets, tmp_path):
    engine, _ = early_engine(assets, early=True)
    broken = replace(SAMPLES[4], advantages=np.full_like(SAMPLES[4].advantages, np.nan))
    with pytest.raises(NonFiniteLossError):
        engine.forward_backward([broken])
    folder = str(tmp_path / "written")
    for write in (
        lambda: engine.save_checkpoint(folder), lambda: engine.export_hf(folder),
        engine.model_state_dict,
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match="load_checkpoint if a call failed"):
            write()
    with pytest.raises(ValueError, match="load_checkpoint if a call failed"):
        engine.optim_step(allow_empty=True)
    engine.load_checkpoint(assets)
    engine.forward_backward(SAMPLES)
    assert math.isfinite(engine.optim_step().grad_norm)


def factors(steps, **config):
    schedule = LRSchedule.Config(**config).build()
    return [schedule.compute_factor(step) for step in steps]


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        # Warm-up over 2 of 12 steps, decay over the last half: progress (step - 6) / 6 at 6, 9, 11,
        # 12.
        ("linear", [1.0, 0.1 + 0.9 / 2, 0.1 + 0.9 / 6, 0.1]),
        ("cosine", [1.0, 0.1 + 0.9 / 2, 0.1 + 0.9 * (1 - math.sqrt(3) / 2) / 2, 0.1]),
        (
            "sqrt",
            [1.0, 0.1 + 0.9 * (1 - math.sqrt(1 / 2)), 0.1 + 0.9 * (1 - math.sqrt(5 / 6)), 0.1],
        ),
    ],
)
def test_every_shape_over_the_last_half_down_to_a_tenth(decay, expected):
    config = {
        "warmup_steps": 2,
        "decay": decay,
        "decay_ratio": 0.5,
        "min_ratio": 0.1,
        "total_steps": 12,
    }
    assert factors([0, 1, 2, 5], **config) == [0.5, 1.0, 1.0, 1.0]
    assert factors([6, 9, 11, 12, 99], **config) == pytest.approx([*expected, 0.1])
    early = factors(range(5), warmup_steps=2, decay="linear", total_steps=4)
    assert early == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])  # no decay before the warm-up is over


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"decay": "cosine", "warmup_steps": 5, "total_steps": 5}, "total_steps=5, warmup_steps=5"),
        ({"min_ratio": 1.5}, r"min_ratio=1\.5: must be at least 0 and at most 1"),
        (
            {"decay": "linear", "total_steps": 10, "min_ratio": 1.0},
            r"min_ratio=1\.0: nothing would decay",
        ),
        (
            {"decay": "cosine", "total_steps": 10, "decay_ratio": 0.04},
            "0.04, .*: nothing would decay",
        ),
    ],
)
def test_impossible_schedule_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        LRSchedule.Config(**config)


def test_schedule_with_another_number_of_steps_than_the_loop_is_refused():
    schedule = LRSchedule.Config(decay="linear", total_steps=80)
    check_total_steps(schedule, num_steps=80, num_minibatches=1)
    check_total_steps(schedule, num_steps=20, num_minibatches=4)
    check_total_steps(schedule, num_steps=0, num_minibatches=1)  # an evaluation-only run
    check_total_steps(LRSchedule.Config(warmup_steps=10), num_steps=2, num_minibatches=1)
    of_run = LRSchedule.Config(decay="linear", warmup_steps=5)
    check_total_steps(of_run, num_steps=3, num_minibatches=2)
    with pytest.raises(ValueError, match=r"total_steps=5, warmup_steps=5, .*: nothing would decay"):
        check_total_steps(of_run, num_steps=5, num_minibatches=1)
    with pytest.raises(
        ValueError, match="total_steps=0 with decay='linear': must be the number of optimizer"
    ):
        of_run.build()
    for num_steps, num_minibatches, steps in ((80, 2, 160), (10, 1, 10)):
        with pytest.raises(
            ValueError, match=f"total_steps=80 with decay='linear': must be 0 or {steps}, "
        ):
            check_total_steps(schedule, num_steps=num_steps, num_minibatches=num_minibatches)


def test_an_early_step_that_fails_leaves_every_parameter_to_the_optimizer():
    parameters = {name: nn.Parameter(torch.ones(2)) for name in ("a", "b")}
    optimizer = Optimizer(config=Optimizer.Config(), parameters=parameters)
    parameters["a"].grad = torch.ones(2)

    def fail(*_):
        raise RuntimeError("planted")

    handle = optimizer.inner.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        optimizer.step_one(parameters["a"], optimizer.make_settings(lr=0.1, params=None))
    handle.remove()
    assert len(optimizer.inner.param_groups[0]["params"]) == 2
