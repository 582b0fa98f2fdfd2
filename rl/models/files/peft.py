"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

Shape legend: R rank, I input width and O output rows of one Hugging Face weight.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl.models.files.folder_check import ADAPTER_CONFIG, check_links, check_not_pointer, has_weights
from rl.models.files.hf import check_finite
from rl.models.files.tokenizer import write_json
from rl.utils.files import publish_folder, read_json_object

CONFIG_FILE, WEIGHTS_FILE = ADAPTER_CONFIG, "adapter_model.safetensors"
_PREFIX = "base_model.model."
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_ENDINGS = {"a": ".lora_A.weight", "b": ".lora_B.weight"}

_NEUTRAL = frozenset(
    {
        # They describe the file.
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "peft_version",
        "revision",
        # They act in training alone, or only with a setting that is refused.
        "eva_config",
        "lora_dropout",
        "megatron_core",
        "qalora_group_size",
        # They choose the layers, which the tensors' names tell.
        "exclude_modules",
        "layers_pattern",
        "layers_to_transform",
        "target_modules",
    }
)
"""Settings of PEFT that do not change the adapted model's function."""
_VALID: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none", None),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
"""Valid values of settings that are not simply off.

Other ways to initialize change the base weights too.
"""
_OFF: tuple[Any, ...] = (None, False, {}, [], "")
"""Values with which every other setting, of later versions of PEFT too, does nothing."""
_MERGE = (
    "or let PEFT merge the adapter into its base model (merge_and_unload, then save_pretrained) "
    "and start from the merged folder"
)
_CONVERT = (
    "its product belongs to base weights that PEFT changed at the start: save it with "
    "save_pretrained and path_initial_model_for_weight_conversion, or merge it in the process that "
    "trained it"
)
_FOREIGN = {
    r"lora_[AB]\.([^.]+)\.weight$": (
        "has the adapter's name in it, as in a state_dict() of the whole model: save it with "
        "PEFT's save_pretrained, or remove the name"
    ),
    r"_orig_mod\.": (
        "is of a compiled model: save the model that was given to torch.compile, or remove "
        "'_orig_mod.' from the names"
    ),
    r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|^module\.": (
        "is of a wrapped model (FSDP, DDP, checkpoints of activations): save the model inside with "
        "PEFT's save_pretrained"
    ),
    r"lora_magnitude_vector": f"is DoRA's, which is not supported: train without it, {_MERGE}",
    r"lora_embedding_": (
        f"adapts an embedding, which is not supported: adapt linear layers alone, {_MERGE}"
    ),
    r"trainable_tokens": (
        f"has single trained tokens, which is not supported: train without them, {_MERGE}"
    ),
    r"lora_[AB]\.bias$": (
        f"is a product's bias, which is not supported: set lora_bias to False, {_MERGE}"
    ),
    r"(embed_tokens|lm_head)\.(base_layer\.|modules_to_save\.)?weight$": (
        "is a saved embedding or output head, which PEFT writes beside the adapter if the "
        "vocabulary was resized or the layer is adapted or trained: if it is the base model's, "
        "save with save_embedding_layers=False; otherwise let PEFT merge the adapter "
        "(merge_and_unload, then save_pretrained) and start from the merged folder"
    ),
    r"\.experts\.(base_layer\.)?lora_[AB]\.weight$": (
        "is of all experts in one stack, as PEFT writes them with transformers 5: save an adapter "
        f"with names by expert (experts.0.gate_proj.lora_A.weight), {_MERGE}"
    ),
    r"modules_to_save|base_layer": (
        f"is of a layer that was trained whole: adapt it instead, {_MERGE}"
    ),
    r"unembed_tokens\.lora_": (
        "is the output head's under Tinker's name: rename 'model.unembed_tokens' to 'lm_head'"
    ),
    r"\.language_model\.": (
        "is of a model with images: remove 'language_model.' from the names if the base model here "
        "has the same text layers"
    ),
    rf"^(?!{re.escape(_PREFIX)})": f"lacks PEFT's prefix {_PREFIX!r}: add it to the names",
}
"""Meaning of a tensor that is no factor of a product, by a pattern of its name."""


def get_peft_name(hf_name: str, factor: str) -> str:
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
    revision: str | None = None,
) -> None:
    """Write a folder that PEFT can open, atomically.

    Raises FileExistsError if the folder exists and is not empty.

    Args:
        factors: Hugging Face name of a weight, A and B.
        base_model: folder of the base model's weights, or the model's name on the hub.
        revision: commit of the base model on the hub.
    """
    with publish_folder(folder) as temporary:
        tensors: dict[str, Tensor] = {}
        targets: dict[str, None] = {}
        for name, a_RI, b_OR in factors:
            targets[name.removesuffix(".weight").rpartition(".")[2]] = None
            tensors[get_peft_name(name, "a")] = a_RI.cpu().contiguous()
            tensors[get_peft_name(name, "b")] = b_OR.cpu().contiguous()
        save_file(tensors, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
        # All settings that change the product are written, whatever PEFT's defaults are.
        content = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "revision": revision,
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
    """Read the factors A [R, I] and B [O, R] of each Hugging Face weight from an adapter's folder.

    Args:
        widths: I and O of each weight.

    Raises:
        ValueError: if a file is missing or truncated, the adapter is more than a low-rank product,
            its rank or alpha differs, or its tensors are those of other weights.
    """
    folder = Path(folder)
    _check_folder(folder)
    config_file, file = folder / CONFIG_FILE, folder / WEIGHTS_FILE
    config = _remove_rslora(read_json_object(config_file), alpha=alpha, file=config_file)
    _check_settings(config, {"r": ("rank", rank), "lora_alpha": ("alpha", alpha)}, file=config_file)

    tensors = _load_tensors(file)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (num_in, num_out) in widths.items():
        shapes[get_peft_name(name, "a")] = (rank, num_in)
        shapes[get_peft_name(name, "b")] = (num_out, rank)
    # Every factor must be there: a weight without factors would stay as in the base model.
    _check_tensors(tensors, shapes, file=file)

    factors: dict[str, tuple[Tensor, Tensor]] = {}
    for name in widths:
        factors[name] = tensors[get_peft_name(name, "a")], tensors[get_peft_name(name, "b")]
    return factors


def _check_folder(folder: Path) -> None:
    """Raise ValueError for a path that is not the folder of an adapter."""
    if folder.is_file():
        raise ValueError(
            f"{folder} is a file: must be the folder of a PEFT adapter, with {CONFIG_FILE}"
        )
    if folder.is_dir():
        check_links(folder)
        check_not_pointer(folder / WEIGHTS_FILE)
    if not is_peft_folder(folder) and has_weights(folder):
        raise ValueError(
            f"{folder} is the folder of a model: must be a PEFT adapter's, with {CONFIG_FILE}"
        )


def _load_tensors(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        pickle = file.with_name("adapter_model.bin")
        hint = ""
        if pickle.exists():
            hint = f": {pickle.name} is a pickle, which is not read: save it again with PEFT"
        raise ValueError(f"weights file {file} is missing{hint}")
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"weights file {file} is not whole: {error}") from error


def _check_tensors(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], *, file: Path
) -> None:
    """Raise ValueError unless the tensors have these names and shapes, and can be used."""
    # First, because a name often tells what the adapter is and how to save it otherwise.
    _check_names(tensors.keys() - shapes.keys(), file=file)
    for name in sorted(shapes.keys() | tensors.keys()):
        shape = list(tensors[name].shape) if name in tensors else None
        needed = list(shapes[name]) if name in shapes else None
        if shape != needed:
            raise ValueError(
                f"{file}: tensor {name} has shape {shape}, the model needs {needed}: an adapter of "
                "another rank or model, or with other target modules"
            )
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"{file}: tensor {name} is of {tensor.dtype}: must be one of {_DTYPES}"
            )
        check_finite(name, tensor, file=file)


def _remove_rslora(config: dict[str, Any], *, alpha: float, file: Path) -> dict[str, Any]:
    """Return the settings without PEFT's use_rslora, a scale of lora_alpha / sqrt(r).

    Raises ValueError if our alpha / r is another scale.
    """
    rank: Any = config.get("r")
    theirs: Any = config.get("lora_alpha")
    are_numbers = type(rank) in (int, float) and type(theirs) in (int, float)
    # `_check_settings` refuses values that are no numbers.
    if config.get("use_rslora") is not True or not are_numbers:
        return config
    if rank <= 0 or not math.isclose(alpha, theirs * math.sqrt(rank), rel_tol=1e-6):
        needed = f"{theirs * math.sqrt(max(rank, 0)):.9g}"
        raise ValueError(
            f"{file}: use_rslora=True with r={rank} and lora_alpha={theirs} is the scale of "
            f"alpha={needed} without it: must be alpha={alpha!r} of the config"
        )
    return {**config, "use_rslora": False, "lora_alpha": alpha}


def _check_settings(
    config: Mapping[str, Any], ours: Mapping[str, tuple[str, float]], *, file: Path
) -> None:
    """Raise ValueError for a setting that is not known to leave the function of the tensors alone.

    Args:
        ours: settings with our name and value, which PEFT's have to equal.
    """
    # A setting that is not known is refused, unless it is off: later versions of PEFT add some.
    for field in [*ours, *_VALID, *config]:
        value = config.get(field)
        if field in _NEUTRAL or (field not in config and field not in (*ours, "peft_type")):
            continue
        if field in ours:
            name, number = ours[field]
            valid, rule = (number,), f"{name}={number!r} of the config"
        elif field == "init_lora_weights":
            valid = _VALID[field]
            rule = f"one of {', '.join(map(repr, valid))}; {_CONVERT}"
        elif field in _VALID:
            valid = _VALID[field]
            rule = f"{valid[0]!r}; {_MERGE}"
        else:
            valid = _OFF
            off: Any = {} if isinstance(value, dict) else None
            if value is True:
                off = False
            rule = f"{off!r}; {_MERGE}"
        if value not in valid:
            raise ValueError(f"{file}: {field}={value!r:.100} is not supported: must be {rule}")


def _check_names(unknown: Collection[str], *, file: Path) -> None:
    """Raise ValueError that says what a tensor is, if its name tells that it is no factor."""
    # Sorted, so that the message is the same in every run and on every rank.
    for name in sorted(unknown):
        for pattern, meaning in _FOREIGN.items():
            if re.search(pattern, name):
                raise ValueError(f"{file}: tensor {name:.200} {meaning}")
