import pytest
import torch

from rl.models.qwen3.model import Qwen3
from rl.models.qwen3_moe import model_registry
from rl.models.qwen3_moe.model import MoE

# Of 30B-A3B as published.
NUM_PARAMETERS = {"tiny": 2_109_504, "30B-A3B": 30_532_122_624}


@pytest.mark.parametrize("flavor", NUM_PARAMETERS)
def test_flavor_has_its_number_of_parameters_and_the_tensors_of_transformers(flavor):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    spec = model_registry(flavor)
    adapter = spec.adapter(spec.model)
    with torch.device("meta"):
        ours = spec.model.build()
        theirs = Qwen3MoeForCausalLM(Qwen3MoeConfig(**adapter.hf_config()))
    assert sum(p.numel() for p in ours.parameters()) == NUM_PARAMETERS[flavor]
    assert sum(p.numel() for p in theirs.parameters()) == NUM_PARAMETERS[flavor]
    written = {
        hf_name: tuple(tensor.shape)
        for name, parameter in ours.named_parameters()
        for hf_name, tensor in adapter.to_hf(name, parameter).items()
    }
    config = adapter.hf_config()
    experts = range(config["num_experts"])
    width, dim = config["moe_intermediate_size"], config["hidden_size"]
    # transformers stacks the experts when it loads a folder, where each has three matrices of its own.
    expected = {n: tuple(p.shape) for n, p in theirs.named_parameters() if ".experts." not in n}
    for i in range(config["num_hidden_layers"]):
        for part, shape in (
            ("gate_proj", (width, dim)),
            ("up_proj", (width, dim)),
            ("down_proj", (dim, width)),
        ):
            expected |= {f"model.layers.{i}.mlp.experts.{n}.{part}.weight": shape for n in experts}
    assert written == expected
    assert spec.from_hf_config(config) == spec.model


def test_a_spec_is_fresh_at_every_call():
    first, second = model_registry("tiny").model, model_registry("tiny").model
    assert isinstance(first, Qwen3.Config)
    assert isinstance(first.block.feed_forward, MoE.Config)
    first.block.feed_forward.num_experts = 4
    assert second != first
    assert second == model_registry("tiny").model


def test_an_unknown_flavor_lists_those_there_are():
    with pytest.raises(ValueError, match=r"'30B' does not exist: must be one of tiny, 30B-A3B"):
        model_registry("30B")
