"""Exchange of adapters and merged weights with PEFT and transformers."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from losses.cross_entropy import CrossEntropyLoss
from rl.models.lora import LoRA
from tests.support.policies import full_logits
from tests.training.parts import make_engine, make_samples, small_spec, write_assets

pytestmark = pytest.mark.medium

SAMPLES = make_samples()
TOKENS = torch.tensor([5, 9, 270, 31, 4, 4, 88, 100])
LORA = LoRA.Config(rank=4, alpha=6.0, unembedding=True)
"""LoRA with a fractional scale and an adapted output head."""


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return write_assets(tmp_path_factory.mktemp("assets") / "model", tie=False)


@pytest.fixture(scope="module")
def engine(assets):
    """Return an engine after four large steps."""
    engine = make_engine(assets, spec=small_spec(tie=False), converters=(LORA,))
    for _ in range(4):
        engine.forward_backward(SAMPLES, loss=CrossEntropyLoss())
        engine.optim_step()
    return engine


def open_in_transformers(folder):
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@torch.no_grad()
def their_logits(model):
    return model(TOKENS.unsqueeze(0)).logits[0]


def test_adapter_opens_in_peft_with_equal_logits(engine, assets, tmp_path):
    from peft import PeftModel

    engine.save_adapter(str(tmp_path / "adapter"))
    base = open_in_transformers(assets)
    before = their_logits(base)
    model = PeftModel.from_pretrained(base, tmp_path / "adapter")
    logits = full_logits(engine.policy.model, TOKENS)
    assert (logits - before).abs().max() > 0.1
    torch.testing.assert_close(their_logits(model), logits, atol=1e-5, rtol=1e-5)
    assert model.peft_config["default"].base_model_name_or_path == assets


def test_adapter_made_by_peft_is_trained_further(assets, tmp_path):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    settings = LoraConfig(
        r=4, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False
    )
    theirs = get_peft_model(open_in_transformers(assets), settings)
    theirs.save_pretrained(str(tmp_path / "theirs"), save_embedding_layers=False)
    lora = replace(LORA, initial_adapter=str(tmp_path / "theirs"))
    engine = make_engine(assets, spec=small_spec(tie=False), converters=(lora,))
    logits = full_logits(engine.policy.model, TOKENS)
    torch.testing.assert_close(logits, their_logits(theirs), atol=1e-5, rtol=1e-5)
    assert np.isfinite(engine.forward_backward(SAMPLES).loss_mean)
    assert engine.optim_step().policy_version == 1
