"""Block-scaled FP8 folders: read as float32, exported without quantization."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl.distributed.process_group import World
from rl.models.files.hf import HFFolder, read_parameters, write_hf_folder
from rl.models.files.tokenizer import build_byte_tokenizer
from rl.training.engine import TrainingEngine
from tests.support.fp8_folders import quantize_folder
from tests.support.policies import random_model, small_spec


def fp8_folder(path, *, block, experts=False):
    """Return the folder, its spec and its weights as they are meant; the model has widths 32 and
    48.
    """
    spec = small_spec(tie=False, experts=experts, vocab_size=320)
    model = random_model(spec, seed=0)
    write_hf_folder(path, model.named_parameters(), spec.adapter(spec.model), dtype=torch.bfloat16)
    return path, spec, quantize_folder(path, block=block)


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("block", [(128, 128), (16, 16), (20, 24)])
def test_weights_are_those_of_each_block_times_its_scale(tmp_path, block, experts):
    folder, spec, meant = fp8_folder(tmp_path / "hf", block=block, experts=experts)
    opened, adapter = HFFolder(folder), spec.adapter(spec.model)
    with torch.device("meta"):
        model = spec.model.build()
    opened.check(model, adapter)
    read: dict[str, torch.Tensor] = {}
    for name, tensor in read_parameters(opened, adapter, dict(model.named_parameters())):
        read |= adapter.to_hf(name, tensor)
    assert set(read) == set(meant)
    for name, tensor in meant.items():
        assert torch.equal(read[name].float(), tensor), name


def test_transformers_reads_the_same_weights(tmp_path):
    from transformers import AutoModelForCausalLM

    folder, _, meant = fp8_folder(tmp_path / "hf", block=(16, 16))
    logging.disable()  # it warns that it dequantizes
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    finally:
        logging.disable(logging.NOTSET)
    found = model.state_dict()
    assert {name: tuple(t.shape) for name, t in found.items()} == {
        n: tuple(t.shape) for n, t in meant.items()
    }
    for name, tensor in meant.items():
        assert torch.equal(found[name], tensor.bfloat16()), name


def test_training_starts_from_the_weights_and_exports_them_without_quantization(tmp_path):
    folder, spec, meant = fp8_folder(tmp_path / "hf", block=(20, 24))
    build_byte_tokenizer(folder)
    engine = TrainingEngine(
        config=TrainingEngine.Config(), model_spec=spec, hf_assets_path=str(folder), world=World()
    )
    engine.export_hf(str(tmp_path / "exported"))
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert set(exported) == set(meant)
    assert all(torch.equal(exported[name], tensor) for name, tensor in meant.items())
    assert "quantization_config" not in json.loads(
        (tmp_path / "exported" / "config.json").read_text()
    )


O_PROJ = "model.layers.0.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop(f"{O_PROJ}_scale_inv"),
            f"{O_PROJ} is of F8_E4M3: must be a matrix with a tensor of scales",
        ),
        (
            lambda t: t.update({f"{O_PROJ}_scale_inv": torch.ones(2, 1)}),
            r"shape \[2, 1\]: must be \[2, 2\], one scale",
        ),
        (
            lambda t: t.update({O_PROJ: t[O_PROJ].float()}),
            f"{O_PROJ} has scales, {O_PROJ}_scale_inv, but is of F32",
        ),
    ],
)
def test_weights_and_scales_that_do_not_fit_are_refused(tmp_path, change, message):
    folder, _, _ = fp8_folder(tmp_path / "hf", block=(20, 24))
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        HFFolder(folder)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (None, "is of F8_E4M3, but config.json has no quantization_config"),
        (
            {"quant_method": "gptq", "bits": 4},
            "'gptq'.* is not supported: must be of quant_method 'fp8'",
        ),
        ({"quant_method": "fp8"}, "'weight_block_size': None} is not supported"),
    ],
)
def test_other_quantizations_are_refused_by_name(tmp_path, quantization, message):
    folder, _, _ = fp8_folder(tmp_path / "hf", block=(20, 24))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    with pytest.raises(ValueError, match=message):
        HFFolder(folder)
