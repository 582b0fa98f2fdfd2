import json

import pytest
import torch

from rl.models.attention import SequenceLayout
from rl.models.hf import HFFolder, read_parameters, write_hf_folder
from rl.models.qwen3.model import Qwen3, linear_head
from rl.models.qwen3_moe.state_dict_adapter import Qwen3MoeStateDictAdapter, config_from_hf

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
    adapter = Qwen3MoeStateDictAdapter(config)
    opened.check(model, adapter)
    names = [name for name, _ in model.named_parameters()]
    missing, _ = model.load_state_dict(dict(read_parameters(opened, adapter, names)), strict=False)
    assert all(name.endswith("load_balance_bias") for name in missing)
    return model


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "tie", "normalize", "max_shard_bytes"),
    [(8, 4, True, True, 10**9), (4, 1, False, True, 20_000), (4, 4, True, False, 20_000)],
)
def test_transformers_opens_our_folder_with_equal_logits(
    tmp_path, make_model, num_heads, num_kv_heads, tie, normalize, max_shard_bytes
):
    from transformers import AutoModelForCausalLM

    ours = make_model(num_heads=num_heads, num_kv_heads=num_kv_heads, tie=tie, normalize_weights=normalize)
    write_hf_folder(
        tmp_path / "hf",
        ours.named_parameters(),
        Qwen3MoeStateDictAdapter(ours.config),
        dtype=torch.float32,
        max_shard_bytes=max_shard_bytes,
    )
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists() == (max_shard_bytes < 10**9)
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert type(theirs).__name__ == "Qwen3MoeForCausalLM"
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    logits = our_logits(ours)
    assert logits.std() > 0.5
    torch.testing.assert_close(hf_logits(theirs), logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "tie", "normalize", "max_shard_size"),
    [(8, 4, True, True, "1GB"), (4, 1, False, True, "20KB"), (4, 4, True, False, "20KB")],
)
def test_we_open_a_folder_of_transformers_with_equal_logits(
    tmp_path, num_heads, num_kv_heads, tie, normalize, max_shard_size
):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    theirs = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=64, hidden_size=32, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2,
            num_hidden_layers=2, head_dim=8, num_attention_heads=num_heads, num_key_value_heads=num_kv_heads,
            norm_topk_prob=normalize, tie_word_embeddings=tie, max_position_embeddings=128,
            initializer_range=0.2, rms_norm_eps=1e-5,
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
    ours = load(tmp_path)
    torch.testing.assert_close(our_logits(ours), logits, atol=1e-5, rtol=1e-5)
    assert len({tuple(c.tolist()) for c in chosen_experts(ours)}) > 4


def chosen_experts(model):
    """[T, K] of the first layer: a test of routing needs tokens that go to different experts."""
    our_logits(model)
    layout = SequenceLayout.from_lengths([len(TOKENS)])
    model(TOKENS, positions=torch.arange(len(TOKENS)), sequences=layout)
    return model.layers[0].feed_forward.router.last_chosen_TK.sort().values


def test_rows_of_each_expert_are_ordered_by_key_value_head(make_config):
    # Three experts of 24 rows, in two groups of 12.
    adapter = Qwen3MoeStateDictAdapter(make_config(num_experts=3))
    gates = [torch.arange(1000 * n, 1000 * n + 24)[:, None] for n in range(3)]
    ups = [gate + 100 for gate in gates]
    theirs = [x for pair in zip(gates, ups, strict=True) for x in pair]
    name = "layers.1.feed_forward.experts.gate_up_proj"
    stacked = adapter.from_hf(name, theirs)
    assert stacked.shape == (3, 48, 1)
    of_first = [*range(12), *range(100, 112), *range(12, 24), *range(112, 124)]
    assert stacked[:, :, 0].tolist() == [[1000 * n + row for row in of_first] for n in range(3)]
    assert adapter.hf_names(name)[:3] == [
        "model.layers.1.mlp.experts.0.gate_proj.weight",
        "model.layers.1.mlp.experts.0.up_proj.weight",
        "model.layers.1.mlp.experts.1.gate_proj.weight",
    ]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_every_tensor_comes_back_bit_exact(make_model, num_heads, num_kv_heads):
    model = make_model(num_heads=num_heads, num_kv_heads=num_kv_heads, tie=False)
    adapter = Qwen3MoeStateDictAdapter(model.config)
    seen: set[str] = set()
    for name, tensor in model.state_dict().items():
        theirs = adapter.to_hf(name, tensor)
        assert list(theirs) == adapter.hf_names(name)
        assert torch.equal(adapter.from_hf(name, list(theirs.values())), tensor)
        seen |= theirs.keys()
    # Of a layer: 7 of attention and norms, wait for the router 2, and 3 of each of 6 experts.
    assert len(seen) == 3 + 2 * (8 + 2 + 18)


def test_config_comes_back_equal(make_config):
    config = make_config(num_heads=8, num_kv_heads=4, tie=False, theta=123456.0, normalize_weights=False)
    hf = json.loads(json.dumps(Qwen3MoeStateDictAdapter(config).hf_config()))
    assert config_from_hf(hf) == config


@pytest.mark.parametrize("field", ["num_experts", "num_local_experts"])
def test_the_number_of_experts_is_read_from_either_of_its_names(make_config, field):
    config = make_config()
    hf = Qwen3MoeStateDictAdapter(config).hf_config()
    del hf[field]
    assert config_from_hf(hf) == config


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "qwen3"}, "model_type='qwen3'.*another architecture.*'qwen3_moe'"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM.*another architecture"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported: must be 1"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not supported: must be \[\]"),
        ({"output_router_logits": True}, "output_router_logits=True is not supported: must be False"),
        ({"num_local_experts": 5}, "'num_experts': 6, 'num_local_experts': 5.*not equal"),
        ({"num_experts": None, "num_local_experts": None}, "num_experts=None: must be a positive integer"),
        ({"num_experts_per_tok": 7}, "num_experts_per_token=7: must be 1 to num_experts=6"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size=None: must be a positive integer"),
        ({"attention_bias": True}, "attention_bias=True.*must be False"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.*must be None"),
    ],
)
def test_what_the_model_does_not_do_is_refused_by_name(make_config, change, named):
    hf = Qwen3MoeStateDictAdapter(make_config()).hf_config()
    config_from_hf(hf)
    with pytest.raises(ValueError, match=named):
        config_from_hf(hf | change)


def test_a_name_of_no_parameter_is_refused(make_config):
    with pytest.raises(KeyError, match=r"feed_forward\.gate_up_proj\.bias"):
        Qwen3MoeStateDictAdapter(make_config()).hf_names("layers.0.feed_forward.gate_up_proj.bias")
