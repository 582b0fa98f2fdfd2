"""Block-scaled FP8 folders, in the format of Qwen3-*-FP8."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def quantize_folder(folder: Path, *, block: tuple[int, int]) -> dict[str, Tensor]:
    """Quantize the linear layers of a Hugging Face folder in place; return every weight in float32
    as it now is.
    """
    tensors, meant = load_file(folder / "model.safetensors"), {}
    for name, weight in list(tensors.items()):
        meant[name] = weight.float()
        if "_proj." in name:
            tensors[name], tensors[f"{name}_scale_inv"], meant[name] = quantized(
                weight.float(), block=block
            )
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
        "weight_block_size": list(block)
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return meant


def quantized(weight: Tensor, *, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the FP8 weight, the bfloat16 scales, and the product, block by block."""
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(
        [-(-size // length) for size, length in zip(weight.shape, block, strict=True)]
    )
    scales, meant = scales.bfloat16(), torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scales[i, j] = weight[place].abs().max() / 400
            stored[place] = (weight[place] / scales[i, j].float()).to(torch.float8_e4m3fn)
            meant[place] = stored[place].float() * scales[i, j].float()
    return stored, scales, meant
