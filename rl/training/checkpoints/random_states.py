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

from rl.training.checkpoints.files import RANDOM, RANDOM_SUFFIX

_PYTHON, _NUMPY = 3, "MT19937"
"""Version of Python's state, and the algorithm of numpy's."""


def name_random_file(*, layout: str, rank: int) -> str:
    """Return the name of a rank's file.

    States are restored only by the same rank of the same layout: in another one a rank draws for
    other samples.

    Example:
        name_random_file(layout="1x2x1x1", rank=0)  # "random.1x2x1x1.0.safetensors"
    """
    return f"{RANDOM}.{layout}.{rank}{RANDOM_SUFFIX}"


def pack_random_states(states: Mapping[str, Any]) -> bytes:
    """Return the result of `process_states` as the content of a safetensors file."""
    version, numbers, gauss = states["python"]
    assert version == _PYTHON, version
    tensors = {"python": torch.tensor(numbers, dtype=torch.int64)}
    if gauss is not None:
        tensors["python.gauss"] = torch.tensor(gauss, dtype=torch.float64)
    # Only of numpy's own generator: a program may have set another, whose state is no tuple.
    if isinstance(states.get("numpy"), tuple):
        _, keys, place, has_gauss, cached = states["numpy"]
        tensors["numpy"] = torch.tensor([*keys.tolist(), place, has_gauss], dtype=torch.int64)
        tensors["numpy.gauss"] = torch.tensor(cached, dtype=torch.float64)
    return save(tensors | {name: states[name] for name in ("torch", "cuda") if name in states})


def read_random_states(file: Path) -> dict[str, Any] | None:
    """Return what `restore_process_states` takes, or None without the file.

    Raises ValueError for a file with other content.
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
    """Return the states of all generators, each tried on a generator that nobody uses."""
    states: dict[str, Any] = {}
    for name in ("torch", "cuda"):
        if name not in tensors:
            continue
        state = tensors[name]
        if state.dtype != torch.uint8 or state.dim() != 1:
            raise ValueError(f"tensor {name} is not a list of bytes")
        states[name] = state
    # A state is tried here, so that a damaged file is refused before anything has changed.
    if "torch" in states:
        torch.Generator().set_state(states["torch"])
    gauss = tensors["python.gauss"].item() if "python.gauss" in tensors else None
    states["python"] = (_PYTHON, tuple(_read_integers(tensors, "python")), gauss)
    random.Random().setstate(states["python"])
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
