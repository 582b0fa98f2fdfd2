import json

import pytest
import torch
from safetensors.torch import save_file

from rl.models.peft import CONFIG_FILE, WEIGHTS_FILE, read_peft_folder, write_peft_folder

NAME = "model.layers.0.self_attn.q_proj.weight"
A, B = torch.arange(6.0).reshape(2, 3), torch.arange(8.0).reshape(4, 2)


@pytest.fixture
def folder(tmp_path):
    write_peft_folder(tmp_path / "adapter", [(NAME, A, B)], rank=2, alpha=4.0, base_model="some/base")
    return tmp_path / "adapter"


def edit(folder, **changes):
    config = json.loads((folder / CONFIG_FILE).read_text()) | changes
    (folder / CONFIG_FILE).write_text(json.dumps(config))


def read(folder, **widths):
    return read_peft_folder(folder, rank=2, alpha=4.0, widths={NAME: (3, 4)} | widths)


def test_factors_survive_the_folder(folder):
    ((a, b),) = read(folder).values()
    assert torch.equal(a, A)
    assert torch.equal(b, B)
    config = json.loads((folder / CONFIG_FILE).read_text())
    assert config["base_model_name_or_path"] == "some/base"
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 4, ["q_proj"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 8}, "r=8 is not supported: must be rank=2 of the config"),
        ({"lora_alpha": 16}, "lora_alpha=16 is not supported: must be alpha=4.0 of the config"),
        ({"peft_type": "ADALORA"}, "peft_type='ADALORA' is not supported: must be 'LORA'"),
        ({"use_dora": True}, "use_dora=True is not supported: must be False"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern={'q_proj': 4} is not supported: must be {}"),
    ],
)
def test_unsupported_adapter_setting_is_rejected(folder, changes, message):
    edit(folder, **changes)
    with pytest.raises(ValueError, match=message):
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


def test_missing_or_truncated_file_and_unknown_tensors_are_named(folder):
    weights = folder / WEIGHTS_FILE
    whole = weights.read_bytes()
    save_file({"base_model.model.lm_head.weight": A}, weights)
    with pytest.raises(ValueError, match=r"base_model.model.lm_head.weight has shape .* needs None"):
        read(folder)
    weights.write_bytes(whole[:-8])
    with pytest.raises(ValueError, match=f"weights file {weights} is not whole"):
        read(folder)
    weights.unlink()
    with pytest.raises(ValueError, match=f"weights file {weights} is missing"):
        read(folder)
    (folder / CONFIG_FILE).unlink()
    with pytest.raises(ValueError, match=f"file {folder / CONFIG_FILE} is missing"):
        read(folder)
