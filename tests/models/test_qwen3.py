"""Sizes of the Qwen3 families and their Hugging Face form, compared with transformers."""

from typing import Any

import pytest
import torch

from rl.models import qwen3, qwen3_moe
from rl.models.hf import HFFolder, read_parameters, write_hf_folder
from rl.models.spec import model_spec, spec_from_hf
from tests.support.policies import full_logits, random_model, small_spec

# Published parameter counts, with a tied head counted once.
NUM_PARAMETERS = {
    "0.6B": 596_049_920,
    "1.7B": 1_720_574_976,
    "4B": 4_022_468_096,
    "8B": 8_190_735_360,
    "14B": 14_768_307_200,
    "32B": 32_762_123_264,
}
MOE_NUM_PARAMETERS = {"tiny": 2_109_504, "30B-A3B": 30_532_122_624}
TOKENS = torch.randint(0, 64, (11,), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("flavor", ["tiny", *NUM_PARAMETERS])
def test_dense_flavor_has_the_published_parameters_and_the_tensors_of_transformers(flavor):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    spec = qwen3.model_registry(flavor)
    adapter = spec.adapter(spec.model)
    with torch.device("meta"):
        ours = spec.model.build()
        theirs = Qwen3ForCausalLM(Qwen3Config(**adapter.hf_config()))
    if flavor != "tiny":
        assert sum(p.numel() for p in ours.parameters()) == NUM_PARAMETERS[flavor]
    assert adapter.hf_config()["tie_word_embeddings"] == (flavor in ("tiny", "0.6B", "1.7B", "4B"))
    shapes = {
        name: tensor.shape
        for our_name, parameter in ours.named_parameters()
        for name, tensor in adapter.to_hf(our_name, parameter).items()
    }
    assert shapes == {name: parameter.shape for name, parameter in theirs.named_parameters()}
    assert spec.adapter.config_from_hf(adapter.hf_config()) == spec.model


@pytest.mark.parametrize("flavor", MOE_NUM_PARAMETERS)
def test_moe_flavor_has_the_published_parameters(flavor):
    spec = qwen3_moe.model_registry(flavor)
    with torch.device("meta"):
        model = spec.model.build()
    assert sum(p.numel() for p in model.parameters()) == MOE_NUM_PARAMETERS[flavor]
    assert spec.adapter.config_from_hf(spec.adapter(spec.model).hf_config()) == spec.model


def test_unknown_family_flavor_or_model_type_is_rejected_with_the_valid_ones():
    with pytest.raises(ValueError, match=r"'7B' does not exist.*tiny, 0\.6B, 1\.7B, 4B, 8B, 14B, 32B"):
        model_spec("qwen3", "7B")
    with pytest.raises(ValueError, match=r"'30B' does not exist: must be one of tiny, 30B-A3B"):
        model_spec("qwen3_moe", "30B")
    with pytest.raises(
        ValueError, match="model family 'gpt2' does not exist: must be one of gemma3_text, llama, mistral"
    ):
        model_spec("gpt2", "tiny")
    with pytest.raises(
        ValueError, match="model_type='gpt2' is not supported: must be one of gemma3_text, llama, mistral"
    ):
        spec_from_hf({"model_type": "gpt2"})


def hf_logits(model):
    with torch.no_grad():
        return model(TOKENS[None]).logits[0]


def load(folder):
    opened = HFFolder(folder)
    spec = spec_from_hf(opened.config)
    model, adapter = spec.model.build(), spec.adapter(spec.model)
    opened.check(model, adapter)
    names = [name for name, _ in model.named_parameters()]
    missing, _ = model.load_state_dict(dict(read_parameters(opened, adapter, names)), strict=False)
    assert all(name.endswith("load_balance_bias") for name in missing)
    return model


FOLDERS: list[tuple[dict[str, Any], bool]] = [
    ({"num_heads": 8, "num_kv_heads": 4}, True),
    ({"num_heads": 4, "num_kv_heads": 1, "tie": False}, False),
    ({"num_heads": 8, "num_kv_heads": 4, "experts": True}, True),
    ({"num_heads": 4, "num_kv_heads": 4, "experts": True, "normalize_weights": False, "tie": False}, False),
]


@pytest.mark.parametrize(("sizes", "whole"), FOLDERS, ids=str)
def test_transformers_opens_our_folder_with_equal_logits(tmp_path, sizes, whole):
    from transformers import AutoModelForCausalLM

    spec = small_spec(**sizes)
    ours = random_model(spec, seed=0, biased_router=False)
    write_hf_folder(
        tmp_path / "hf",
        ours.named_parameters(),
        spec.adapter(spec.model),
        dtype=torch.float32,
        max_shard_bytes=10**9 if whole else 20_000,
    )
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists() != whole
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert type(theirs).__name__ == ("Qwen3MoeForCausalLM" if "experts" in sizes else "Qwen3ForCausalLM")
    assert theirs.dtype == torch.float32
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    logits = full_logits(ours, TOKENS)
    assert logits.std() > 0.5
    torch.testing.assert_close(hf_logits(theirs), logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("sizes", "whole"), FOLDERS, ids=str)
def test_we_open_a_folder_of_transformers_with_equal_logits(tmp_path, sizes, whole):
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    common: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": sizes["num_heads"], "num_key_value_heads": sizes["num_kv_heads"],
        "tie_word_embeddings": sizes.get("tie", True), "max_position_embeddings": 128,
        "initializer_range": 0.2, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    }  # fmt: skip
    if "experts" in sizes:
        normalize = sizes.get("normalize_weights", True)
        experts = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
        theirs = Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **experts, norm_topk_prob=normalize))
    else:
        theirs = Qwen3ForCausalLM(Qwen3Config(**common, intermediate_size=48))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path, max_shard_size="1GB" if whole else "20KB")
    assert (tmp_path / "model.safetensors.index.json").exists() != whole
    logits = hf_logits(theirs)
    assert logits.std() > 0.5
    ours = load(tmp_path)
    torch.testing.assert_close(full_logits(ours, TOKENS), logits, atol=1e-5, rtol=1e-5)
    if "experts" in sizes:  # A test of routing needs tokens that go to different experts.
        chosen = ours.layers[0].feed_forward.router.last_chosen_TK.sort().values
        assert len({tuple(c.tolist()) for c in chosen}) > 4


REFUSED: list[tuple[bool, dict[str, Any], str]] = [
    (False, {"model_type": "llama"}, "model_type='llama'.*another architecture.*'qwen3'"),
    (False, {"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM.*another architecture"),
    (
        False,
        {"rope_parameters": {"rope_type": "dynamic"}},
        "'dynamic'.*must be one of default, linear, llama3, yarn",
    ),
    (False, {"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "factor=None: must be a positive"),
    (
        False,
        {"rope_parameters": {"mrope_section": [1]}},
        "rope_parameters has mrope_section: 'default' has no such",
    ),
    (False, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
    (False, {"attention_bias": True}, "attention_bias=True.*must be False"),
    (False, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types.*sliding_attention"),
    (False, {"hidden_act": "gelu"}, "hidden_act='gelu'.*must be 'silu'"),
    (False, {"hidden_size": None}, "hidden_size=None"),
    (False, {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
    (False, {"tie_word_embeddings": "false"}, "tie_word_embeddings='false': must be true or false"),
    (False, {"rope_parameters": 5}, "rope_parameters=5: must be an object"),
    (False, {"num_key_value_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
    (True, {"model_type": "qwen3"}, "model_type='qwen3'.*another architecture.*'qwen3_moe'"),
    (True, {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported: must be 1"),
    (True, {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not supported: must be \[\]"),
    (True, {"output_router_logits": True}, "output_router_logits=True is not supported: must be False"),
    (True, {"num_local_experts": 5}, "'num_experts': 6, 'num_local_experts': 5.*not equal"),
    (True, {"num_experts_per_tok": 7}, "num_experts_per_token=7: must be 1 to num_experts=6"),
    (True, {"moe_intermediate_size": None}, "moe_intermediate_size=None: must be a positive integer"),
]


@pytest.mark.parametrize(("experts", "change", "message"), REFUSED)
def test_unsupported_or_malformed_config_field_is_rejected(experts, change, message):
    spec = small_spec(experts=experts)
    hf = spec.adapter(spec.model).hf_config()
    spec.adapter.config_from_hf(hf)
    with pytest.raises(ValueError, match=message):
        spec.adapter.config_from_hf(hf | change)
