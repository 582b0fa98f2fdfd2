"""Random states of a process in a safetensors file of a checkpoint, one file a rank."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from rl.training.checkpoint_files import RANDOM, RANDOM_SUFFIX

_PYTHON, _NUMPY = 3, "MT19937"
"""Version of Python's state, and the algorithm of numpy's."""


def name_random_file(*, layout: str, rank: int) -> str:
    """Return the name of a rank's file; states are restored only by the same rank of the same
    layout.
    """
    return f"{RANDOM}.{layout}.{rank}{RANDOM_SUFFIX}"


def pack_random_states(states: Mapping[str, Any]) -> bytes:
    """Return the result of `process_states` as the content of a safetensors file."""
    version, numbers, gauss = states["python"]
    assert version == _PYTHON, version
    tensors = {"python": torch.tensor(numbers, dtype=torch.int64)}
    if gauss is not None:
        tensors["python.gauss"] = torch.tensor(gauss, dtype=torch.float64)
    if isinstance(
        states.get("numpy"), tuple
    ):  # numpy's own generator, and no other that somebody set
        _, keys, place, has_gauss, cached = states["numpy"]
        tensors["numpy"] = torch.tensor([*keys.tolist(), place, has_gauss], dtype=torch.int64)
        tensors["numpy.gauss"] = torch.tensor(cached, dtype=torch.float64)
    return save(tensors | {name: states[name] for name in ("torch", "cuda") if name in states})


def read_random_states(file: Path) -> dict[str, Any] | None:
    """Return what `restore_process_states` takes, or None without the file; raise ValueError for
    anything else.
    """
    if not file.is_file():
        return None
    try:
        return _unpack_states(load_file(file))
    except (
        KeyError,
        OSError,
        OverflowError,
        RuntimeError,
        SafetensorError,
        TypeError,
        ValueError,
    ) as error:
        raise ValueError(f"checkpoint file {file} has no random states: {error}") from error


def _unpack_states(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    states: dict[str, Any] = {name: tensors[name] for name in ("torch", "cuda") if name in tensors}
    for name, state in states.items():
        if state.dtype != torch.uint8 or state.dim() != 1:
            raise ValueError(f"tensor {name} is not a list of bytes")
    if "torch" in states:
        torch.Generator().set_state(
            states["torch"]
        )  # raises RuntimeError for bytes that are no state
    gauss = tensors["python.gauss"].item() if "python.gauss" in tensors else None
    states["python"] = (_PYTHON, tuple(_read_integers(tensors, "python")), gauss)
    random.Random().setstate(states["python"])  # raises ValueError for numbers that are no state
    if "numpy" in tensors:
        *keys, place, has_gauss = _read_integers(tensors, "numpy")
        cached = tensors["numpy.gauss"].item()
        states["numpy"] = (_NUMPY, np.array(keys, dtype=np.uint32), place, has_gauss, cached)
        np.random.RandomState().set_state(states["numpy"])
    return states


def _read_integers(tensors: Mapping[str, Tensor], name: str) -> list[int]:
    tensor = tensors[name]
    if tensor.dtype != torch.int64 or tensor.dim() != 1:
        raise ValueError(f"tensor {name} is not a list of integers")
    numbers: list[int] = tensor.tolist()
    return numbers
