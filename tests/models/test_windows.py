"""Families with sliding windows, compared with transformers, and with themselves in other forms."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rl.models.attention import SequenceLayout
from rl.models.decoder import linear_head
from rl.models.generate import generate
from rl.models.hf import HFFolder, read_parameters, write_hf_folder
from rl.models.spec import model_spec, spec_from_hf
from rl.types import SamplingParams
from tests.support.policies import full_logits, random_model, recomputed_logprobs, small_spec

TOKENS = torch.randint(0, 64, (29,), generator=torch.Generator().manual_seed(5))
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"switches": {"window": 6, "global_layers": (0,)}},
    "mistral": {"switches": {"window": 5}, "tie": False, "head_dim": 16},
    "gemma3_text": {"switches": {"window": 7, "global_layers": (1,)}, "num_kv_heads": 1},
}
NUM_PARAMETERS = {
    ("mistral", "7B-v0.1"): 7_241_732_096,
    ("mistral", "7B-v0.3"): 7_248_023_552,
    ("gemma3_text", "270M"): 268_098_176,
    ("gemma3_text", "1B"): 999_885_952,
}


@pytest.fixture(scope="module", params=FAMILIES)
def spec(request):
    return small_spec(family=request.param, **FAMILIES[request.param])


@pytest.mark.parametrize(
    ("family", "flavor"), [("mistral", "tiny"), ("gemma3_text", "tiny"), *NUM_PARAMETERS]
)
def test_flavor_has_the_published_parameters_and_the_tensors_of_transformers(family, flavor):
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = model_spec(family, flavor)
    adapter = spec.adapter(spec.model)
    fields = adapter.hf_config()
    with torch.device("meta"):
        ours = spec.model.build()
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    assert type(theirs).__name__ == adapter.architecture
    if flavor != "tiny":
        assert sum(p.numel() for p in ours.parameters()) == NUM_PARAMETERS[family, flavor]
    shapes = {
        name: tensor.shape
        for our_name, parameter in ours.named_parameters()
        for name, tensor in adapter.to_hf(our_name, parameter).items()
    }
    assert shapes == {name: parameter.shape for name, parameter in theirs.named_parameters()}
    assert spec.adapter.config_from_hf(fields) == spec.model
    assert spec.adapter.config_from_hf(theirs.config.to_dict()) == spec.model


def hf_logits(model):
    with torch.no_grad():
        return model(TOKENS[None]).logits[0]


def test_transformers_opens_our_folder_with_equal_logits(tmp_path, spec):
    from transformers import AutoModelForCausalLM

    ours = random_model(spec, seed=0)
    adapter = spec.adapter(spec.model)
    write_hf_folder(tmp_path / "hf", ours.named_parameters(), adapter, dtype=torch.float32)
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert type(theirs).__name__ == adapter.architecture
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    logits = full_logits(ours, TOKENS).detach()
    assert logits.std() > 0.5
    torch.testing.assert_close(hf_logits(theirs), logits, atol=1e-5, rtol=1e-5)
    without = replace(spec.model, window=None).build()
    without.load_state_dict(ours.state_dict())
    assert (full_logits(without, TOKENS) - logits).abs().max() > 0.1


COMMON: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2, "rms_norm_eps": 1e-5,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 9000.0, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 700.0}
THEIRS: list[dict[str, Any]] = [
    {"model_type": "mistral", "sliding_window": 4},
    {"model_type": "mistral", "sliding_window": None, "head_dim": 16, "tie_word_embeddings": True},
    {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "head_dim": 8},
    {"model_type": "qwen3", "use_sliding_window": False, "sliding_window": 4, "head_dim": 8},
    {
        "model_type": "qwen3_moe", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1,
        "head_dim": 8, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2,
    },
    {"model_type": "gemma3_text", "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4,
     "sliding_window_pattern": 2},
    {"model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 5, "sliding_window": 9,
     "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "tie_word_embeddings": False,
     "rope_parameters": {"full_attention": LINEAR, "sliding_attention": PLAIN}},
]  # fmt: skip


@pytest.mark.parametrize("fields", THEIRS, ids=lambda fields: fields["model_type"])
def test_we_open_a_folder_of_transformers_with_equal_logits(tmp_path, fields):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**COMMON | fields))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path)
    folder = HFFolder(tmp_path)
    spec = spec_from_hf(folder.config)
    ours, adapter = spec.model.build(), spec.adapter(spec.model)
    folder.check(ours, adapter)
    names = [name for name, _ in ours.named_parameters()]
    ours.load_state_dict(dict(read_parameters(folder, adapter, names)), strict=False)
    logits = hf_logits(theirs)
    assert logits.std() > 0.5
    torch.testing.assert_close(full_logits(ours, TOKENS), logits, atol=1e-5, rtol=1e-5)


def test_fields_of_transformers_4_give_the_same_gemma():
    new = {"full_attention": LINEAR, "sliding_attention": PLAIN}
    old = {
        "rope_theta": 9000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_local_base_freq": 700.0,
    }  # fmt: skip
    common = COMMON | {"model_type": "gemma3_text", "sliding_window": 8}
    model = spec_from_hf(common | {"rope_parameters": new}).model
    assert spec_from_hf(common | old).model == model
    assert model.local_rope is not None
    assert (model.rope.theta, model.local_rope.theta, model.window) == (9000.0, 700.0, 8)
    assert model.tie_embeddings


def test_packed_equals_unpacked_in_logits_and_gradients(spec):
    model = random_model(spec, seed=0)
    lengths = [5, 1, 17, 6]
    positions = torch.cat([torch.arange(n) for n in lengths])
    weights = torch.randn(29, 64, generator=torch.Generator().manual_seed(1))
    layout = SequenceLayout.from_lengths(lengths)
    packed = model(TOKENS, positions=positions, sequences=layout, head=linear_head)
    alone = torch.cat([full_logits(model, part) for part in TOKENS.split(lengths)])
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
    gradients = [torch.autograd.grad((x * weights).sum(), list(model.parameters())) for x in (packed, alone)]
    for of_packed, of_alone in zip(*gradients, strict=True):
        torch.testing.assert_close(of_packed, of_alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("limit", [0, 10**6])
def test_sampling_past_the_window_equals_a_forward_over_the_whole_sequence(spec, limit, monkeypatch):
    monkeypatch.setattr("rl.models.attention.MAX_PADDED_KEYS", limit)
    model = random_model(spec, seed=0)
    prompts = [np.array(ids, dtype=np.int32) for ids in ([3, 1, 4], [9] * 11)]
    sampling = SamplingParams(max_tokens=20, num_samples=2, seed=0)
    for prompt, completions in zip(prompts, generate(model, prompts, sampling=sampling), strict=True):
        for completion in completions:
            expected = recomputed_logprobs(model, prompt, completion, sampling)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=1e-5)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mistral", {"sliding_window": 0}, "sliding_window=0: must be a positive integer"),
    ("qwen3", {"layer_types": ["full_attention"]}, "layer_types=.*must be a list of 2 of"),
    (
        "qwen3",
        {"use_sliding_window": False},
        "sliding_attention.*must be .* 2 of full_attention, with sliding_window=6",
    ),
    (
        "qwen3",
        {"layer_types": ["full_attention", "chunked_attention"]},
        "full_attention and sliding_attention",
    ),
    ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation='gelu'.*must be 'gelu_pytorch_tanh'"),
    ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0.*must be None"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0.*must be None"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True.*must be False"),
    ("gemma3_text", {"rope_parameters": 5}, "rope_parameters=5"),
    ("gemma3_text", {"model_type": "gemma3"}, "'gemma3'.*texts and images.*must be 'gemma3_text'"),
]


@pytest.mark.parametrize(("family", "change", "message"), REFUSED)
def test_unsupported_or_malformed_config_field_is_rejected(family, change, message):
    spec = small_spec(family=family, **FAMILIES[family])
    hf = spec.adapter(spec.model).hf_config()
    assert spec_from_hf(hf).model == spec.model
    with pytest.raises(ValueError, match=message):
        spec_from_hf(hf | change)
