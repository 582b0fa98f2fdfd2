"""Hugging Face folders made from GGUF files of a small random Llama."""

import os
import shutil
import sys

import gguf
import pytest
import torch
from torch import Tensor

from rl.models.files.assets import resolve_assets
from rl.models.files.hf import HFFolder, read_parameters
from rl.models.files.tokenizer import load_tokenizer
from rl.models.spec import spec_from_hf
from tests.support.gguf_files import random_tensors, write_gguf


@pytest.fixture(scope="module")
def tensors():
    return random_tensors()


def hf_tensors(folder):
    """Return the parameters of the folder, as its adapter reads them."""
    opened = HFFolder(folder, tokenizer=True)
    spec = spec_from_hf(opened.config)
    adapter = spec.adapter(spec.model)
    with torch.device("meta"):
        model = spec.model.build()
    opened.check(model, adapter)
    names = [name for name, _ in model.named_parameters()]
    read: dict[str, Tensor] = {}
    for name, tensor in read_parameters(opened, adapter, names):
        read |= adapter.to_hf(name, tensor)
    return opened, read


@pytest.mark.parametrize(
    ("architecture", "quantized"),
    [("llama", None), ("llama", gguf.GGMLQuantizationType.Q8_0), ("qwen2", None), ("qwen3", None)],
)
def test_weights_settings_and_tokenizer_are_those_of_the_file(
    tmp_path, architecture, quantized, capsys
):
    tensors = random_tensors(architecture)
    file = write_gguf(tmp_path / "a.gguf", tensors, architecture=architecture, quantized=quantized)
    folder = resolve_assets(file, cache=tmp_path / "cache")
    # One line, and no bar where nobody looks on.
    assert capsys.readouterr() == (f"converting {file}, once, to {folder}\n", "")
    opened, read = hf_tensors(folder)
    assert set(read) == set(tensors)
    for name, tensor in tensors.items():
        if quantized is not None and tensor.ndim == 2:
            tensor = torch.from_numpy(
                gguf.dequantize(gguf.quantize(tensor.numpy(), quantized), quantized)
            )
        assert torch.equal(read[name], tensor.bfloat16()), name
    assert opened.config["tie_word_embeddings"] is True
    assert (opened.config["rms_norm_eps"], opened.config["rope_theta"]) == (1e-5, 5e5)
    # The end of a turn ends a reply, although the file names another token as the end of the text.
    assert opened.config["eos_token_id"] == [257, 259]
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("a b<|im_end|>")) == "a b<|im_end|>"
    assert (
        "TokenizersBackend" not in (folder / "tokenizer_config.json").read_text()
    )  # unknown to transformers 4
    assert (folder / "chat_template.jinja").read_text() == "{{ messages[0].content }}"


def test_conversion_is_deterministic_and_done_once(tmp_path, tensors):
    file = write_gguf(tmp_path / "a.gguf", tensors)
    first = resolve_assets(
        tmp_path, cache=tmp_path / "cache"
    )  # the folder holds one file and no safetensors
    again = resolve_assets(shutil.copy(file, tmp_path / "b.gguf"), cache=tmp_path / "other")
    assert {path.name: path.read_bytes() for path in first.iterdir()} == {
        path.name: path.read_bytes() for path in again.iterdir()
    }
    (first / "marker").touch()
    assert resolve_assets(file, cache=tmp_path / "cache") == first
    assert (first / "marker").exists()
    with pytest.raises(ValueError, match=r"holds 2 GGUF files: name one, such as .*a\.gguf"):
        resolve_assets(tmp_path, cache=tmp_path / "cache")


O_BIAS = "model.layers.1.self_attn.o_proj.bias"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"architecture": "qwen3moe"}, "general.architecture='qwen3moe' is not supported"),
        (
            {"architecture": "phi3"},
            "general.architecture='phi3' is not supported: must be one of llama, ",
        ),
        ({"more": {"split.count": 2}}, "one of several parts: join them"),
        (
            {"more": {"llama.rope.scaling.type": "yarn"}},
            "scaled rope frequencies are not read from GGUF",
        ),
        (
            {"more": {"llama.attention.sliding_window": 64}},
            "attention.sliding_window=64 is not read from GGUF",
        ),
        (
            {"more": {"general.name": "mistral"}},
            "general.name='mistral' is not read: give the model's",
        ),
        (
            {"more": {"llama.attention.key_length": 32}},
            "rope.dimension_count=16 .* size of a head, 32",
        ),
        (
            {"splits": "deepseek-llm"},
            "tokenizer.ggml.pre='deepseek-llm': how texts are split into tokens is not known",
        ),
        ({"without": ["model.norm.weight"]}, "has no tensor for model.norm.weight"),
        (
            {"tensors": random_tensors() | {O_BIAS: torch.zeros(64)}},
            "tensor blk.1.attn_output.bias has no place in the model",
        ),
    ],
)
def test_unsupported_file_is_refused_and_nothing_is_written(tmp_path, tensors, written, message):
    file = write_gguf(tmp_path / "a.gguf", **{"tensors": tensors, **written})
    with pytest.raises(ValueError, match=message) as caught:
        resolve_assets(file, cache=tmp_path / "cache")
    assert str(caught.value).startswith(f"{file}: ")
    assert not list((tmp_path / "cache").glob("*"))


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.001, 0.02, 0.5, 0.999])
def test_truncated_file_is_refused_by_name(tmp_path, tensors, share):
    file = write_gguf(tmp_path / "a.gguf", tensors)
    os.truncate(file, int(share * file.stat().st_size))
    with pytest.raises(ValueError, match=r"a\.gguf: the GGUF file is damaged or not supported: "):
        resolve_assets(file, cache=tmp_path / "cache")


def test_missing_packages_are_named_with_the_command(tmp_path, tensors, monkeypatch):
    with pytest.raises(
        ValueError, match="package:no_such: there is no such package: install it first"
    ):
        resolve_assets("package:no_such", cache=tmp_path)
    file = write_gguf(tmp_path / "a.gguf", tensors)
    for module, message in (
        (
            "transformers.modeling_gguf_pytorch_utils",
            r"install the package 'transformers\.modeling\w*'$",
        ),
        ("gguf", r"install the package 'gguf': python3 tools/setup_env\.py gguf$"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ValueError, match=message):
            resolve_assets(file, cache=tmp_path / "cache")
