import pytest
import torch

from rl.models.qwen3 import model_registry
from rl.models.qwen3.model import Qwen3

# Parameters as published, each with a tied head counted once.
NUM_PARAMETERS = {
    "0.6B": 596_049_920,
    "1.7B": 1_720_574_976,
    "4B": 4_022_468_096,
    "8B": 8_190_735_360,
    "14B": 14_768_307_200,
    "32B": 32_762_123_264,
}


@pytest.mark.parametrize("flavor", NUM_PARAMETERS)
def test_flavor_has_the_published_number_of_parameters(flavor):
    spec = model_registry(flavor)
    with torch.device("meta"):
        model = spec.model.build()
    assert sum(p.numel() for p in model.parameters()) == NUM_PARAMETERS[flavor]


@pytest.mark.parametrize("flavor", ["tiny", *NUM_PARAMETERS])
def test_flavor_has_the_tensors_of_transformers(flavor):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    spec = model_registry(flavor)
    adapter = spec.adapter(spec.model)
    with torch.device("meta"):
        ours = spec.model.build()
        theirs = Qwen3ForCausalLM(Qwen3Config(**adapter.hf_config()))
    assert adapter.hf_config()["tie_word_embeddings"] == (flavor in ("tiny", "0.6B", "1.7B", "4B"))
    shapes = {
        name: tensor.shape
        for our_name, parameter in ours.named_parameters()
        for name, tensor in adapter.to_hf(our_name, parameter).items()
    }
    assert shapes == {name: parameter.shape for name, parameter in theirs.named_parameters()}
    assert spec.from_hf_config(adapter.hf_config()) == spec.model


def test_a_spec_is_fresh_at_every_call():
    first, second = model_registry("tiny").model, model_registry("tiny").model
    assert isinstance(first, Qwen3.Config)
    first.block.attention.num_heads = 4
    assert second != first
    assert second == model_registry("tiny").model


def test_an_unknown_flavor_lists_those_there_are():
    with pytest.raises(ValueError, match=r"'7B' does not exist.*tiny, 0\.6B, 1\.7B, 4B, 8B, 14B, 32B"):
        model_registry("7B")
