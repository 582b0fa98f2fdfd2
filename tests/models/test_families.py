"""Sizes of the model families and their Hugging Face form, compared with transformers."""

from typing import Any

import pytest
import torch

from examples import custom_model
from rl.models import gemma3_text, llama, mistral, qwen2, qwen3, qwen3_moe
from rl.models.files.hf import HFFolder, read_parameters, write_hf_folder
from rl.models.spec import FAMILIES, model_spec, spec_from_hf
from tests.support.policies import full_logits, small_spec

# Published parameter counts, with a tied head counted once.
NUM_PARAMETERS: list[tuple[Any, dict[str, int | None]]] = [
    (
        qwen3,
        {
            "tiny": None, "0.6B": 596_049_920, "1.7B": 1_720_574_976, "4B": 4_022_468_096,
            "8B": 8_190_735_360,
            "14B": 14_768_307_200, "32B": 32_762_123_264,
        },
    ),
    (
        qwen2,
        {
            "tiny": None, "0.5B": 494_032_768, "1.5B": 1_543_714_304, "3B": 3_085_938_688,
            "7B": 7_615_616_512,
        },
    ),
    (
        llama,
        {
            "tiny": None, "SmolLM2-135M": 134_515_008, "SmolLM2-360M": 361_821_120,
            "SmolLM2-1.7B": 1_711_376_384,
            "3.2-1B": 1_235_814_400, "3.2-3B": 3_212_749_824, "3.1-8B": 8_030_261_248,
        },
    ),
    (mistral, {"tiny": None, "7B-v0.1": 7_241_732_096, "7B-v0.3": 7_248_023_552}),
    (gemma3_text, {"tiny": None, "270M": 268_098_176, "1B": 999_885_952}),
    (custom_model, {"tiny": None}),
]  # fmt: skip
MOE_NUM_PARAMETERS = {"tiny": 2_109_504, "30B-A3B": 30_532_122_624}
TOKENS = torch.randint(0, 64, (13,), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    ("family", "flavor", "num_parameters"),
    [(family, *flavor) for family, flavors in NUM_PARAMETERS for flavor in flavors.items()],
)
def test_dense_flavor_has_the_published_parameters_and_the_tensors_of_transformers(
    family, flavor, num_parameters
):
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = family.model_registry(flavor)
    adapter = spec.adapter(spec.model)
    config = AutoConfig.for_model(**adapter.hf_config())
    with torch.device("meta"):
        ours = spec.model.build()
        theirs = AutoModelForCausalLM.from_config(config)
    assert type(theirs).__name__ == adapter.architecture
    if num_parameters is not None:
        assert sum(p.numel() for p in ours.parameters()) == num_parameters
    shapes = {
        name: tensor.shape
        for our_name, parameter in ours.named_parameters()
        for name, tensor in adapter.to_hf(our_name, parameter).items()
    }
    assert shapes == {name: parameter.shape for name, parameter in theirs.named_parameters()}
    assert spec_from_hf(adapter.hf_config(), flavor=flavor) == spec


@pytest.mark.parametrize("flavor", MOE_NUM_PARAMETERS)
def test_moe_flavor_has_the_published_parameters(flavor):
    spec = qwen3_moe.model_registry(flavor)
    with torch.device("meta"):
        model = spec.model.build()
    assert sum(p.numel() for p in model.parameters()) == MOE_NUM_PARAMETERS[flavor]
    assert spec.adapter.config_from_hf(spec.adapter(spec.model).hf_config()) == spec.model


def test_unknown_family_flavor_or_model_type_is_rejected_with_the_valid_ones():
    with pytest.raises(
        ValueError, match=r"'7B' does not exist.*tiny, 0\.6B, 1\.7B, 4B, 8B, 14B, 32B"
    ):
        model_spec("qwen3", "7B")
    with pytest.raises(ValueError, match=r"'30B' does not exist: must be one of tiny, 30B-A3B"):
        model_spec("qwen3_moe", "30B")
    for reject in (
        lambda: model_spec("gpt2", "tiny"),
        lambda: spec_from_hf({"model_type": "gpt2"}),
    ):
        with pytest.raises(
            ValueError,
            match=(
                r"'gpt2' is not supported.*gemma3_text, llama, mistral, qwen2, "
                r"qwen3.*docs/models.md"
            ),
        ):
            reject()


def test_registered_family_is_found_by_its_model_type():
    assert FAMILIES["granite"] is custom_model.GraniteAdapter
    assert model_spec("granite", "tiny") == custom_model.model_registry("tiny")


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
    return model, spec


SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 36, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.2, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e3},
}  # fmt: skip
EXPERTS = {
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "truncate": False}
GRANITE = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6,
    "logits_scaling": 0.8,
}  # fmt: skip


WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


def rope(kind, **fields):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5e3} | fields}


LOCAL = {"rope_type": "default", "rope_theta": 700.0}
GEMMA = {
    "query_pre_attn_scalar": 8, "sliding_window": 4,
    "rope_parameters": {"full_attention": rope("default")["rope_parameters"],
        "sliding_attention": LOCAL},
}  # fmt: skip
LINEAR = rope("linear", factor=4.0)["rope_parameters"]


FOLDERS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("qwen3", {"num_key_value_heads": 1, "tie_word_embeddings": False, "attention_bias": True}),
    ("qwen3", rope("yarn", **YARN)),
    ("qwen3_moe", EXPERTS),
    ("qwen3_moe", EXPERTS | {"num_key_value_heads": 4, "norm_topk_prob": False,
        "tie_word_embeddings": False}),
    ("qwen2", {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 6}),
    ("qwen2", {"tie_word_embeddings": False, "head_dim": 9 * 2} | rope("yarn", **YARN)),
    ("qwen2", WINDOW),
    ("qwen3", WINDOW),
    ("qwen3_moe", EXPERTS | WINDOW | {"num_key_value_heads": 1}),
    ("mistral", {"sliding_window": 4, "tie_word_embeddings": False}),
    ("mistral", {"sliding_window": None, "head_dim": None, "hidden_size": 40}),
    ("gemma3_text", GEMMA | {"sliding_window_pattern": 2}),
    (
        "gemma3_text",
        {
            "query_pre_attn_scalar": 5, "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention"],
            "tie_word_embeddings": False, "head_dim": 16, "num_key_value_heads": 1,
            "attention_bias": True,
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL},
        },
    ),
    ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 4}),
    ("llama", {"attention_bias": True, "mlp_bias": True,
        "tie_word_embeddings": False} | rope("llama3", **LLAMA3)),
    ("llama", {"head_dim": 16, "num_key_value_heads": 4, "intermediate_size": 54} | rope("linear",
        factor=4.0)),
    ("granite", GRANITE | {"head_dim": 9 * 2}),
    ("granite", GRANITE | {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "fields"), FOLDERS, ids=[f"{kind}-{i}" for i, (kind, _) in enumerate(FOLDERS)]
)
def test_folders_of_transformers_and_ours_have_equal_logits(tmp_path, model_type, fields):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SMALL | fields)
    theirs = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter += 0.3 * torch.randn_like(parameter)
    whole = bool(fields.get("tie_word_embeddings", True))
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="1GB" if whole else "20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists() != whole
    expected = hf_logits(theirs)
    assert expected.std() > 0.5
    ours, spec = load(tmp_path / "theirs")
    torch.testing.assert_close(full_logits(ours, TOKENS), expected, atol=1e-5, rtol=1e-5)
    if spec.model.has_experts:  # A test of routing needs tokens that go to different experts.
        chosen = ours.layers[0].feed_forward.router.last_chosen_TK.sort().values
        assert len({tuple(c.tolist()) for c in chosen}) > 3

    adapter = spec.adapter(spec.model)
    shard_bytes = 10**9 if whole else 20_000
    write_hf_folder(
        tmp_path / "ours",
        ours.named_parameters(),
        adapter,
        dtype=torch.float32,
        max_shard_bytes=shard_bytes,
    )
    assert (tmp_path / "ours" / "model.safetensors.index.json").exists() != whole
    assert adapter.config_from_hf(adapter.hf_config()) == spec.model
    again, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert type(again) is type(theirs)
    assert again.dtype == torch.float32
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    torch.testing.assert_close(hf_logits(again), expected, atol=1e-6, rtol=1e-6)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3", {"model_type": "llama"}, "model_type='llama'.*another architecture.*'qwen3'"),
    ("qwen3", {"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM.*another "
                                                          "architecture"),
    ("qwen3", {"architectures": 5}, "architectures=5.*must be"),
    ("qwen3", {"rope_parameters": {"rope_type": "dynamic"}}, "'dynamic'.*must be one of default, "
                                                             "linear, llama3, yarn"),
    ("qwen3", {"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "factor=None: must be "
                                                                             "a positive"),
    ("qwen3", {"rope_parameters": {"mrope_section": [1]}}, "rope_parameters has mrope_section: "
                                                           "'default' has no such"),
    ("qwen3", {"rope_parameters": 5}, "rope_parameters=5: must be an object"),
    ("qwen3", {"rope_parameters": {"rope_type": []}}, r"rope_type \[\], which is not supported"),
    ("qwen3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling=.* differ: must "
                                                                   "be the same, or one"),
    ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
    ("qwen3", WINDOW | {"max_window_layers": "1"}, "max_window_layers='1': must be an integer from "
                                                   "1"),
    ("qwen3", {"attention_bias": "yes"}, "attention_bias='yes': must be true or false"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types.*sliding_attention"),
    ("qwen3", {"hidden_act": "gelu"}, "hidden_act='gelu'.*must be 'silu'"),
    ("qwen3", {"hidden_size": None}, "hidden_size=None"),
    ("qwen3", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
    ("qwen3", {"tie_word_embeddings": "false"}, "tie_word_embeddings='false': must be true or "
                                                "false"),
    ("qwen3", {"num_key_value_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
    ("llama", {"pretraining_tp": 2}, "pretraining_tp=2 is not supported: must be 1"),
    ("mistral", {"sliding_window": 0}, "sliding_window=0: must be an integer from 1"),
    ("mistral", {"layer_types": ["full_attention"]}, "layer_types=.*must be a list of 2 of"),
    ("mistral", {"layer_types": ["full_attention", "chunked_attention"]}, "full_attention and "
                                                                          "sliding_attention"),
    ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation='gelu'.*must be "
                                                   "'gelu_pytorch_tanh'"),
    ("gemma3_text", {"final_logit_softcapping": 30.0},
        "final_logit_softcapping=30.0.*must be None"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0.*must be None"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True.*must "
                                                           "be False"),
    ("gemma3_text", {"rope_parameters": 5}, "rope_parameters=5: must be an object"),
    ("gemma3_text", {"model_type": "gemma3"}, "'gemma3'.*texts and images.*must be 'gemma3_text'"),
    ("qwen3_moe", {"model_type": "qwen3"}, "model_type='qwen3'.*another architecture.*'qwen3_moe'"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported: must be 1"),
    ("qwen3_moe", {"mlp_only_layers": [0]},
        r"mlp_only_layers=\[0\] is not supported: must be \[\]"),
    ("qwen3_moe", {"output_router_logits": True}, "output_router_logits=True is not supported: "
                                                  "must be False"),
    ("qwen3_moe", {"num_local_experts": 5}, "'num_experts': 6, 'num_local_experts': 5.*not equal"),
    ("qwen3_moe", {"num_experts_per_tok": 7},
        "num_experts_per_token=7: must be 1 to num_experts=6"),
    ("qwen3_moe", {"moe_intermediate_size": None}, "moe_intermediate_size=None: must be an integer "
                                                   "from 1"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "change", "message"), REFUSED)
def test_unsupported_or_malformed_config_field_is_rejected(family, change, message):
    spec = small_spec(family=family, switches={"window": 6} if family == "mistral" else {})
    hf = spec.adapter(spec.model).hf_config()
    assert spec.adapter.config_from_hf(hf) == spec.model
    read = spec_from_hf if change.get("model_type") == "gemma3" else spec.adapter.config_from_hf
    with pytest.raises(ValueError, match=message):
        read(hf | change)


def test_fields_of_transformers_4_give_the_same_gemma():
    new = {"full_attention": LINEAR, "sliding_attention": LOCAL}
    old = {
        "rope_theta": 5e3, "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "rope_local_base_freq": 700.0,
    }  # fmt: skip
    common = SMALL | {"model_type": "gemma3_text", "sliding_window": 8, "num_hidden_layers": 7}
    del common["tie_word_embeddings"], common["rope_parameters"]
    model = spec_from_hf(common | {"rope_parameters": new}).model
    assert spec_from_hf(common | old).model == model
    assert (model.window, model.global_layers, model.tie_embeddings) == (8, (5,), True)
    for kind in new:  # One that is not there has the fields of transformers 4.
        assert spec_from_hf(common | old | {"rope_parameters": {kind: new[kind]}}).model == model


@pytest.mark.parametrize(("given", "global_layers"), [(None, (0, 1)), (0, ()), (1, (0,))])
def test_number_of_layers_before_the_windows_may_be_zero_or_missing(given, global_layers):
    hf = SMALL | WINDOW | {"model_type": "qwen2", "max_window_layers": given}
    model = spec_from_hf(hf).model
    assert (model.global_layers if model.window else (0, 1)) == global_layers


def test_llama_2_has_the_defaults_of_transformers():
    hf = {
        "model_type": "llama",
        **SMALL,
        "rope_parameters": None,
        "num_key_value_heads": None,
        "head_dim": None,
    }
    del hf["rms_norm_eps"]
    config = spec_from_hf(hf).model
    assert (config.rope.theta, config.norm_eps) == (10_000.0, 1e-6)
    assert (config.block.attention.num_kv_heads, config.block.attention.head_dim) == (4, 9)
