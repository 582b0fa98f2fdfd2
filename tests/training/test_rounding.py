"""Steps of bfloat16 weights: right on average at small learning rates, alike in every layout,
repeatable.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from losses.policy import GRPOLoss
from rl.distributed.compat import use_one_gloo_worker
from rl.distributed.sharding import gather_whole, local_tensor
from rl.loop.metrics import TrainedMinibatch, training_metrics
from rl.training.optimizer import Optimizer
from rl.training.rounding import Rounding, derive_bits, round_into
from tests.support.distributed import run_ranks
from tests.training.parts import built, engine_config, make_samples

MATRIX = "layers.0.attention.o_proj.weight"


@pytest.mark.parametrize("number", [1.0 + 2**-10, -(3.0 + 2**-20), 1e-6, -1e-39, 0.0, 2.0**-9])
def test_number_is_rounded_to_its_neighbours_and_is_right_on_average(number):
    wide = torch.full((1 << 16,), number)
    target = torch.empty(1 << 16, dtype=torch.bfloat16)
    round_into(target, wide, torch.arange(1 << 16, dtype=torch.int32))
    assert len(set(target.tolist())) <= 2
    # Neighbours are 2^-7 of a number apart, and the noise has 2^16 values.
    assert target.double().mean().item() == pytest.approx(wide[0].item(), rel=2**-23, abs=1e-44)


def test_numbers_that_are_not_finite_stay():
    wide = torch.tensor([torch.inf, -torch.inf, torch.nan])
    target = torch.empty(3, dtype=torch.bfloat16)
    round_into(target, wide, torch.full((3,), 0xFFFF, dtype=torch.int32))
    assert target[:2].tolist() == [torch.inf, -torch.inf]
    assert target[2].isnan()


def bits_of(name, parameter, *, seed=0, version=0):
    rounding = Rounding(seed=seed)
    rounding.version = version
    return torch.cat([bits for _, bits in rounding.split_rows(name, parameter)])


def test_random_bits_are_even_and_differ_by_seed_step_name_and_place():
    parameter = nn.Parameter(torch.empty(256, 256))
    bits = bits_of("a", parameter)
    assert torch.equal(bits, bits_of("a", parameter))
    for other in (
        bits_of("b", parameter), bits_of("a", parameter, seed=1),
        bits_of("a", parameter, version=1), bits.roll(1, 0),
        bits.roll(1, 1), bits.T,
    ):  # fmt: skip
        for a, b in zip(
            (bits & 0xFFFF, *derive_bits(bits)), (other & 0xFFFF, *derive_bits(other)), strict=True
        ):
            uniform_a, uniform_b = (x.flatten().double() / 65535 - 0.5 for x in (a, b))
            assert abs(uniform_a.mean()) < 0.01
            assert abs(uniform_a.var() - 1 / 12) < 0.002
            assert abs((uniform_a * uniform_b).mean()) < 0.002  # 6 standard deviations


def steps(name, implementation, dtype, *, num_steps=60):
    """Return the change of a matrix after steps of 1e-6 with gradients of a direction and noise."""
    generator = torch.Generator().manual_seed(0)
    start, direction = (torch.randn(96, 64, generator=generator) for _ in range(2))
    start = (0.02 * start).bfloat16()
    parameter = nn.Parameter(start.clone().to(dtype))
    config = Optimizer.Config(name=name, implementation=implementation)
    optimizer = config.build(parameters={MATRIX: parameter})
    for version in range(num_steps):
        parameter.grad = (direction + 0.3 * torch.randn(96, 64, generator=generator)).to(dtype)
        optimizer.step(optimizer.make_settings(lr=1e-6), version=version)
    return parameter.detach().float() - start.float(), optimizer


@pytest.mark.parametrize(
    ("name", "implementation"),
    [("AdamW", "fused"), ("AdamW", "foreach"), ("Adam", "for-loop"), ("Muon", "fused")],
)
def test_small_steps_add_up_as_in_float32(name, implementation):
    expected, _ = steps(name, implementation, torch.float32)
    change, optimizer = steps(name, implementation, torch.bfloat16)
    assert (change * expected).sum() / expected.square().sum() == pytest.approx(1.0, abs=0.05)
    result = optimizer.rounding.reduce(mesh=None)
    assert 0.9 < result.rounded_away < 1.0
    assert result.applied == pytest.approx(1.0, abs=0.05)


def test_single_number_is_stepped_too():
    parameter = nn.Parameter(torch.tensor(1.0, dtype=torch.bfloat16))
    optimizer = Optimizer.Config().build(parameters={"temperature": parameter})
    parameter.grad = torch.ones_like(parameter)
    optimizer.step(optimizer.make_settings(lr=0.5))
    assert parameter.item() == pytest.approx(0.5, rel=2**-7)


def test_running_means_do_not_stand_still_where_a_step_is_below_their_precision():
    parameter = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = Optimizer.Config(betas=(0.999, 0.999)).build(parameters={"norm.weight": parameter})
    means = optimizer.state_tensors()[parameter]
    means["exp_avg"].fill_(1.0)
    means["exp_avg_sq"].fill_(1.0)
    for version in range(100):
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step(optimizer.make_settings(lr=0.0), version=version)
    for mean in (means["exp_avg"], means["exp_avg_sq"]):
        assert mean.float().mean().item() == pytest.approx(0.999**100, abs=0.002)
    assert means["step"].item() == 100


CASES: dict[str, tuple[tuple[int, ...], Any]] = {
    "rows": ((7, 6), Shard(0)), "columns": ((5, 6), Shard(1)), "experts": ((3, 4, 5), Shard(1)),
    "layers.0.rows": ((7, 6), Shard(0)), "layers.0.columns": ((5, 6), Shard(1)),
    "vector": ((9,), Shard(0)), "nothing": ((1, 5), Shard(0)), "replicated": ((4, 3), Replicate()),
}  # fmt: skip
"""Shapes and placements; Muon steps the parameters of layers."""


def stepped(name, shape, placement, *, mesh=None):
    """Return weights and means after two steps of a parameter, whole or sharded."""
    generator = torch.Generator().manual_seed(5)
    value, gradient = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
    if mesh is not None:
        value, gradient = (
            DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[placement])
            for x in (value, gradient)
        )
    parameter = nn.Parameter(value)
    config = Optimizer.Config(name="Muon" if "layers" in name else "AdamW", weight_decay=0.1)
    optimizer = config.build(parameters={name: parameter}, seed=3)
    for version in range(2):
        parameter.grad = gradient.clone()
        settings = optimizer.make_settings(lr=1e-3)
        if version == 0 or config.name == "Muon":
            optimizer.step(settings, version=version)
        else:
            optimizer.step_one(parameter, settings, version=version)
    state = optimizer.state_tensors()[parameter]
    tensors = [parameter.detach(), *(x for x in state.values() if x.ndim)]
    return [gather_whole(x).float().numpy() for x in tensors]


def measure_shards():
    use_one_gloo_worker()
    mesh = init_device_mesh("cpu", (2,))
    return {name: stepped(name, *case, mesh=mesh) for name, case in CASES.items()}


@pytest.mark.medium
def test_shards_are_rounded_like_the_whole_tensor():
    for rank in run_ranks(measure_shards, 2, timeout_s=100):
        for name, case in CASES.items():
            for ours, theirs in zip(rank[name], stepped(name, *case), strict=True):
                np.testing.assert_array_equal(ours, theirs, err_msg=name)


def bfloat16_engine(*, early_step_in_backward=False):
    early = (
        {"max_norm": math.inf, "loss": GRPOLoss(normalization="none")}
        if early_step_in_backward
        else {}
    )
    config = engine_config(dtype="bfloat16", seed=7, **early)
    config.optimizer = replace(
        config.optimizer, lr=1e-5, early_step_in_backward=early_step_in_backward
    )
    return built(config)


@pytest.mark.parametrize("early", [False, True])
def test_engine_draws_other_bits_for_each_seed_and_step(early):
    engine = bfloat16_engine(early_step_in_backward=early)
    rounding = engine.optimizer.rounding
    assert rounding.seed == 7
    for version in range(2):
        engine.forward_backward(make_samples())
        assert not early or rounding.version == version
        engine.optim_step()
        assert rounding.version == version


def numbers(engine):
    return {name: local_tensor(p.detach()).clone() for name, p in engine.policy.parameters.items()}


def test_resumed_run_rounds_as_the_run_that_went_on(tmp_path):
    engine, folder = bfloat16_engine(), str(tmp_path / "checkpoint")
    ends = []
    for loaded in (False, True):
        if loaded:
            engine = bfloat16_engine()
            engine.load_checkpoint(folder)
        for _ in range(1 if loaded else 2):
            gradient = engine.forward_backward(make_samples())
            update = engine.optim_step()
            if engine.policy_version == 1:
                engine.save_checkpoint(folder)
        ends.append(numbers(engine))
    for name, tensor in ends[0].items():
        assert torch.equal(tensor, ends[1][name]), name
    metrics = training_metrics([TrainedMinibatch(gradient=gradient, update=update)])
    assert 0.5 < metrics["loss/updates_rounded_away"].value < 1.0
    assert metrics["loss/updates_applied"].value == pytest.approx(1.0, abs=0.2)
