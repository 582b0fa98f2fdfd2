"""Tensors of a model and its optimizer, to files and back, in any layout.

Written with torch.distributed.checkpoint: one file a rank, each part of a tensor once. What a
folder holds besides is in `rl.training.checkpoint_files`.
"""

from __future__ import annotations

import io
import os
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from rl.distributed.shards import local_tensor, unwrapped
from rl.models.buffers import persistent_buffers
from rl.training.checkpoint_files import FileSum
from rl.training.optimizer import Optimizer

MODEL, OPTIMIZER = "model", "optimizer"
"""First part of every tensor's name."""


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The very tensors of all parameters, frozen ones too, and of persistent buffers, by name."""
    tensors = {name: unwrapped(parameter.data) for name, parameter in model.named_parameters()}
    return {f"{MODEL}.{name}": tensor for name, tensor in (tensors | persistent_buffers(model)).items()}


def optimizer_tensors(trained: Mapping[str, nn.Parameter], optimizer: Optimizer) -> dict[str, Tensor]:
    """The very tensors of the optimizer's state, by the names of the parameters that it steps, `trained`."""
    states = optimizer.state_tensors()
    return {
        f"{OPTIMIZER}.{name}.{key}": tensor
        for name, parameter in trained.items()
        for key, tensor in states[parameter].items()
    }


class Staging:
    """Copies in CPU memory of what is to be written, so that training can go on meanwhile."""

    def __init__(self, *, pinned: bool) -> None:
        """`pinned`: page-locked memory, kept from copy to copy; the last copy's tensors are then reused."""
        self._pinned = pinned
        self._kept: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts; later changes of `tensors` do not reach them."""
        parts = {name: local_tensor(tensor).detach() for name, tensor in tensors.items()}
        if not self._pinned:
            return {name: part.to("cpu", copy=True) for name, part in parts.items()}
        for name, part in parts.items():
            kept = self._kept.get(name)
            if kept is None or kept.shape != part.shape or kept.dtype != part.dtype:
                kept = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
                self._kept[name] = kept
            kept.copy_(part, non_blocking=True)
        torch.cuda.synchronize()
        return {name: self._kept[name] for name in parts}


def write_tensors(
    folder: Path,
    state: Mapping[str, Tensor | bytes],
    *,
    staged: Mapping[str, Tensor] | None,
    group: dist.ProcessGroup | None,
) -> dict[str, FileSum]:
    """Write all ranks' parts into a folder and flush them; size and checksum of this rank's files.

    Args:
        state: tensors by name, and bytes under names that differ from rank to rank.
        staged: what to write of the tensors, from `Staging.copy`; None takes them as they are.
        group: all ranks, with a CPU backend; None is a single process.

    Raises:
        OSError: on every rank, where one could not write.
    """
    writer = _Writer(folder)
    planner = DefaultSavePlanner() if staged is None else _StagedPlanner(staged)
    with _plain_errors():
        state_dict_saver.save(
            dict(state), storage_writer=writer, planner=planner, process_group=group, no_dist=group is None
        )
    return writer.files.sums


def read_tensors(folder: Path, state: dict[str, Any], *, group: dist.ProcessGroup | None) -> None:
    """Fill the tensors of `state` in place, and replace what is None, by name."""
    with _plain_errors():
        state_dict_loader.load(
            state, storage_reader=FileSystemReader(folder), process_group=group, no_dist=group is None
        )


def saved_names(folder: Path) -> dict[str, tuple[int, ...] | None]:
    """Shape of every tensor in a checkpoint by name, None of what is no tensor."""
    metadata: Metadata = FileSystemReader(folder).read_metadata()
    return {
        name: tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        for name, entry in metadata.state_dict_metadata.items()
    }


class _StagedPlanner(DefaultSavePlanner):
    """Plans from the tensors themselves, which know their layout, and writes the copies."""

    def __init__(self, staged: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._staged = staged

    def lookup_object(self, index: MetadataIndex) -> Any:
        staged = self._staged.get(index.fqn)
        return super().lookup_object(index) if staged is None else staged


class _Writer(FileSystemWriter):
    """Sums the files up as they are written, and raises the disk's own error where one failed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = self.files = _SummedFiles()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:  # torch.save says only that it could not
            if self.files.error is not None:
                raise self.files.error from error
            raise


class _SummedFiles(FileSystem):
    def __init__(self) -> None:
        self.sums: dict[str, FileSum] = {}
        self.error: OSError | None = None
        """Of the first write that failed."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            if "w" not in mode:
                yield stream
                return
            summed = _SummedStream(cast(IO[bytes], stream))
            try:
                yield summed
            finally:
                self.error = self.error or summed.error
        # torch.distributed.checkpoint renames its metadata when it is complete.
        self.sums[Path(path).name.removesuffix(".tmp")] = summed.sum


class _SummedStream(io.RawIOBase):
    """A file being written from its beginning to its end."""

    def __init__(self, raw: IO[bytes]) -> None:
        super().__init__()
        self.raw = raw
        self.sum = FileSum(num_bytes=0, crc32=0)
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self.raw.write(data)
        except OSError as error:
            self.error = error
            raise
        num_bytes = memoryview(data).nbytes
        self.sum = FileSum(num_bytes=self.sum.num_bytes + num_bytes, crc32=zlib.crc32(data, self.sum.crc32))
        return num_bytes

    def tell(self) -> int:
        return self.raw.tell()

    def fileno(self) -> int:
        return self.raw.fileno()

    def flush(self) -> None:
        if not self.raw.closed:
            self.raw.flush()

    def close(self) -> None:
        self.raw.close()
        super().close()


@contextmanager
def _plain_errors() -> Iterator[None]:
    """The error that a rank met, on all of them; no warning that a single process is assumed: it is one."""
    # Not undone afterwards, which another thread's warnings might be in the way of.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        cause.add_note(f"on rank {rank} of the trainer")
        raise cause from error
