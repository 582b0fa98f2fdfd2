import json

import pytest
import torch
from safetensors.torch import save_file

from rl.models.converters.peft_folder import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    PeftSettings,
    read_peft_folder,
    write_peft_folder,
)

NAME = "model.layers.0.self_attn.q_proj.weight"
A, B = torch.arange(6.0).reshape(2, 3), torch.arange(8.0).reshape(4, 2)
SETTINGS = PeftSettings(rank=2, alpha=4.0, target_modules=("q_proj",), base_model="some/base")


@pytest.fixture
def folder(tmp_path):
    write_peft_folder(tmp_path / "adapter", [(NAME, A, B)], SETTINGS)
    return tmp_path / "adapter"


def edit(folder, **changes):
    config = json.loads((folder / CONFIG_FILE).read_text()) | changes
    (folder / CONFIG_FILE).write_text(json.dumps(config))


def test_factors_survive_the_folder(folder):
    found = read_peft_folder(folder, rank=2, alpha=4.0)
    assert torch.equal(found.a[NAME], A)
    assert torch.equal(found.b[NAME], B)
    found.check({NAME: (3, 4)})
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
        ({"use_rslora": True}, "use_rslora=True is not supported: must be False"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern={'q_proj': 4} is not supported: must be {}"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not supported: must be None"),
        ({"bias": "all"}, "bias='all' is not supported: must be 'none'"),
    ],
)
def test_an_adapter_that_means_something_else_is_refused(folder, changes, message):
    edit(folder, **changes)
    with pytest.raises(ValueError, match=message):
        read_peft_folder(folder, rank=2, alpha=4.0)


def test_an_adapter_for_other_layers_is_refused_by_the_first_tensor(folder):
    found = read_peft_folder(folder, rank=2, alpha=4.0)
    other = "model.layers.0.mlp.up_proj.weight"
    for widths, message in (
        (
            {NAME: (3, 4), other: (3, 4)},
            "model.layers.0.mlp.up_proj.lora_A.weight is missing",
        ),
        ({}, "q_proj.lora_A.weight has no place in the model"),
        ({NAME: (5, 4)}, r"q_proj.lora_A.weight has shape \[2, 3\], the model needs \[2, 5\]"),
        ({NAME: (3, 6)}, r"q_proj.lora_B.weight has shape \[4, 2\], the model needs \[6, 2\]"),
    ):
        with pytest.raises(ValueError, match=f"{WEIGHTS_FILE}: tensor .*{message}"):
            found.check(widths)


def test_files_that_are_missing_or_cut_off_are_named(folder):
    weights = folder / WEIGHTS_FILE
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    with pytest.raises(ValueError, match=f"weights file {weights} is not whole"):
        read_peft_folder(folder, rank=2, alpha=4.0)
    weights.unlink()
    with pytest.raises(ValueError, match=f"weights file {weights} is missing"):
        read_peft_folder(folder, rank=2, alpha=4.0)
    (folder / CONFIG_FILE).unlink()
    with pytest.raises(ValueError, match=f"file {folder / CONFIG_FILE} is missing"):
        read_peft_folder(folder, rank=2, alpha=4.0)


def test_a_tensor_that_is_no_factor_is_named(tmp_path):
    write_peft_folder(tmp_path / "adapter", [], SETTINGS)
    save_file({"base_model.model.lm_head.weight": A}, tmp_path / "adapter" / WEIGHTS_FILE)
    with pytest.raises(ValueError, match=r"tensor base_model.model.lm_head.weight is no factor"):
        read_peft_folder(tmp_path / "adapter", rank=2, alpha=4.0)
