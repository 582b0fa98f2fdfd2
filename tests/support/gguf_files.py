"""GGUF files of a small random Llama, written with the package `gguf`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from rl.models.files.tokenizer import list_byte_characters

SETTINGS: dict[str, Any] = {
    "embedding_length": 64, "block_count": 2, "feed_forward_length": 96, "attention.head_count": 4,
    "attention.head_count_kv": 2, "context_length": 128, "vocab_size": 260,
    "rope.dimension_count": 16,
    "rope.freq_base": 5e5, "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
BLOCK = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


def random_tensors(architecture: str = "llama") -> dict[str, Tensor]:
    """Return the tensors of a tied model by their Hugging Face names."""
    generator = torch.Generator().manual_seed(0)
    dim, hidden = 64, 96
    shapes = {
        "self_attn.k_proj": (32, dim),
        "self_attn.v_proj": (32, dim),
        "mlp.gate_proj": (hidden, dim),
    }
    shapes |= {"mlp.up_proj": (hidden, dim), "mlp.down_proj": (dim, hidden)}
    found = {"model.embed_tokens.weight": (260, dim), "model.norm.weight": (dim,)}
    for layer in range(2):
        for name in BLOCK.values():
            default = (dim,) if "norm" in name else (dim, dim)
            shape = found[f"model.layers.{layer}.{name}.weight"] = shapes.get(name, default)
            if architecture == "qwen2" and name[-6:] in ("q_proj", "k_proj", "v_proj"):
                found[f"model.layers.{layer}.{name}.bias"] = shape[:1]
        if architecture == "qwen3":
            found |= {f"model.layers.{layer}.{name}.weight": (16,) for name in HEAD_NORMS.values()}
    return {name: torch.randn(shape, generator=generator) for name, shape in found.items()}


def gguf_name(hf_name: str) -> str:
    if hf_name.startswith("model.layers."):
        module, _, leaf = hf_name.rpartition(".")
        _, _, layer, module = module.split(".", 3)
        return (
            f"blk.{layer}.{next(k for k, v in (BLOCK | HEAD_NORMS).items() if v == module)}.{leaf}"
        )
    return {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }[hf_name]


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Return rows in GGUF's order: both halves of a rotated pair are neighbours."""
    return weight.reshape(num_heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    architecture: str = "llama",
    quantized: gguf.GGMLQuantizationType | None = None,
    without: Collection[str] = (),
    splits: str = "llama-bpe",
    more: Mapping[str, Any] | None = None,
) -> Path:
    """Write a file; `without` are tensors to leave out, `splits` is a rule for texts, `more`
    further settings.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in SETTINGS.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{name}", value)
    if architecture == "qwen3":  # its heads need not divide the width
        writer.add_key_length(16)
        writer.add_value_length(16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splits)
    writer.add_token_list(
        [*list_byte_characters(), "Ġa", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    )
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
        data = interleaved(data, heads) if heads and architecture == "llama" else data
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
