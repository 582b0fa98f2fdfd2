"""Grouped products in float8, emulated. `tests/training/test_layout_options.py` tests the
layouts.
"""

from importlib import import_module
from itertools import pairwise

import pytest
import torch

from losses.cross_entropy import CrossEntropyLoss
from rl.distributed.mesh import Degrees
from rl.models.float8 import Float8GroupedMM, emulate_groups_in_float8, multiply_groups_in_float8
from rl.models.layers.moe import GroupedExperts, multiply_groups
from rl.models.lora import LoRA
from tests.models.test_float8 import E4M3, rounded
from tests.training.parts import (
    assert_near,
    even_moe_spec,
    even_spec,
    make_engine,
    make_samples,
    moe_spec,
)

ENDS = (5, 5, 21, 24)
"""End of each expert's rows; the second expert has none."""


def grouped(product, dtype=torch.float32):
    """Return both factors and the gradient of the result, then the result and the gradients of both
    factors.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = (24, 32), (4, 48, 32), (24, 48)
    x, weight, dy = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    x[7] = 0.0
    factors = x.requires_grad_(), weight.requires_grad_()
    y = product(*factors, torch.tensor(ENDS))
    dx, dweight = torch.autograd.grad(y, factors, dy)
    return (x.detach(), weight.detach(), dy), {"y": y.detach(), "x": dx, "weight": dweight}


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_product_and_gradients_use_rounded_factors_of_each_expert(dtype, precision):
    factors, actual = grouped(emulate_groups_in_float8, dtype)
    x, weight, dy = (factor.float() for factor in factors)
    y, dx, dweight = torch.empty(24, 48), torch.empty(24, 32), torch.zeros(4, 48, 32)
    for n, (start, end) in enumerate(pairwise([0, *ENDS])):
        x_, dy_, w_ = x[start:end], dy[start:end], weight[n]
        y[start:end] = rounded(x_, E4M3, dim=1) @ rounded(w_, E4M3, dim=1).T
        dx[start:end] = rounded(dy_, E4M3, dim=1) @ rounded(w_, E4M3, dim=0)
        if end > start:
            dweight[n] = rounded(dy_, E4M3, dim=0).T @ rounded(x_, E4M3, dim=0)
    expected = {"y": y, "x": dx, "weight": dweight}
    assert_near(
        {name: tensor.float() for name, tensor in actual.items()}, expected, relative=precision
    )
    plain = grouped(multiply_groups)[1]
    assert all(0.01 < (plain[k] - expected[k]).norm() / plain[k].norm() < 0.06 for k in plain)


def scaled_grouped_mm(a, b, scale_a, scale_b, ends, out_dtype, use_fast_accum):
    """Compute PyTorch's grouped product, which has no form for a CPU."""
    assert ends.dtype == torch.int32
    assert not (ends % 16).any()
    a, b, num_groups = a.float(), b.float(), len(ends)
    slices = [slice(start, end) for start, end in pairwise([0, *ends.tolist()])]
    if b.ndim == 3:
        a = a * scale_a[:, None]
        out = torch.cat([a[rows] @ (b[n] * scale_b[n]) for n, rows in enumerate(slices)])
    else:
        scale_a, scale_b = scale_a.view(num_groups, -1, 1), scale_b.view(num_groups, 1, -1)
        out = torch.stack(
            [(a[:, rows] * scale_a[n]) @ (b[rows] * scale_b[n]) for n, rows in enumerate(slices)]
        )
    return out.to(out_dtype)


def test_torchao_computes_the_emulated_product(monkeypatch):
    """Run torchao's function, with PyTorch's operations in place of the kernels that need a GPU."""
    torchao, references = (
        import_module(f"torchao.prototype.moe_training.{name}")
        for name in ("fp8_grouped_mm", "utils")
    )
    by_group = references.torch_to_float8_per_group_colwise

    def cast(x, output_dtype, round_scales_to_power_of_2, *, dim):
        scale = torch.finfo(output_dtype).max / x.abs().amax(dim, keepdim=True).float().clamp(
            min=1e-12
        )
        scale = scale.log2().floor().exp2()
        return (x * scale).to(output_dtype), scale

    for name, kernel in {
        "rowwise_2d_scale_and_cast": lambda x, **options: cast(x, dim=1, **options),
        "colwise_3d_scale_and_cast": lambda x, **options: cast(x, dim=1, **options),
        "rowwise_3d_transpose_rhs": lambda x, **options: (
            references.torch_to_3d_rowwise_float8_transpose_rhs(
                x, options["output_dtype"], options["round_scales_to_power_of_2"]
            )
        ),
        "per_group_colwise_scales_dual": lambda a, b, ends, dtype, round_scales_to_power_of_2: (
            *by_group(a.t().contiguous().t(), ends, dtype, round_scales_to_power_of_2),
            *by_group(b.t().contiguous().t(), ends, dtype, round_scales_to_power_of_2),
        ),
    }.items():
        monkeypatch.setattr(torchao, f"triton_fp8_{name}", kernel)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled_grouped_mm)
    # In float32 the result's gradient is rounded to bfloat16 before it is rounded to float8.
    for dtype, precision in ((torch.bfloat16, 4e-3), (torch.float32, 2e-2)):
        actual, expected = (
            grouped(product, dtype)[1]
            for product in (multiply_groups_in_float8, emulate_groups_in_float8)
        )
        assert [t.dtype for t in actual.values()] == [dtype] * 3
        assert_near(actual, expected, relative=precision)
    x, weight = torch.zeros(0, 32, requires_grad=True), torch.ones(4, 48, 32, requires_grad=True)
    multiply_groups_in_float8(x, weight, torch.zeros(4, dtype=torch.int64)).sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_kernels_see_few_numbers_of_rows(monkeypatch):
    def seen(rows, weight, ends, **_):
        assert ends[-1] == len(rows)
        sizes.add(len(rows))
        return rows.new_zeros(len(rows), weight.size(2))

    torchao = import_module("torchao.prototype.moe_training")
    sizes: set[int] = set()
    monkeypatch.setattr(torchao, "_to_fp8_rowwise_then_scaled_grouped_mm", seen)
    for num_rows in range(1900, 4000, 33):
        multiply_groups_in_float8(
            torch.ones(num_rows, 16), torch.ones(4, 16, 16), torch.tensor([0, 5, 5, num_rows])
        )
    assert sizes == {2048, *range(2304, 4097, 256)}


def test_named_experts_alone_are_converted_and_frozen_ones_pass_gradients_on():
    rounding = Float8GroupedMM.Config(emulate=True, fqns=("layers.1.",))
    engine = make_engine(None, spec=even_moe_spec(), converters=(LoRA.Config(), rounding))
    experts = [m for m in engine.policy.model.modules() if isinstance(m, GroupedExperts)]
    assert [m.product for m in experts] == [multiply_groups, emulate_groups_in_float8]
    engine.forward_backward(make_samples(), loss=CrossEntropyLoss())
    with_gradient = {n: p.grad for n, p in engine.policy.parameters.items() if p.grad is not None}
    assert all("lora" in name for name in with_gradient)
    # Adapters add products in the model's dtype to the rounded ones.
    for adapted in ("attention.qkv_proj", "feed_forward.experts.gate_up_proj"):
        assert with_gradient[f"layers.1.{adapted}_lora.lora_b"].any()


@pytest.mark.parametrize(
    ("settings", "spec", "message"),
    [
        (
            {"emulate": False},
            even_moe_spec,
            "emulate=False: this cpu has no grouped float8 .* 9.0 or 10.0;",
        ),
        ({}, even_spec, "must not be there for a model without experts; Float8 converts it"),
        ({}, moe_spec, r"converters\.0: the model has dim=36: must be a multiple of 16"),
        ({"fqns": ()}, even_moe_spec, r"fqns=\(\): must name at least one part"),
        (
            {"fqns": ("mlp.experts",)},
            even_moe_spec,
            r"fqns has 'mlp.experts', .* they are layers\.0\.",
        ),
    ],
)
def test_invalid_setting_is_rejected(settings, spec, message):
    with pytest.raises(ValueError, match=message):
        make_engine(
            None,
            spec=spec(),
            converters=(Float8GroupedMM.Config(**({"emulate": True} | settings)),),
        )


def test_each_rank_that_shares_an_expert_needs_a_multiple_of_16():
    degrees = Degrees(dp_replicate=1, dp_shard=1, tp=4, etp=4)
    with pytest.raises(ValueError, match="hidden_dim=32: must be a multiple of 64"):
        Float8GroupedMM.Config(emulate=True).build(
            spec=even_moe_spec(), degrees=degrees, device=torch.device("meta")
        )
