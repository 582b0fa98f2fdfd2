"""An adapter as PEFT keeps it: adapter_config.json and adapter_model.safetensors.

Shape legend: R rank, I input width, O output rows, each of one of Hugging Face's own weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl.atomic_folder import appearing_folder
from rl.models.hf import read_json_object

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
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
"""Settings of PEFT that change what its tensors mean, and the values under which they mean what ours do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftSettings:
    """What adapter_config.json says."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    base_model: str | None
    """Folder of the weights that the adapter is for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftAdapter:
    """Factors by the name of Hugging Face's weight, on the CPU."""

    folder: Path
    rank: int
    a: dict[str, Tensor]
    """[R, I] each."""
    b: dict[str, Tensor]
    """[O, R] each."""

    def check(self, widths: Mapping[str, tuple[int, int]]) -> None:
        """Raises ValueError unless there are factors for exactly these weights, of width I and O."""
        for factors, ending in ((self.a, "a"), (self.b, "b")):
            for name, (num_in, num_out) in widths.items():
                tensor = f"{self.folder / WEIGHTS_FILE}: tensor {peft_name(name, ending)}"
                shape = [self.rank, num_in] if ending == "a" else [num_out, self.rank]
                if name not in factors:
                    raise ValueError(f"{tensor} is missing: the adapter has other target modules or layers")
                if list(factors[name].shape) != shape:
                    raise ValueError(
                        f"{tensor} has shape {list(factors[name].shape)}, the model needs {shape}: "
                        "an adapter of another rank or model"
                    )
            for name in factors:
                if name not in widths:
                    raise ValueError(
                        f"{self.folder / WEIGHTS_FILE}: tensor {peft_name(name, ending)} has no place in the "
                        "model: the adapter has other target modules or layers"
                    )


def peft_name(hf_name: str, factor: str) -> str:
    """Of the factor `a` or `b` of one of Hugging Face's weights."""
    return f"{_PREFIX}{hf_name.removesuffix('.weight')}{_ENDINGS[factor]}"


def is_peft_folder(folder: str | Path) -> bool:
    return (Path(folder) / CONFIG_FILE).is_file()


def write_peft_folder(
    folder: str | Path, factors: Iterable[tuple[str, Tensor, Tensor]], settings: PeftSettings
) -> None:
    """Write a folder that PEFT opens; it appears whole or not at all.

    Args:
        factors: (Hugging Face's name of a weight, A, B).

    Raises:
        FileExistsError: `folder` is already there and not empty.
    """
    with appearing_folder(folder) as temporary:
        tensors: dict[str, Tensor] = {}
        for name, a_RI, b_OR in factors:
            for factor, tensor in (("a", a_RI), ("b", b_OR)):
                tensors[peft_name(name, factor)] = tensor.cpu().contiguous()
        save_file(tensors, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
        alpha = int(settings.alpha) if settings.alpha == int(settings.alpha) else settings.alpha
        content = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": settings.base_model,
            "r": settings.rank,
            "lora_alpha": alpha,
            "target_modules": list(settings.target_modules),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "use_dora": False,
            "use_rslora": False,
            "inference_mode": True,
        }
        (temporary / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_peft_folder(folder: str | Path, *, rank: int, alpha: float) -> PeftAdapter:
    """The factors of a folder that we or PEFT wrote.

    Raises:
        ValueError: a file is missing or not whole, the adapter is of a kind that has more to it than a
            product, or of another rank or alpha.
    """
    folder = Path(folder)
    config = read_json_object(folder / CONFIG_FILE)
    for field, values in {**_PLAIN, "r": (rank,), "lora_alpha": (alpha,)}.items():
        value = config.get(field, values[-1] if field in _PLAIN and field != "peft_type" else None)
        if value not in values:
            ours = {"r": "rank", "lora_alpha": "alpha"}.get(field)
            wanted = f"{ours}={values[0]} of the config" if ours else repr(values[0])
            raise ValueError(f"{folder / CONFIG_FILE}: {field}={value!r} is not supported: must be {wanted}")
    return _sorted_factors(folder, _read_weights(folder / WEIGHTS_FILE), rank)


def _read_weights(file: Path) -> dict[str, Tensor]:
    if not file.exists():
        raise ValueError(f"weights file {file} is missing")
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"weights file {file} is not whole: {error}") from error


def _sorted_factors(folder: Path, tensors: Mapping[str, Tensor], rank: int) -> PeftAdapter:
    factors: dict[str, dict[str, Tensor]] = {"a": {}, "b": {}}
    for name, tensor in tensors.items():
        factor = next((f for f, ending in _ENDINGS.items() if name.endswith(ending)), None)
        if factor is None or not name.startswith(_PREFIX):
            raise ValueError(f"{folder / WEIGHTS_FILE}: tensor {name} is no factor of a LoRA adapter")
        module = name.removeprefix(_PREFIX).removesuffix(_ENDINGS[factor])
        factors[factor][f"{module}.weight"] = tensor
    return PeftAdapter(folder=folder, rank=rank, a=factors["a"], b=factors["b"])
