"""Checkpoints of the training state, sharded, that appear whole or not at all.

Written with torch.distributed.checkpoint: one file a rank, readable in any other layout.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from rl.distributed.process_group import barrier
from rl.distributed.seeds import random_states, restore_random_states
from rl.training.optimizer import Optimizer

METADATA_FILE = ".metadata"
_VERSION = "policy_version"


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """What the trainer writes."""

    export_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights in a Hugging Face folder."""


def is_checkpoint(folder: str | Path) -> bool:
    """Whether the folder is one of `save`, not a Hugging Face one."""
    return (Path(folder) / METADATA_FILE).is_file()


def save(
    folder: str | Path,
    *,
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    optimizer: Optimizer,
    policy_version: int,
) -> None:
    """Write all ranks' parts beside `folder`, flush them, then let it appear by one rename.

    Called on every rank; `folder` is on a file system that all of them see.

    Raises:
        FileExistsError: `folder` is already there.
    """
    path = Path(folder).absolute()
    partial = path.parent / f".{path.name}.partial"
    exists = path.exists()
    barrier()  # Nobody may still be looking when the first rank is done.
    if exists:
        raise FileExistsError(f"checkpoint {path} already exists")
    if _rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier()
    state = _state(parameters, buffers, optimizer)
    state |= {_VERSION: policy_version, _random_key(): random_states()}
    with _quiet():
        state_dict_saver.save(state, checkpoint_id=partial, no_dist=not dist.is_initialized())
    if _rank() == 0:
        _publish(partial, path)
    barrier()


def load(
    folder: str | Path,
    *,
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    optimizer: Optimizer,
) -> int:
    """Restore in place what `save` wrote, in this or another layout; returns the policy version.

    Random states are restored where this rank saved one.

    Raises:
        ValueError: naming the first tensor that is missing, unknown or of another shape.
    """
    metadata: Metadata = FileSystemReader(folder).read_metadata()
    state: dict[str, Any] = _state(parameters, buffers, optimizer)
    _check(metadata, state, folder)
    state[_VERSION] = 0
    if _random_key() in metadata.state_dict_metadata:
        state[_random_key()] = None
    with _quiet():
        state_dict_loader.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    if _random_key() in state:
        restore_random_states(state[_random_key()])
    return state[_VERSION]


def _state(
    parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor], optimizer: Optimizer
) -> dict[str, Any]:
    """The very tensors of model and optimizer, by name."""
    moments = optimizer.state_tensors()
    state: dict[str, Any] = {f"model.{name}": parameter.data for name, parameter in parameters.items()}
    state |= {f"model.{name}": buffer for name, buffer in buffers.items()}
    for name, parameter in parameters.items():
        state |= {f"optimizer.{name}.{key}": tensor for key, tensor in moments[parameter].items()}
    return state


def _check(metadata: Metadata, state: Mapping[str, Tensor], folder: str | Path) -> None:
    saved = {
        name: tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    for name, tensor in state.items():
        if name not in saved:
            raise ValueError(f"checkpoint {folder}: tensor {name} is missing")
        if saved[name] != tuple(tensor.shape):
            raise ValueError(
                f"checkpoint {folder}: tensor {name} has shape {list(saved[name])}, the model needs "
                f"{list(tensor.shape)}: a checkpoint of another architecture or size"
            )
    unknown = [name for name in saved if name not in state]
    if unknown:
        raise ValueError(
            f"checkpoint {folder}: tensor {unknown[0]} has no place in the model: "
            "a checkpoint of another architecture or size"
        )


def _publish(partial: Path, path: Path) -> None:
    for file in (*partial.rglob("*"), partial):
        _flush(file)
    partial.rename(path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning that a single process is assumed: it is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _random_key() -> str:
    return f"random.{_rank()}"
