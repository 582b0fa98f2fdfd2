"""LoRA on one device, and folders of adapters. `tests/training/test_layouts.py` tests the
layouts.
"""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from losses.cross_entropy import CrossEntropyLoss
from rl.models import qwen2
from rl.models.decoder import FeedForward
from rl.models.files.peft import CONFIG_FILE, WEIGHTS_FILE, read_peft_folder, write_peft_folder
from rl.models.lora import ALL_LINEAR, LoRA
from rl.training.merge import measure_merge, sum_rounding
from tests.support.policies import full_logits
from tests.training.parts import (
    RANK,
    assert_near,
    granite_spec,
    make_engine,
    make_samples,
    moe_spec,
    random_factors,
    small_spec,
    spec_like,
    windowed_spec,
    write_adapter,
    write_assets,
)

SAMPLES = make_samples()
SCALE = 2.0


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return write_assets(tmp_path_factory.mktemp("assets") / "model")


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return write_assets(tmp_path_factory.mktemp("assets") / "untied", tie=False)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return write_assets(tmp_path_factory.mktemp("assets") / "mixture", spec=moe_spec())


def make(assets, *, tie=True, spec=None, **settings):
    lora = LoRA.Config(**({"rank": RANK, "alpha": SCALE * RANK} | settings))
    return make_engine(assets, spec=spec or small_spec(tie=tie), converters=(lora,))


def plain_engine(weights_by_name, *, spec=None):
    engine = make_engine(None, spec=spec or small_spec())
    engine.policy.model.load_state_dict(weights_by_name)
    return engine


def weights(engine):
    return {name: p.detach().clone() for name, p in engine.policy.parameters.items()}


def train(engine, num_steps=1, **options):
    for _ in range(num_steps):
        engine.forward_backward(SAMPLES, **options)
        engine.optim_step()


def summed_by_hand(spec, plain, factors):
    """Add s B A to each Hugging Face weight, and fuse the sums into our weights."""
    adapter = spec.adapter(spec.model)
    summed = {}
    for name, weight in plain.items():
        parts = [
            part + SCALE * factors[hf_name][1] @ factors[hf_name][0] if hf_name in factors else part
            for hf_name, part in adapter.to_hf(name, weight).items()
        ]
        summed[name] = adapter.from_hf(name, parts)
    return summed


@pytest.mark.parametrize(
    "modules", [ALL_LINEAR, ("q_proj", "v_proj", "up_proj")], ids=["all", "qvu"]
)
def test_each_hugging_face_weight_has_its_own_product(assets, tmp_path, modules):
    """The numbers are those of a plain model with weights W + s B A."""
    factors = random_factors(small_spec(), scale=0.2, modules=modules)
    folder = write_adapter(tmp_path / "adapter", factors)
    engine = make(assets, target_modules=modules, initial_adapter=folder)
    before = weights(engine)
    expected = summed_by_hand(small_spec(), make_engine(assets).model_state_dict(), factors)
    assert_near(engine.model_state_dict(), expected, relative=1e-6)
    assert_near(weights(engine), before, relative=0.0)  # merging changes no parameter
    plain = plain_engine(expected)
    for ours, theirs in zip(
        engine.compute_logprobs(SAMPLES), plain.compute_logprobs(SAMPLES), strict=True
    ):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=1e-5, rtol=0)


BF16_STEP = 2.0**-7
"""Difference of 1 to the next larger number in bfloat16."""


@pytest.mark.parametrize(
    ("weight", "update", "dtype", "lost"),
    [
        # A quarter of the way to the next number is rounded away.
        (1.0, [BF16_STEP / 4, -BF16_STEP / 8], "bfloat16", [BF16_STEP / 4, BF16_STEP / 8]),
        # Three quarters of the way are rounded to the whole.
        (1.0, [0.5, BF16_STEP * 0.75], "bfloat16", [0.0, BF16_STEP / 4]),
        (1.0, [0.5, BF16_STEP / 4], "float32", [0.0, 0.0]),
        # float16 has three bits more.
        (1.0, [BF16_STEP / 8, BF16_STEP / 32], "float16", [0.0, BF16_STEP / 32]),
        # The rounding of the weight itself is not lost: with the adapter apart it is the same.
        (1.0 + BF16_STEP / 4, [1.0, 0.0], "bfloat16", [0.0, 0.0]),
        # An eighth of a step takes the weight over the middle between two numbers.
        (1.0 + BF16_STEP * 0.4375, [BF16_STEP / 8], "bfloat16", [BF16_STEP * 0.875]),
    ],
)
def test_rounding_of_sums_has_these_squares(weight, update, dtype, lost):
    update = torch.tensor(update)
    weight = torch.full_like(update, weight)
    found = sum_rounding(weight, update, weight + update, dtype=getattr(torch, dtype))
    expected = [torch.tensor(lost).square().sum(), update.square().sum()]
    torch.testing.assert_close(found, torch.stack(expected).double(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("scale", [0.2, 0.02, 0.002])
def test_share_that_a_merge_loses_follows_from_the_summed_weights(assets, tmp_path, scale):
    modules = ("q_proj", "v_proj", "up_proj")
    factors = random_factors(small_spec(), scale=scale, modules=modules)
    folder = write_adapter(tmp_path / "adapter", factors)
    engine = make(assets, target_modules=modules, initial_adapter=folder)
    plain = make_engine(assets).model_state_dict()
    merged = engine.model_state_dict()
    updates = summed_by_hand(
        small_spec(), {name: torch.zeros_like(tensor) for name, tensor in plain.items()}, factors
    )
    lost, whole = [], []
    for name, update in updates.items():
        change = merged[name].bfloat16().double() - plain[name].bfloat16().double()
        lost.append(change - update)
        whole.append(update.double())
    shares = [torch.cat([t.flatten() for t in tensors]).norm() for tensors in (lost, whole)]
    share = measure_merge(engine.policy, state_dict=merged, dtype=torch.bfloat16)
    assert share == pytest.approx(float(shares[0] / shares[1]), rel=1e-4)
    # Numbers in float32 have 16 bits more.
    assert share is not None
    in_float32 = measure_merge(engine.policy, state_dict=merged, dtype=torch.float32)
    assert in_float32 is not None
    assert 0.0 < in_float32 < share / 1e3
    assert_near(merged, engine.model_state_dict(), relative=0.0)  # measuring changes no weight


def test_weights_in_bfloat16_lose_no_more_than_the_update(assets, tmp_path):
    """A weight that the dtype represents is itself one of the numbers to round to."""
    shares: list[Any] = []
    for scale in (0.2, 0.02, 0.002):
        factors = random_factors(small_spec(), scale=scale, modules=ALL_LINEAR)
        folder = write_adapter(tmp_path / f"adapter {scale}", factors)
        lora = LoRA.Config(rank=RANK, alpha=SCALE * RANK, initial_adapter=folder)
        engine = make_engine(assets, converters=(lora,), dtype="bfloat16")
        merged = engine.model_state_dict()
        shares.append(measure_merge(engine.policy, state_dict=merged, dtype=torch.bfloat16))
    assert shares[0] < 0.05 < shares[1] < 0.9 < shares[2] <= 1.0


def test_adapter_without_products_loses_nothing_and_no_adapter_has_no_share(assets):
    for engine, share in ((make(assets), 0.0), (make_engine(assets), None)):
        merged = engine.model_state_dict()
        assert measure_merge(engine.policy, state_dict=merged, dtype=torch.bfloat16) == share


def test_gradients_follow_from_the_summed_weights_by_the_chain_rule(untied, tmp_path):
    """dA = s B^T dW and dB = s dW A^T."""
    spec = small_spec(tie=False)
    factors = random_factors(spec, scale=0.2)
    folder = write_adapter(tmp_path / "adapter", factors)
    engine = make(untied, tie=False, unembedding=True, initial_adapter=folder)
    engine.forward_backward(SAMPLES)

    check_chain_rule(engine, factors, spec=spec)


def check_chain_rule(engine, factors, *, spec):
    plain = plain_engine(engine.model_state_dict(), spec=spec)
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
        # Of experts, the A's of the first one are first.
        grad_a, grad_b = (parameters[f"{beside}.lora_{factor}"].grad for factor in "ab")
        assert_near(
            {"a": grad_a.view(-1, grad_a.size(-1)), "b": grad_b},
            {"a": torch.cat(expected_a), "b": adapter.from_hf(name, list(expected_b.values()))},
        )


@pytest.mark.parametrize(
    "modules",
    [ALL_LINEAR, ("gate_proj",), ("up_proj", "q_proj"), ("down_proj",)],
    ids=lambda modules: "+".join(modules[:2]),
)
def test_each_expert_has_its_own_product(mixture, tmp_path, modules):
    """The numbers are those of a plain mixture with weights W + s B A."""
    spec = moe_spec()
    factors = random_factors(spec, scale=0.2, modules=modules)
    targets = None if modules == ALL_LINEAR else modules
    folder = write_adapter(tmp_path / "adapter", factors)
    engine = make(mixture, spec=spec, target_modules=targets, initial_adapter=folder)
    expected = summed_by_hand(spec, make_engine(mixture, spec=spec).model_state_dict(), factors)
    assert_near(engine.model_state_dict(), expected, relative=1e-6)
    plain = plain_engine(expected, spec=spec)
    for ours, theirs in zip(
        engine.compute_logprobs(SAMPLES), plain.compute_logprobs(SAMPLES), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)


def test_gradients_of_experts_follow_from_the_summed_weights_by_the_chain_rule(mixture, tmp_path):
    spec = moe_spec()
    factors = random_factors(spec, scale=0.2)
    folder = write_adapter(tmp_path / "adapter", factors)
    engine = make(mixture, spec=spec, unembedding=True, initial_adapter=folder)
    engine.forward_backward(SAMPLES)
    check_chain_rule(engine, factors, spec=spec)
    assert engine.policy.parameters["layers.0.feed_forward.router.weight"].grad is None


def test_adapter_of_experts_is_written_by_expert_and_continues_from_there(mixture, tmp_path):
    spec = moe_spec()
    engine = make(mixture, spec=spec, target_modules=("up_proj", "down_proj"), seed=1)
    name = "layers.0.feed_forward.experts.gate_up_proj_lora.lora_"
    a, b = (engine.policy.parameters[f"{name}{factor}"].detach() for factor in "ab")
    assert (a.shape, b.shape) == ((6, RANK, 36), (6, 40, RANK))
    assert 0.8 / 6 < a.abs().amax(dim=(1, 2)).min() <= a.abs().max() <= 1 / 6  # 1 / sqrt(36)
    assert not b.any()

    train(engine, num_steps=2, loss=CrossEntropyLoss())
    engine.save_adapter(str(tmp_path / "adapter"))
    tensors = load_file(tmp_path / "adapter" / WEIGHTS_FILE)
    assert len(tensors) == 2 * 6 * 2 * 2, "layers, experts, weights, factors"
    prefix = "base_model.model.model.layers.0.mlp.experts.4.up_proj.lora_"
    assert torch.equal(tensors[f"{prefix}A.weight"], a[4])
    # Rows of gate and up projection alternate by key-value head, of which there are two.
    of_up = b[4].unflatten(0, (2, 2, 10))[:, 1].flatten(0, 1)
    assert torch.equal(tensors[f"{prefix}B.weight"], of_up)
    assert not b[4].unflatten(0, (2, 2, 10))[:, 0].any()

    config = json.loads((tmp_path / "adapter" / CONFIG_FILE).read_text())
    assert config["target_modules"] == ["up_proj", "down_proj"]
    started = make(
        mixture,
        spec=spec,
        target_modules=("down_proj", "up_proj"),
        initial_adapter=str(tmp_path / "adapter"),
    )
    trained = engine.compute_logprobs(SAMPLES)
    for ours, theirs in zip(started.compute_logprobs(SAMPLES), trained, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_initial_factors_are_kaiming_uniform_and_zero(assets):
    first = make(assets, seed=1)
    name = "layers.0.feed_forward.gate_up_proj_lora."
    a, b = (first.policy.parameters[f"{name}lora_{factor}"].detach() for factor in "ab")
    assert a.shape == (2 * RANK, 36)
    assert 0.8 / 6 < a.abs().max() <= 1 / 6  # 1 / sqrt(36)
    assert a.std() == pytest.approx(1 / 6 / math.sqrt(3), rel=0.1)
    assert not b.any()


def test_written_adapter_continues_from_there(assets, tmp_path):
    engine = make(assets, target_modules=("q_proj", "down_proj"))
    train(engine, num_steps=2, loss=CrossEntropyLoss())
    engine.save_adapter(str(tmp_path / "adapter"))
    trained = engine.compute_logprobs(SAMPLES)

    fresh = make(assets, target_modules=("q_proj", "down_proj"))
    train(fresh)
    assert fresh.load_checkpoint(str(tmp_path / "adapter")) == 0
    assert not fresh.optimizer.inner.state
    started = make(
        assets, target_modules=("down_proj", "q_proj"), initial_adapter=str(tmp_path / "adapter")
    )
    for other in (fresh, started):
        assert all(
            (a == b).all() for a, b in zip(other.compute_logprobs(SAMPLES), trained, strict=True)
        )
    with pytest.raises(FileExistsError, match="adapter already exists"):
        engine.save_adapter(str(tmp_path / "adapter"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank=0: must be at least 1"),
        ({"alpha": math.inf}, "alpha=inf: must be a finite number above 0"),
        ({"target_modules": ()}, r"target_modules=\(\): must name at least one"),
        (
            {"target_modules": ("q_proj", "query")},
            r"converters\.0: target_modules has 'query'.*valid are",
        ),
        (
            {"target_modules": ("lm_head",)},
            r"converters\.0: target_modules has 'lm_head'.*unembedding=True",
        ),
        ({"unembedding": True}, r"converters\.0: unembedding=True: qwen3 tiny has no output head"),
        (
            {"initial_adapter": "/nowhere"},
            r"converters\.0: file /nowhere/adapter_config.json is missing",
        ),
    ],
)
def test_invalid_setting_is_rejected(settings, message):
    with pytest.raises(ValueError, match=message):
        make(None, **settings)


def test_two_adapters_on_one_model_are_rejected():
    two = LoRA.Config(target_modules=("q_proj",)), LoRA.Config(target_modules=("o_proj",))
    with pytest.raises(
        ValueError, match=r"converters\.1: the model has adapters of an earlier LoRA"
    ):
        make_engine(None, converters=two)


NAME = "model.layers.0.self_attn.q_proj.weight"
A, B = torch.arange(6.0).reshape(2, 3), torch.arange(8.0).reshape(4, 2)


@pytest.fixture
def folder(tmp_path):
    write_peft_folder(
        tmp_path / "adapter", [(NAME, A, B)], rank=2, alpha=4.0, base_model="some/base"
    )
    return tmp_path / "adapter"


def read(folder, **widths):
    return read_peft_folder(folder, rank=2, alpha=4.0, widths={NAME: (3, 4)} | widths)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 8}, "r=8 is not supported: must be rank=2 of the config"),
        ({"lora_alpha": 16}, "lora_alpha=16 is not supported: must be alpha=4.0 of the config"),
        ({"peft_type": "ADALORA"}, "peft_type='ADALORA' is not supported: must be 'LORA'"),
        ({"use_dora": True}, "use_dora=True is not supported: must be False"),
        (
            {"rank_pattern": {"q_proj": 4}},
            "rank_pattern={'q_proj': 4} is not supported: must be {}",
        ),
        (
            {"init_lora_weights": "pissa"},
            "init_lora_weights='pissa' is not supported: must be one of True.*base weights that "
            "PEFT changed",
        ),
        ({"init_lora_weights": "mica"}, "init_lora_weights='mica' is not supported"),
        (
            {"alora_invocation_tokens": [5]},
            r"alora_invocation_tokens=\[5\] is not supported: must be None",
        ),
        ({"task_type": "SEQ_CLS"}, "task_type='SEQ_CLS' is not supported: must be 'CAUSAL_LM'"),
        ({"setting_of_tomorrow": 0.5}, "setting_of_tomorrow=0.5 is not supported: must be None"),
    ],
)
def test_unsupported_adapter_setting_is_rejected(folder, changes, message):
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=message):
        read(folder)


def test_adapter_settings_that_leave_the_product_alone_are_accepted(folder):
    neutral = {
        "init_lora_weights": "gaussian", "lora_dropout": 0.1, "layers_to_transform": [0],
        "qalora_group_size": 8,
        "peft_version": "9", "use_of_tomorrow": False, "config_of_tomorrow": None,
    }  # fmt: skip
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps(config | neutral))
    assert torch.equal(read(folder)[NAME][0], A)


def test_rank_stabilised_scale_is_read_as_a_larger_alpha(folder):
    config = json.loads((folder / CONFIG_FILE).read_text())
    stabilised = config | {"use_rslora": True, "lora_alpha": 3}
    (folder / CONFIG_FILE).write_text(json.dumps(stabilised))
    tensors = read_peft_folder(folder, rank=2, alpha=3 * 2**0.5, widths={NAME: (3, 4)})
    assert torch.equal(tensors[NAME][0], A)
    message = (
        r"use_rslora=True with r=2 and lora_alpha=3 is the scale of alpha=4\.24264069 "
        r"without it: must be alpha=4"
    )
    with pytest.raises(ValueError, match=message):
        read(folder)
    (folder / CONFIG_FILE).write_text(json.dumps(stabilised | {"r": 4}))
    with pytest.raises(ValueError, match="r=4 is not supported: must be rank=2"):
        read_peft_folder(folder, rank=2, alpha=6.0, widths={NAME: (3, 4)})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.0.self_attn.q_proj.lora_A.default.weight", "the adapter's name"),
        ("_orig_mod.model.layers.0.self_attn.q_proj.lora_A.weight", "a compiled model"),
        ("model._fsdp_wrapped_module.layers.0.self_attn.q_proj.lora_A.weight", "a wrapped model"),
        ("model.layers.0.self_attn.q_proj.lora_magnitude_vector", "DoRA's"),
        ("model.embed_tokens.lora_embedding_A", "adapts an embedding"),
        ("model.embed_tokens.weight", "saved embedding or output head"),
        ("lm_head.base_layer.weight", "saved embedding or output head"),
        ("model.norm.modules_to_save.weight", "layer that was trained whole"),
        ("model.layers.0.mlp.experts.base_layer.lora_A.weight", "of all experts in one stack"),
        ("model.layers.0.mlp.experts.lora_B.weight", "of all experts in one stack"),
        ("model.embed_tokens.token_adapter.trainable_tokens_delta", "single trained tokens"),
        ("model.layers.0.self_attn.q_proj.lora_B.bias", "product's bias"),
        ("lm_head.lora_A.weight", r"has shape \[2, 3\], the model needs None"),
    ],
)
def test_tensor_that_is_no_factor_is_explained(folder, name, message):
    tensors = load_file(folder / WEIGHTS_FILE)
    save_file(tensors | {f"base_model.model.{name}": A}, folder / WEIGHTS_FILE)
    with pytest.raises(
        ValueError, match=f"{WEIGHTS_FILE}: tensor base_model.model.{name} .*{message}"
    ):
        read(folder)


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        ({"x.up_proj.weight": (3, 4)}, "x.up_proj.lora_A.weight has shape None, the model needs"),
        ({NAME: (5, 4)}, r"q_proj.lora_A.weight has shape \[2, 3\], the model needs \[2, 5\]"),
        ({NAME: (3, 6)}, r"q_proj.lora_B.weight has shape \[4, 2\], the model needs \[6, 2\]"),
    ],
)
def test_adapter_for_other_layers_is_rejected(folder, widths, message):
    with pytest.raises(ValueError, match=f"{WEIGHTS_FILE}: tensor .*{message}"):
        read(folder, **widths)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: save_file({"base_model.model.lm_head.weight": A}, f),
            "lm_head.weight is a saved embedding or output head",
        ),
        (
            lambda f: f.write_bytes(f.read_bytes()[:-8]),
            f"weights file .*{WEIGHTS_FILE} is not whole",
        ),
        (lambda f: f.unlink(), f"weights file .*{WEIGHTS_FILE} is missing"),
    ],
)
def test_missing_or_truncated_file_and_unknown_tensors_are_named(folder, damage, message):
    damage(folder / WEIGHTS_FILE)
    with pytest.raises(ValueError, match=message):
        read(folder)


# Exchange of adapters and merged weights with PEFT and transformers

TOKENS = torch.tensor([5, 9, 270, 31, 4, 4, 88, 100])
ADAPTED_HEAD: dict[str, Any] = {"rank": 4, "alpha": 6.0, "unembedding": True}
"""Settings with a fractional scale and an adapted output head."""


def open_in_transformers(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


@torch.no_grad()
def their_logits(model):
    return model(TOKENS.unsqueeze(0)).logits[0]


QWEN2 = spec_like(
    qwen2, dim=36, head_dim=6, feed_forward=FeedForward.Config(hidden_dim=20), tie=False
)


@pytest.mark.medium
@pytest.mark.parametrize(
    "spec",
    [small_spec(tie=False), QWEN2, windowed_spec(tie=False), granite_spec()],
    ids=lambda spec: spec.name,
)
def test_adapter_opens_in_peft_with_equal_logits(spec, tmp_path):
    from peft import PeftModel

    untied = write_assets(tmp_path / "base", spec=spec)
    engine = make_engine(untied, spec=spec, converters=(LoRA.Config(**ADAPTED_HEAD),))
    train(engine, num_steps=4, loss=CrossEntropyLoss())
    engine.save_adapter(str(tmp_path / "adapter"))
    base = open_in_transformers(untied)
    before = their_logits(base)
    model = PeftModel.from_pretrained(base, tmp_path / "adapter")
    logits = full_logits(engine.policy.model, TOKENS)
    assert (logits - before).abs().max() > 0.03
    torch.testing.assert_close(their_logits(model), logits, atol=1e-5, rtol=1e-5)
    assert model.peft_config["default"].base_model_name_or_path == untied


@pytest.mark.medium
def test_adapter_made_by_peft_is_trained_further(untied, tmp_path):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    settings = LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=[*ALL_LINEAR, "lm_head"],
        task_type="CAUSAL_LM",
        init_lora_weights=False,
    )
    theirs = get_peft_model(open_in_transformers(untied), settings)
    theirs.save_pretrained(str(tmp_path / "theirs"), save_embedding_layers=False)
    engine = make(untied, tie=False, initial_adapter=str(tmp_path / "theirs"), **ADAPTED_HEAD)
    logits = full_logits(engine.policy.model, TOKENS)
    torch.testing.assert_close(logits, their_logits(theirs), atol=1e-5, rtol=1e-5)
    assert np.isfinite(engine.forward_backward(SAMPLES).loss_mean)
    assert engine.optim_step().policy_version == 1
