"""What the local backend keeps of a model in a folder, and back; nothing in it is ever unpickled.

model.json               `SavedModel`, and size and checksum of each other file
weights.safetensors      what is trained: LoRA's factors, or all parameters
optimizer.safetensors    its running means; not of weights that are only sampled from
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl.tinker.errors import InvalidRequestError
from rl.tinker.messages import LoRASettings
from rl.training.checkpoint_files import FileSum, sum_of_file

FORMAT = 1
DESCRIPTION, WEIGHTS, OPTIMIZER = "model.json", "weights.safetensors", "optimizer.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedModel:
    """What the tensors are of."""

    base_fingerprint: str
    """`Base.fingerprint`."""
    lora: LoRASettings | None


def write_saved(folder: Path, saved: SavedModel, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Fill an empty folder; `tensors` are those of each file, by its name."""
    sums = {}
    for name, content in tensors.items():
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in content.items()}, folder / name)
        sums[name] = dataclasses.asdict(sum_of_file(folder / name))
    description = {"format": FORMAT, **dataclasses.asdict(saved), "files": sums}
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def read_saved(folder: Path, *names: str) -> tuple[SavedModel, list[dict[str, Tensor]]]:
    """The description, and the tensors of the files `names`.

    Raises:
        InvalidRequestError: names the file that is missing or not as it was written.
    """
    saved, sums = _read_description(folder)
    for name in names:
        if name not in sums:
            raise InvalidRequestError(f"the saved model has no {name}: its weights were saved to sample from")
    return saved, [_read_tensors(folder / name, sums[name]) for name in names]


def _read_description(folder: Path) -> tuple[SavedModel, dict[str, FileSum]]:
    file = folder / DESCRIPTION
    if not file.is_file():
        raise InvalidRequestError(f"the saved model's file {DESCRIPTION} is missing")
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise InvalidRequestError(
                f"the saved model's file {DESCRIPTION} has format {content['format']!r}; this version reads "
                f"{FORMAT}"
            )
        lora = content["lora"]
        saved = SavedModel(
            base_fingerprint=str(content["base_fingerprint"]),
            lora=None if lora is None else LoRASettings(**lora),
        )
        return saved, {str(name): FileSum(**entry) for name, entry in content["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise InvalidRequestError(f"the saved model's file {DESCRIPTION} is damaged: {error!r}") from error


def _read_tensors(file: Path, written: FileSum) -> dict[str, Tensor]:
    if not file.is_file():
        raise InvalidRequestError(f"the saved model's file {file.name} is missing")
    found = sum_of_file(file)
    if found != written:
        raise InvalidRequestError(
            f"the saved model's file {file.name} is damaged: it has {found.num_bytes} bytes of crc32 "
            f"{found.crc32:08x}, {written.num_bytes} of {written.crc32:08x} were written"
        )
    try:
        return load_file(file)
    except SafetensorError as error:
        raise InvalidRequestError(f"the saved model's file {file.name} is damaged: {error}") from error
