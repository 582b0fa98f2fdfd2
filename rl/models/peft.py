"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

Shape legend: R rank, I input width and O output rows of one Hugging Face weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl.models.folder_check import ADAPTER_CONFIG, check_links, check_not_pointer
from rl.models.hf import check_finite
from rl.models.tokenizer import write_json
from rl.utils.files import atomic_folder, read_json_object

CONFIG_FILE, WEIGHTS_FILE = ADAPTER_CONFIG, "adapter_model.safetensors"
_PREFIX = "base_model.model."
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_ENDINGS = {"a": ".lora_A.weight", "b": ".lora_B.weight"}

_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": (None, []),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
}
"""Settings of PEFT that change the meaning of its tensors, with the values that we support."""


def peft_name(hf_name: str, factor: str) -> str:
    """Return the tensor name of factor `a` or `b` of a Hugging Face weight."""
    return f"{_PREFIX}{hf_name.removesuffix('.weight')}{_ENDINGS[factor]}"


def is_peft_folder(folder: str | Path) -> bool:
    return (Path(folder) / CONFIG_FILE).is_file()


def write_peft_folder(
    folder: str | Path,
    factors: Iterable[tuple[str, Tensor, Tensor]],
    *,
    rank: int,
    alpha: float,
    base_model: str | None,
) -> None:
    """Write a folder that PEFT can open, atomically; raises FileExistsError if the folder exists and is not empty.

    Args:
        factors: Hugging Face name of a weight, A and B.
        base_model: folder of the base model's weights.
    """
    with atomic_folder(folder) as temporary:
        tensors: dict[str, Tensor] = {}
        targets: dict[str, None] = {}
        for name, a_RI, b_OR in factors:
            targets[name.removesuffix(".weight").rpartition(".")[2]] = None
            for factor, tensor in (("a", a_RI), ("b", b_OR)):
                tensors[peft_name(name, factor)] = tensor.cpu().contiguous()
        save_file(tensors, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
        content = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": rank,
            "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
            "target_modules": list(targets),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "use_dora": False,
            "use_rslora": False,
            "inference_mode": True,
        }
        write_json(temporary / CONFIG_FILE, content)


def read_peft_folder(
    folder: str | Path, *, rank: int, alpha: float, widths: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Read A [R, I] and B [O, R] of each Hugging Face weight, with (I, O) in `widths`, from an adapter's folder.

    Raises:
        ValueError: if a file is missing or truncated, the adapter is more than a low-rank product, its rank or
            alpha differs, or its tensors are those of other weights.
    """
    folder = Path(folder)
    if folder.is_dir():
        check_links(folder)
        check_not_pointer(folder / WEIGHTS_FILE)
    config = read_json_object(folder / CONFIG_FILE)
    for field, values in {**_PLAIN, "r": (rank,), "lora_alpha": (alpha,)}.items():
        value = config.get(field, values[-1] if field in _PLAIN and field != "peft_type" else None)
        if value not in values:
            ours = {"r": "rank", "lora_alpha": "alpha"}.get(field)
            wanted = f"{ours}={values[0]} of the config" if ours else repr(values[0])
            raise ValueError(f"{folder / CONFIG_FILE}: {field}={value!r} is not supported: must be {wanted}")
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        pickle = folder / "adapter_model.bin"
        hint = (
            f": {pickle.name} is a pickle, which is not read: save it again with PEFT"
            if pickle.exists()
            else ""
        )
        raise ValueError(f"weights file {file} is missing{hint}")
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"weights file {file} is not whole: {error}") from error
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (num_in, num_out) in widths.items():
        shapes |= {peft_name(name, "a"): (rank, num_in), peft_name(name, "b"): (num_out, rank)}
    for name in sorted(shapes.keys() | tensors.keys()):
        found = list(tensors[name].shape) if name in tensors else None
        needed = list(shapes[name]) if name in shapes else None
        if found != needed:
            raise ValueError(
                f"{file}: tensor {name} has shape {found}, the model needs {needed}: an adapter of another "
                "rank or model, or with other target modules"
            )
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{file}: tensor {name} is of {tensor.dtype}: must be one of {_DTYPES}")
        check_finite(name, tensor, file=file)
    return {name: (tensors[peft_name(name, "a")], tensors[peft_name(name, "b")]) for name in widths}
