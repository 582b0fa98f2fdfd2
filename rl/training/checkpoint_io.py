"""Reading and writing of a checkpoint's tensors with torch.distributed.checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.futures
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from rl.distributed.sharding import unwrapped
from rl.models.decoder import persistent_buffers
from rl.training.checkpoint_files import METADATA
from rl.training.optimizer import Optimizer

MODEL, OPTIMIZER = "model", "optimizer"
"""First part of the name of every saved tensor."""


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and persistent buffers by their names in a checkpoint, without copying."""
    tensors = {name: unwrapped(parameter.data) for name, parameter in model.named_parameters()}
    return {f"{MODEL}.{name}": tensor for name, tensor in (tensors | persistent_buffers(model)).items()}


def optimizer_tensors(trained: Mapping[str, nn.Parameter], optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state by its names in a checkpoint, without copying."""
    states = optimizer.state_tensors()
    return {
        f"{OPTIMIZER}.{name}.{key}": tensor
        for name, parameter in trained.items()
        for key, tensor in states[parameter].items()
    }


def saved_names(folder: Path) -> dict[str, tuple[int, ...] | None]:
    """Return the shape of every saved tensor by name, and None for objects that are no tensors."""
    metadata = FileSystemReader(folder).read_metadata()
    return {
        name: tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        for name, entry in metadata.state_dict_metadata.items()
    }


def write_tensors(folder: Path, state: Mapping[str, Any], *, group: dist.ProcessGroup | None) -> list[Path]:
    """Write and flush the tensors of all ranks; return this rank's files.

    Raises:
        OSError: a rank could not write; raised on every rank.
    """
    rank = 0 if group is None else dist.get_rank(group)
    with plain_errors():
        state_dict_saver.save(
            dict(state), storage_writer=_Writer(folder), process_group=group, no_dist=group is None
        )
    files = list(folder.glob(f"__{rank}_*"))
    return [*files, folder / METADATA] if rank == 0 else files


def read_tensors(folder: Path, state: dict[str, Any], *, group: dist.ProcessGroup | None) -> None:
    """Fill the tensors of `state` in place, and replace its None values by the saved objects."""
    reader = FileSystemReader(folder)
    with plain_errors():
        state_dict_loader.load(state, storage_reader=reader, process_group=group, no_dist=group is None)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raise the first failed rank's own error on all ranks."""
    # The filter stays: removing it would race with other threads.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        cause.add_note(f"on rank {rank} of the trainer")
        raise cause from error


class _Writer(FileSystemWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:  # torch.save hides the disk's error.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise
