"""One device; `tests/training/test_converter_layouts.py` has the layouts."""

import math

import pytest
import torch
from safetensors.torch import load_file

from losses.cross_entropy import CrossEntropyLoss
from rl.distributed.mesh import Degrees
from rl.models.converters.converter import ModelConverters
from rl.models.converters.lora import ALL_LINEAR, LoRA
from rl.models.converters.low_rank import LowRank
from rl.models.converters.peft_folder import PeftSettings, write_peft_folder
from tests.training.parts import engine_config, make_engine, make_samples, small_spec, write_assets

SAMPLES = make_samples()
RANK, SCALE = 3, 2.0
ONE = Degrees(dp_replicate=1, dp_shard=1, tp=1)
LAYER = "model.layers.1."


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return write_assets(tmp_path_factory.mktemp("assets") / "model")


def make(assets, *, tie=True, **settings):
    config = engine_config()
    config.converters = (LoRA.Config(**({"rank": RANK, "alpha": SCALE * RANK} | settings)),)
    return config.build(model_spec=small_spec(tie=tie), hf_assets_path=assets, device="cpu")


def hf_weights(spec):
    """Hugging Face's tensors on the meta device, by their name and ours."""
    with torch.device("meta"):
        model = spec.model.build()
    adapter = spec.adapter(spec.model)
    return {
        (hf_name, ours): tensor
        for ours, parameter in model.named_parameters()
        for hf_name, tensor in adapter.to_hf(ours, parameter).items()
    }


def factors_of(spec, *, modules, seed=5):
    """(A, B) by Hugging Face's name, random."""
    generator = torch.Generator().manual_seed(seed)
    return {
        hf_name: (
            0.2 * torch.randn(RANK, tensor.size(1), generator=generator),
            0.2 * torch.randn(tensor.size(0), RANK, generator=generator),
        )
        for (hf_name, _), tensor in hf_weights(spec).items()
        if hf_name.removesuffix(".weight").rpartition(".")[2] in modules
    }


def write_adapter(folder, factors):
    settings = PeftSettings(rank=RANK, alpha=SCALE * RANK, target_modules=(), base_model=None)
    write_peft_folder(folder, ((name, a, b) for name, (a, b) in factors.items()), settings)
    return str(folder)


def weights(engine):
    return {name: p.detach().clone() for name, p in engine.policy.parameters.items()}


def summed_by_hand(spec, plain, factors):
    """W + s B A of each of Hugging Face's weights, put together into ours."""
    adapter = spec.adapter(spec.model)
    summed = {}
    for name, weight in plain.items():
        parts = [
            part + SCALE * factors[hf_name][1] @ factors[hf_name][0] if hf_name in factors else part
            for hf_name, part in adapter.to_hf(name, weight).items()
        ]
        summed[name] = adapter.from_hf(name, parts)
    return summed


def plain_engine(weights_by_name, *, tie=True):
    engine = engine_config().build(model_spec=small_spec(tie=tie), hf_assets_path=None, device="cpu")
    engine.policy.model.load_state_dict(weights_by_name)
    return engine


def assert_near(actual, expected, *, relative=1e-5):
    """Each tensor by the norm of the difference."""
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert (actual[name] - tensor).norm() <= relative * tensor.norm(), name


def test_fresh_adapters_change_no_bit_and_the_frozen_weights_are_the_folders(assets):
    engine, plain = make(assets), make_engine(assets)
    for ours, theirs in zip(engine.compute_logprobs(SAMPLES), plain.compute_logprobs(SAMPLES), strict=True):
        assert (ours == theirs).all()
    state, expected = engine.model_state_dict(), plain.model_state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_a_model_drawn_from_a_seed_is_the_one_without_adapters():
    engine, plain = make(None), make_engine(None)
    state = engine.model_state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in plain.model_state_dict().items())


def test_each_of_hugging_faces_weights_has_a_product_of_its_own(assets, tmp_path):
    """The numbers of a plain model whose weights are W + s B A, for fused layers with all parts and some."""
    for number, modules in enumerate((ALL_LINEAR, ("q_proj", "v_proj", "up_proj"), ("k_proj", "down_proj"))):
        spec = small_spec()
        factors = factors_of(spec, modules=modules)
        folder = write_adapter(tmp_path / str(number), factors)
        engine = make(assets, target_modules=modules, initial_adapter=folder)
        expected = summed_by_hand(spec, make_engine(assets).model_state_dict(), factors)
        assert_near(engine.model_state_dict(), expected, relative=1e-6)
        plain = plain_engine(expected)
        for ours, theirs in zip(
            engine.compute_logprobs(SAMPLES), plain.compute_logprobs(SAMPLES), strict=True
        ):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=1e-5, rtol=0)


def test_gradients_are_those_of_the_summed_weights_by_the_chain_rule(assets, tmp_path):
    """dA = s B^T dW and dB = s dW A^T."""
    spec = small_spec(tie=False)
    untied = write_assets(tmp_path / "untied", tie=False)
    factors = factors_of(spec, modules=(*ALL_LINEAR, "lm_head"))
    folder = write_adapter(tmp_path / "adapter", factors)
    engine = make(untied, tie=False, unembedding=True, initial_adapter=folder)
    engine.forward_backward(SAMPLES)

    plain = plain_engine(engine.model_state_dict(), tie=False)
    plain.forward_backward(SAMPLES)
    adapter = spec.adapter(spec.model)
    parameters = engine.policy.parameters
    for name, parameter in plain.policy.parameters.items():
        assert parameters[name].grad is None
        by_hf_name = adapter.to_hf(name, parameter.grad)
        if not factors.keys() & by_hf_name.keys():
            continue
        beside = name.removesuffix(".weight") + "_lora"
        expected_b = {n: SCALE * grad @ factors[n][0].T for n, grad in by_hf_name.items()}
        expected_a = [SCALE * factors[n][1].T @ grad for n, grad in by_hf_name.items()]
        assert_near(
            {"a": parameters[f"{beside}.lora_a"].grad, "b": parameters[f"{beside}.lora_b"].grad},
            {"a": torch.cat(expected_a), "b": adapter.from_hf(name, list(expected_b.values()))},
        )


def test_only_adapters_are_stepped_and_have_optimizer_state(assets):
    engine = make(assets)
    before = weights(engine)
    for _ in range(2):
        engine.forward_backward(SAMPLES)
        engine.optim_step()
    adapters = [name for name in before if "_lora." in name]
    assert len(adapters) == 2 * 2 * 4
    assert len(engine.optimizer.state_tensors()) == len(adapters)
    for name, tensor in weights(engine).items():
        assert torch.equal(tensor, before[name]) == (name not in adapters), name


def test_rows_of_weights_without_factors_stay_at_zero(assets):
    engine = make(assets, target_modules=("q_proj", "v_proj"))
    for _ in range(2):
        engine.forward_backward(SAMPLES)
        engine.optim_step()
    spec = small_spec()
    b = engine.policy.parameters["layers.1.attention.qkv_proj_lora.lora_b"].detach()
    parts = spec.adapter(spec.model).to_hf("layers.1.attention.qkv_proj.weight", b)
    assert [bool(part.any()) for part in parts.values()] == [True, False, True]
    assert not any("feed_forward" in name for name in weights(engine) if "_lora" in name)


def test_our_names_and_hugging_faces_are_the_same_targets(assets):
    ours = make(assets, target_modules=("qkv_proj", "gate_up_proj"))
    theirs = make(assets, target_modules=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))
    assert_near(weights(ours), weights(theirs), relative=0.0)


def test_first_values_follow_from_the_seed_and_are_kaimings_and_zero(assets):
    first, same, other = make(assets, seed=1), make(assets, seed=1), make(assets, seed=2)
    name = "layers.0.feed_forward.gate_up_proj_lora."
    a, b = (first.policy.parameters[f"{name}lora_{factor}"].detach() for factor in "ab")
    assert a.shape == (2 * RANK, 36)
    assert 0.8 / 6 < a.abs().max() <= 1 / 6  # 1 / sqrt(36)
    assert a.std() == pytest.approx(1 / 6 / math.sqrt(3), rel=0.1)
    assert not b.any()
    assert torch.equal(a, same.policy.parameters[f"{name}lora_a"])
    assert not torch.equal(a, other.policy.parameters[f"{name}lora_a"])


def test_a_run_continues_from_its_checkpoint_with_the_same_bits(assets, tmp_path):
    engine, again = make(assets), make(assets, seed=9)
    engine.forward_backward(SAMPLES)
    engine.optim_step()
    engine.save_checkpoint(str(tmp_path / "checkpoint"))
    assert again.load_checkpoint(str(tmp_path / "checkpoint")) == 1
    results = []
    for each in (engine, again):
        each.forward_backward(SAMPLES)
        each.optim_step()
        results.append(weights(each))
    assert_near(results[0], results[1], relative=0.0)


def test_an_adapter_is_written_with_peft_names_and_continues_from_there(assets, tmp_path):
    engine = make(assets, target_modules=("q_proj", "down_proj"))
    for _ in range(2):
        engine.forward_backward(SAMPLES, loss=CrossEntropyLoss())
        engine.optim_step()
    engine.save_adapter(str(tmp_path / "adapter"))
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert sorted(tensors) == sorted(
        f"base_model.model.model.layers.{layer}.{module}.lora_{factor}.weight"
        for layer in (0, 1)
        for module in ("self_attn.q_proj", "mlp.down_proj")
        for factor in "AB"
    )
    trained = engine.compute_logprobs(SAMPLES)

    fresh = make(assets, target_modules=("q_proj", "down_proj"))
    fresh.forward_backward(SAMPLES)
    fresh.optim_step()
    assert fresh.load_checkpoint(str(tmp_path / "adapter")) == 0
    assert not fresh.optimizer.inner.state
    started = make(assets, target_modules=("down_proj", "q_proj"), initial_adapter=str(tmp_path / "adapter"))
    for other in (fresh, started):
        assert all((a == b).all() for a, b in zip(other.compute_logprobs(SAMPLES), trained, strict=True))
    with pytest.raises(FileExistsError, match="adapter already exists"):
        engine.save_adapter(str(tmp_path / "adapter"))


def test_other_weights_start_with_fresh_adapters(assets):
    engine = make(assets)
    start = weights(engine)
    engine.forward_backward(SAMPLES)
    engine.optim_step()
    engine.load_checkpoint(assets)
    assert_near(weights(engine), start, relative=0.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank=0: must be at least 1"),
        ({"alpha": 0.0}, "alpha=0.0: must be a finite number above 0"),
        ({"alpha": math.inf}, "alpha=inf: must be a finite number above 0"),
        ({"target_modules": ()}, r"target_modules=\(\): must name at least one, or unembedding be True"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LoRA.Config(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"target_modules": ("q_proj", "query")},
            r"converters\.0: target_modules has 'query', which is no linear layer of qwen3 tiny: valid are "
            "q_proj, k_proj, v_proj, qkv_proj, o_proj, gate_proj, up_proj, gate_up_proj, down_proj$",
        ),
        (
            {"target_modules": ("lm_head",)},
            r"converters\.0: target_modules has 'lm_head', .*; the output head is unembedding=True",
        ),
        ({"unembedding": True}, r"converters\.0: unembedding=True: qwen3 tiny has no output head of its own"),
        ({"initial_adapter": "/nowhere"}, r"converters\.0: file /nowhere/adapter_config.json is missing"),
    ],
)
def test_what_the_model_does_not_have_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make(None, **settings)


def test_two_adapters_on_one_model_are_refused():
    config = LoRA.Config(target_modules=("q_proj",)), LoRA.Config(target_modules=("o_proj",))
    spec = small_spec()
    converters = ModelConverters(config, spec=spec, degrees=ONE, device=torch.device("cpu"))
    with torch.device("meta"):
        model = spec.model.build()
        with pytest.raises(ValueError, match=r"converters\.1: the model has adapters already"):
            converters.convert(model)


def test_without_lora_there_is_no_adapter_to_save_or_load(assets, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    plain = make_engine(assets)
    for call in (plain.load_checkpoint, plain.save_adapter):
        with pytest.raises(ValueError, match="converters has no LoRA: there is no adapter"):
            call(str(tmp_path))


def test_merging_leaves_the_parameters_alone(assets, tmp_path):
    folder = write_adapter(tmp_path / "adapter", factors_of(small_spec(), modules=ALL_LINEAR))
    engine = make(assets, initial_adapter=folder)
    before = weights(engine)
    merged = engine.model_state_dict()
    name = "layers.1.attention.o_proj.weight"
    assert not torch.equal(merged[name], before[name])
    assert_near(weights(engine), before, relative=0.0)
    assert sum(isinstance(module, LowRank) for module in engine.policy.model.modules()) == 2 * 4
