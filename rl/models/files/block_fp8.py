"""Block-scaled FP8 checkpoints, such as Qwen3-*-FP8, which are read as float32.

Every block of a weight has a scale. A matrix of 256 x 300 with blocks of 128 x 128 has 2 x 3
scales; the last blocks are cut off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_SCALE = "_scale_inv"
FP8 = "F8_E4M3"
"""Dtype of such weights in a safetensors header."""


def read_fp8_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return rows and columns of a block, or None without a quantization.

    Raises ValueError for another kind of quantization.

    Example:
        >>> quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        >>> read_fp8_block({"quantization_config": quantization})
        (128, 128)
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    fields = dict(quantization) if isinstance(quantization, Mapping) else {}
    block: Any = fields.get("weight_block_size")
    is_pair = isinstance(block, list) and len(block) == 2
    # Not isinstance: True is an int.
    is_block = is_pair and all(type(length) is int and length > 0 for length in block)
    is_fp8 = fields.get("quant_method") == "fp8" and fields.get("fmt", "e4m3") == "e4m3"
    if not (is_fp8 and is_block):
        values = {name: fields.get(name) for name in ("quant_method", "fmt", "weight_block_size")}
        raise ValueError(
            f"config.json: quantization_config={values} is not supported: must be of quant_method "
            "'fp8', fmt 'e4m3', with a weight_block_size of two numbers; give the model's folder "
            "without quantization"
        )
    return block[0], block[1]


def scale_of(name: str) -> str:
    """Return the name of a weight's scales, `x.weight_scale_inv` for `x.weight`."""
    return f"{name}{_SCALE}"


def is_scale(name: str) -> bool:
    return name.endswith(_SCALE)


def check_scales(
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str],
    *,
    block: tuple[int, int] | None,
) -> None:
    """Raise ValueError unless the FP8 weights alone have scales, one for each block."""
    for name, dtype in dtypes.items():
        scale = scale_of(name)
        if dtype != FP8:
            if scale in shapes:
                raise ValueError(
                    f"tensor {name} has scales, {scale}, but is of {dtype}: must be {FP8}"
                )
            continue
        # Without scales the weight would be read as if every scale were 1.
        if block is None:
            raise ValueError(
                f"tensor {name} is of {FP8}, but config.json has no quantization_config"
            )
        if len(shapes[name]) != 2 or scale not in shapes:
            raise ValueError(
                f"tensor {name} is of {FP8}: must be a matrix with a tensor of scales, {scale}"
            )
        num_rows, num_columns = shapes[name]
        needed = (-(-num_rows // block[0]), -(-num_columns // block[1]))
        if shapes[scale] != needed:
            raise ValueError(
                f"tensor {scale} has shape {list(shapes[scale])}: must be {list(needed)}, one "
                f"scale for each block of {list(block)} of {list(shapes[name])}"
            )


def dequantize(weight_RC: Tensor, scales: Tensor, *, block: tuple[int, int]) -> Tensor:
    """Return a weight of R rows and C columns in float32, given the scale of each block."""
    num_rows, num_columns = weight_RC.shape
    # The last blocks of rows and columns may be cut off.
    by_column = scales.to(torch.float32).repeat_interleave(block[1], dim=1)[:, :num_columns]
    by_number = by_column.repeat_interleave(block[0], dim=0)[:num_rows]
    return weight_RC.to(torch.float32).mul_(by_number)
