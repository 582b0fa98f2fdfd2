import json

import pytest
import torch

from rl.models.attention import SequenceLayout
from rl.models.hf import HFFolder, read_parameters, write_hf_folder
from rl.models.qwen3.model import Qwen3, linear_head
from rl.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter, config_from_hf

HEADS = [(8, 4), (4, 1), (4, 4)]
TOKENS = torch.randint(0, 64, (11,), generator=torch.Generator().manual_seed(5))


def our_logits(model: Qwen3) -> torch.Tensor:
    layout = SequenceLayout.from_lengths([len(TOKENS)])
    with torch.no_grad():
        return model(TOKENS, positions=torch.arange(len(TOKENS)), sequences=layout, head=linear_head)


def hf_logits(model):
    with torch.no_grad():
        return model(TOKENS[None]).logits[0]


def load(folder):
    opened = HFFolder(folder)
    config = config_from_hf(opened.config)
    model = config.build()
    adapter = Qwen3StateDictAdapter(config)
    opened.check(model, adapter)
    model.load_state_dict(dict(read_parameters(opened, adapter, [n for n, _ in model.named_parameters()])))
    return model


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_transformers_opens_our_folder_with_equal_logits(
    tmp_path, make_model, tie, num_heads, num_kv_heads, max_shard_bytes
):
    from transformers import AutoModelForCausalLM

    ours = make_model(num_heads=num_heads, num_kv_heads=num_kv_heads, tie=tie)
    write_hf_folder(
        tmp_path / "hf",
        ours.named_parameters(),
        Qwen3StateDictAdapter(ours.config),
        dtype=torch.float32,
        max_shard_bytes=max_shard_bytes,
    )
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists() == (max_shard_bytes < 10**9)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(theirs).__name__ == "Qwen3ForCausalLM"
    assert theirs.dtype == torch.float32
    logits = our_logits(ours)
    assert logits.std() > 0.5
    torch.testing.assert_close(hf_logits(theirs), logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
def test_we_open_a_folder_of_transformers_with_equal_logits(
    tmp_path, tie, num_heads, num_kv_heads, max_shard_size
):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    theirs = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
            num_attention_heads=num_heads, num_key_value_heads=num_kv_heads, tie_word_embeddings=tie,
            max_position_embeddings=128, initializer_range=0.2, rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        )
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "20KB")
    logits = hf_logits(theirs)
    assert logits.std() > 0.5
    torch.testing.assert_close(our_logits(load(tmp_path)), logits, atol=1e-5, rtol=1e-5)


def test_fused_rows_are_ordered_by_key_value_head(make_config):
    # Two groups; a group has two query heads, each head 8 rows, and 24 feed-forward rows.
    adapter = Qwen3StateDictAdapter(make_config(num_heads=4, num_kv_heads=2))
    q, k, v = torch.arange(32), torch.arange(100, 116), torch.arange(200, 216)
    qkv = adapter.from_hf("layers.1.attention.qkv_proj.weight", [x[:, None] for x in (q, k, v)])
    group_0 = [*range(16), *range(100, 108), *range(200, 208)]
    group_1 = [*range(16, 32), *range(108, 116), *range(208, 216)]
    assert qkv[:, 0].tolist() == group_0 + group_1
    gate, up = torch.arange(48), torch.arange(100, 148)
    gate_up = adapter.from_hf("layers.0.feed_forward.gate_up_proj.weight", [x[:, None] for x in (gate, up)])
    assert gate_up[:, 0].tolist() == [
        *range(24), *range(100, 124),
        *range(24, 48), *range(124, 148),
    ]  # fmt: skip


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_every_parameter_comes_back_bit_exact(make_model, num_heads, num_kv_heads):
    model = make_model(num_heads=num_heads, num_kv_heads=num_kv_heads, tie=False)
    adapter = Qwen3StateDictAdapter(model.config)
    for name, parameter in model.named_parameters():
        theirs = adapter.to_hf(name, parameter)
        assert list(theirs) == adapter.hf_names(name)
        assert torch.equal(adapter.from_hf(name, list(theirs.values())), parameter)


def test_config_comes_back_equal(make_config):
    config = make_config(num_heads=8, num_kv_heads=4, tie=False, theta=123456.0)
    hf = json.loads(json.dumps(Qwen3StateDictAdapter(config).hf_config()))
    assert config_from_hf(hf) == config


def test_rope_theta_is_read_from_old_and_new_configs(make_config):
    hf = Qwen3StateDictAdapter(make_config()).hf_config()
    del hf["rope_parameters"]
    old = hf | {"rope_theta": 7.5, "rope_scaling": None}
    assert config_from_hf(old).rope.theta == 7.5
    new = hf | {"rope_theta": 7.5, "rope_parameters": {"rope_type": "default", "rope_theta": 9.5}}
    assert config_from_hf(new).rope.theta == 9.5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "llama"}, "model_type='llama'.*another architecture.*'qwen3'"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM.*another architecture"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}},
            "rope_parameters=.*yarn",
        ),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling=.*linear",
        ),
        ({"rope_parameters": None, "rope_theta": None}, "rope_theta=None"),
        ({"attention_bias": True}, "attention_bias=True.*must be False"),
        ({"use_sliding_window": True}, "use_sliding_window=True.*must be False"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types.*sliding_attention"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'.*must be 'silu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.*must be None"),
        ({"hidden_size": None}, "hidden_size=None"),
        ({"rms_norm_eps": None}, "config.json: rms_norm_eps=None: must be a positive number"),
        ({"rms_norm_eps": "abc"}, "rms_norm_eps='abc': must be a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"initializer_range": True}, "initializer_range=True"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false': must be true or false"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta=inf: must be a positive number"),
        ({"rope_parameters": 5}, "rope_parameters=5: must be an object"),
        ({"layer_types": 5}, "layer_types=5: must be a list"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers='2'"),
        ({"num_key_value_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
    ],
)
def test_what_the_model_does_not_do_is_refused_by_name(make_config, change, named):
    hf = Qwen3StateDictAdapter(make_config()).hf_config()
    config_from_hf(hf)
    with pytest.raises(ValueError, match=named):
        config_from_hf(hf | change)
