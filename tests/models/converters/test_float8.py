"""Emulated: the rounding of float8 with products in float32. Layouts are in
`tests/training/test_converter_layouts.py`."""

import copy
import dataclasses
import sys

import pytest
import torch
from torch import nn

from losses.cross_entropy import CrossEntropyLoss
from rl.distributed.mesh import Degrees
from rl.models.converters.float8 import Float8
from rl.models.converters.lora import LoRA
from rl.models.qwen3.model import Qwen3
from tests.training.converter_layouts import even_spec
from tests.training.parts import engine_config, make_samples, small_spec

SAMPLES = make_samples()
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CPU, META = torch.device("cpu"), torch.device("meta")


def converter(config, *, spec=None, device=CPU, tp=1, dp_shard=1, cp=1):
    degrees = Degrees(dp_replicate=1, dp_shard=dp_shard, cp=cp, tp=tp)
    return config.build(spec=spec or even_spec(), degrees=degrees, device=device)


def make(*converters, spec=None):
    config = engine_config()
    config.converters = converters
    return config.build(model_spec=spec or even_spec(), hf_assets_path=None, device="cpu")


def rounded(x, dtype, *, dim=None):
    """To float8 and back, the largest entry of what shares a scale becoming float8's largest number; with
    a scale a row or column, that is a power of two."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = torch.finfo(dtype).max / largest.double()
    if dim is not None:
        scale = 2.0 ** scale.log2().floor()
    scale = scale.float()
    return (x * scale).to(dtype).float() / scale


def layer_and_input(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48, bias=False))
    converter(Float8.Config(recipe=recipe, emulate=True)).convert(model)
    x, seed = torch.randn(16, 32, requires_grad=True), torch.randn(16, 48)
    y = model(x)
    y.backward(seed)
    return model[0].weight, x, y, seed


def test_tensorwise_product_and_its_gradients_are_those_of_rounded_factors():
    weight, x, y, dy = layer_and_input("tensorwise")
    x8, w8, dy8 = rounded(x.detach(), E4M3), rounded(weight.detach(), E4M3), rounded(dy, E5M2)
    torch.testing.assert_close(y, x8 @ w8.T)
    torch.testing.assert_close(x.grad, dy8 @ w8)
    torch.testing.assert_close(weight.grad, dy8.T @ x8)
    # The rounding is there: float8 has 3 bits of mantissa.
    error = (y - x @ weight.T).norm() / y.norm()
    assert 0.01 < error < 0.06


def test_rowwise_product_and_its_gradients_are_those_of_rounded_factors():
    weight, x, y, dy = layer_and_input("rowwise")
    x_, w_ = x.detach(), weight.detach()
    torch.testing.assert_close(y, rounded(x_, E4M3, dim=1) @ rounded(w_, E4M3, dim=1).T)
    torch.testing.assert_close(x.grad, rounded(dy, E4M3, dim=1) @ rounded(w_, E4M3, dim=0))
    torch.testing.assert_close(weight.grad, rounded(dy, E4M3, dim=0).T @ rounded(x_, E4M3, dim=0))


def test_the_last_recipe_keeps_the_gradient_of_the_weight_in_high_precision():
    weight, x, _, dy = layer_and_input("rowwise_with_gw_hp")
    torch.testing.assert_close(weight.grad, dy.T @ x.detach())
    assert (x.grad - dy @ weight.detach()).norm() > 0.01 * x.grad.norm()


def test_all_linear_layers_are_converted_but_the_head_and_the_filtered():
    spec = even_spec()
    assert isinstance(spec.model, Qwen3.Config)
    spec = dataclasses.replace(spec, model=dataclasses.replace(spec.model, tie_embeddings=False))
    engine = make(Float8.Config(emulate=True, filter_fqns=("layers.0.attention", "down_proj")), spec=spec)
    kinds = {
        name: type(module).__name__
        for name, module in engine.policy.model.named_modules()
        if isinstance(module, nn.Linear)
    }
    assert [name for name, kind in kinds.items() if kind == "Float8Linear"] == [
        "layers.0.feed_forward.gate_up_proj",
        "layers.1.attention.qkv_proj",
        "layers.1.attention.o_proj",
        "layers.1.feed_forward.gate_up_proj",
    ]
    assert kinds["lm_head"] == "Linear"


def test_a_converted_model_trains_near_the_plain_one_and_exports_its_own_weights():
    """Rounding costs a few percent of each gradient, and nothing of the weights."""
    plain, rounding = make(), make(Float8.Config(emulate=True))
    losses = []
    for engine in (plain, rounding):
        trained = []
        for _ in range(8):
            trained.append(engine.forward_backward(SAMPLES, loss=CrossEntropyLoss()).loss_mean)
            engine.optim_step()
        losses.append(trained)
    assert losses[0][0] != losses[1][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert losses[1][-1] < losses[1][0] - 0.05
    state = rounding.model_state_dict()
    assert list(state) == list(plain.model_state_dict())
    assert all(torch.equal(tensor, rounding.policy.parameters[name]) for name, tensor in state.items())


def test_tokens_are_padded_to_what_a_product_can_take_and_padding_is_not_counted():
    engine = make(Float8.Config(emulate=True))
    assert {len(batch.input_ids) % 16 for batch in engine.policy.pack(SAMPLES)} == {0}
    result = engine.forward_backward(SAMPLES)
    assert result.num_tokens == sum(len(sample.token_ids) - 1 for sample in SAMPLES)


def test_adapters_are_trained_beside_float8_layers():
    engine = make(Float8.Config(emulate=True), LoRA.Config(rank=2))
    before = copy.deepcopy(engine.model_state_dict())
    first = engine.forward_backward(SAMPLES, loss=CrossEntropyLoss()).loss_mean
    engine.optim_step()
    for _ in range(5):
        last = engine.forward_backward(SAMPLES, loss=CrossEntropyLoss()).loss_mean
        engine.optim_step()
    assert last < first
    merged = engine.model_state_dict()
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, merged[name])}
    assert changed == {name for name in before if "proj" in name}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"enable_fsdp_float8_all_gather": True, "recipe": "rowwise"},
            "enable_fsdp_float8_all_gather=True with recipe='rowwise'.*must be 'tensorwise'",
        ),
        (
            {"precompute_float8_dynamic_scale_for_fsdp": True},
            "precompute_float8_dynamic_scale_for_fsdp=True: must be with enable_fsdp_float8_all_gather=True",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Float8.Config(**settings)


def test_hardware_without_float8_is_refused_unless_it_is_emulated():
    with pytest.raises(ValueError, match="emulate=False: a cpu has no float8 products; emulate=True gives"):
        converter(Float8.Config())
    converter(Float8.Config(), device=META)  # Nothing runs there.


def test_gathering_where_nothing_is_sharded_is_refused():
    config = Float8.Config(emulate=True, enable_fsdp_float8_all_gather=True)
    with pytest.raises(
        ValueError,
        match=r"must be with parallelism\.data_parallel_shard_degree or context_parallel_degree above 1",
    ):
        converter(config)
    converter(config, dp_shard=2)
    converter(config, cp=2)


def test_a_layer_whose_size_float8_cannot_multiply_is_refused_unless_filtered():
    with pytest.raises(
        ValueError,
        match=r"converters\.0: layers.0.attention.qkv_proj has in_features=36: must be a multiple of 16, "
        "or the layer be named in filter_fqns",
    ):
        make(Float8.Config(emulate=True), spec=small_spec())
    model = even_spec().model.build()
    with pytest.raises(ValueError, match="in_features=32: must be a multiple of 16 on each of 4 tensor"):
        converter(Float8.Config(emulate=True), tp=4).convert(model)
    converter(Float8.Config(emulate=True), tp=2).convert(model)


def test_a_filter_that_matches_nothing_names_what_there_is():
    with pytest.raises(
        ValueError,
        match=r"filter_fqns has 'o_prj', which no linear layer's name contains: they end in qkv_proj, "
        "o_proj, gate_up_proj, down_proj",
    ):
        make(Float8.Config(emulate=True, filter_fqns=("o_prj",)))


def test_float8_after_lora_is_refused_because_it_would_drop_the_adapters():
    with pytest.raises(
        ValueError, match=r"converters\.1: an earlier converter added to layers.0.attention.qkv"
    ):
        make(LoRA.Config(), Float8.Config(emulate=True))


def test_without_torchao_the_config_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ValueError, match=r"Float8 needs torchao 0\.18: pip install 'torchao"):
        converter(Float8.Config(emulate=True))
