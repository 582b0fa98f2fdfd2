"""Float8 emulated on one device. `tests/training/test_layout_options.py` tests the layouts."""

import sys
from typing import Any

import pytest
import torch
from torch import nn

from losses.cross_entropy import CrossEntropyLoss
from rl.distributed.mesh import Degrees
from rl.models.decoder import find_persistent_buffers
from rl.models.float8 import Float8, Float8GroupedMM
from rl.models.lora import LoRA
from tests.training.parts import even_moe_spec, even_spec, make_engine, make_samples, small_spec

SAMPLES = make_samples()
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def converter(config, *, tp=1):
    degrees = Degrees(dp_replicate=1, dp_shard=1, tp=tp)
    return config.build(spec=even_spec(), degrees=degrees, device=torch.device("cpu"))


def make(*converters, spec=None):
    return make_engine(None, spec=spec or even_spec(), converters=converters)


def rounded(x, dtype, *, dim=None):
    """Round to float8 with one scale for the tensor, or with one power of two for each row or
    column.
    """
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = torch.finfo(dtype).max / largest.double().clamp(min=1e-12)
    if dim is not None:
        scale = 2.0 ** scale.log2().floor()
    scale = scale.float()
    return (x * scale).to(dtype).float() / scale


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_product_and_gradients_use_rounded_factors(recipe):
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(32, 48, bias=False))
    converter(Float8.Config(recipe=recipe, emulate=True)).convert(model)
    x, dy = torch.randn(16, 32, requires_grad=True), torch.randn(16, 48)
    y, weight = model(x), model[0].weight
    y.backward(dy)
    rows, columns, gradient = (None, None, E5M2) if recipe == "tensorwise" else (1, 0, E4M3)
    x_, w_ = x.detach(), weight.detach()
    torch.testing.assert_close(y, rounded(x_, E4M3, dim=rows) @ rounded(w_, E4M3, dim=rows).T)
    torch.testing.assert_close(
        x.grad, rounded(dy, gradient, dim=rows) @ rounded(w_, E4M3, dim=columns)
    )
    torch.testing.assert_close(
        weight.grad, rounded(dy, gradient, dim=columns).T @ rounded(x_, E4M3, dim=columns)
    )
    # The rounding is there: float8 has 3 bits of mantissa.
    assert 0.01 < (y - x @ weight.T).norm() / y.norm() < 0.06


def test_head_and_filtered_layers_are_not_converted():
    float8 = Float8.Config(emulate=True, filter_fqns=("layers.0.attention", "down_proj"))
    engine = make(float8, spec=even_spec(tie=False))
    modules = engine.policy.model.named_modules()
    assert [name for name, module in modules if type(module).__name__ == "Float8Linear"] == [
        "layers.0.feed_forward.gate_up_proj",
        "layers.1.attention.qkv_proj",
        "layers.1.attention.o_proj",
        "layers.1.feed_forward.gate_up_proj",
    ]


def cross_entropies(engine, num_steps):
    losses = []
    for _ in range(num_steps):
        losses.append(engine.forward_backward(SAMPLES, loss=CrossEntropyLoss()).loss_mean)
        engine.optim_step()
    return losses


@pytest.mark.parametrize("of_experts", [False, True])
def test_converted_model_trains_near_the_plain_one_and_exports_its_own_weights(of_experts):
    spec, config = (
        (even_moe_spec(), Float8GroupedMM.Config) if of_experts else (even_spec(), Float8.Config)
    )
    plain, rounding = make(spec=spec), make(config(emulate=True), spec=spec)
    expected, losses = cross_entropies(plain, 8), cross_entropies(rounding, 8)
    assert losses[0] != expected[0]
    assert losses == pytest.approx(expected, rel=1e-2)
    assert losses[-1] < losses[0] - 0.05
    state = rounding.model_state_dict()
    assert list(state) == list(plain.model_state_dict())
    own = rounding.policy.parameters | find_persistent_buffers(rounding.policy.model)
    assert all(torch.equal(tensor, own[name]) for name, tensor in state.items())


GATHERED = {"enable_fsdp_float8_all_gather": True}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {**GATHERED, "recipe": "rowwise"},
            "float8_all_gather=True with recipe='rowwise'.*must be",
        ),
        (
            {"precompute_float8_dynamic_scale_for_fsdp": True},
            "must be with enable_fsdp_float8_all_gather=True",
        ),
        ({"emulate": False}, "emulate=False: this cpu has no float8 products"),
        (
            GATHERED,
            r"must be with parallelism\.data_parallel_shard_degree or context_parallel_degree "
            r"above",
        ),
        ({"filter_fqns": ("o_prj",)}, "filter_fqns has 'o_prj', .* they end in qkv_proj, o_proj"),
    ],
)
def test_invalid_setting_is_rejected(settings, message):
    with pytest.raises(ValueError, match=message):
        make(Float8.Config(**({"emulate": True} | settings)))


def test_layer_whose_size_float8_cannot_multiply_is_rejected():
    with pytest.raises(
        ValueError, match=r"converters\.0: layers.0.attention.qkv_proj has in_features=36"
    ):
        make(Float8.Config(emulate=True), spec=small_spec())
    model = even_spec().model.build()
    with pytest.raises(ValueError, match="in_features=32: must be a multiple of 64"):
        converter(Float8.Config(emulate=True), tp=4).convert(model)
    with pytest.raises(ValueError, match=r"converters\.1: an earlier converter added to"):
        make(LoRA.Config(), Float8.Config(emulate=True))


def test_missing_torchao_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ValueError, match=r"Float8 needs torchao 0\.18: pip install 'torchao"):
        converter(Float8.Config(emulate=True))
