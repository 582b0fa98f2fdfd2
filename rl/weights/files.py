"""Versions as files in a folder that all machines of a run share, one file of each trainer rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rl.utils.threads import run_aside
from rl.weights.boxes import PackedPart, num_bytes
from rl.weights.types import VersionExistsError, VersionNotFoundError, WeightStoreError


async def write_file(file: Path, data: np.ndarray) -> None:
    """Write [bytes] uint8 to a new file.

    Raises:
        VersionExistsError: the file exists.
        WeightStoreError: it was not written.
    """

    def write() -> None:
        file.parent.mkdir(exist_ok=True)
        with file.open("xb") as opened:
            data.tofile(opened)

    try:
        await run_aside(write, name="weight-file")
    except OSError as error:
        if isinstance(error, FileExistsError) and file.exists():
            raise VersionExistsError(f"the version is already pushed: {file} exists") from error
        raise WeightStoreError(f"weights were not written to {file}: {error}") from error


async def read_file(file: Path, parts: Sequence[PackedPart]) -> list[Tensor]:
    """Return some of a file's boxes.

    Raises:
        VersionNotFoundError: the file was deleted.
        WeightStoreError: it cannot be read.
    """

    def load(part: PackedPart) -> Tensor:
        data = np.fromfile(file, dtype=np.uint8, count=num_bytes(part), offset=part.offset)
        return torch.from_numpy(data).view(part.dtype).view(part.box.local_shape)

    try:
        return await run_aside(lambda: [load(part) for part in parts], name="weight-file")
    except FileNotFoundError as error:
        raise VersionNotFoundError(f"the version was deleted: there is no {file}") from error
    except (OSError, RuntimeError) as error:
        raise WeightStoreError(f"the files of a version cannot be read: {error}") from error
