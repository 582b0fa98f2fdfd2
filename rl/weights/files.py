"""Versions as files in a folder that all machines of a run share, one file of each trainer rank."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rl.utils.files import LOCK, is_unlocked, locked_folder
from rl.utils.threads import run_aside
from rl.weights.boxes import PackedPart, num_bytes
from rl.weights.types import VersionExistsError, VersionNotFoundError, WeightStoreError


class VersionFolder:
    """The folder of the versions' files. The controller's `start` locks it until `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = ExitStack()

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path, "_lock": ExitStack()}

    def start(self) -> None:
        """Lock the folder, and remove the versions of a run that was killed.

        Raises:
            WeightStoreError: the folder belongs to another run, or is no store's.
        """
        self.close()
        try:
            check_folder(self.path)
            locked = locked_folder(self.path, as_what="weights.folder", otherwise="wait for its end")
            self._lock.enter_context(locked)
        except ValueError as error:
            raise WeightStoreError(str(error)) from error
        self._lock.callback(self._remove_all)
        self._remove_all()

    def close(self) -> None:
        """Remove all versions and release the lock. Idempotent."""
        self._lock.close()

    def _remove_all(self) -> None:
        for version in self.path.glob("v*"):
            shutil.rmtree(version, ignore_errors=True)

    async def remove(self, version: int) -> None:
        folder = self.path / f"v{version}"
        await run_aside(lambda: shutil.rmtree(folder, ignore_errors=True), name="weight-files")

    def file(self, version: int, rank: int) -> Path:
        return self.path / f"v{version}" / f"rank{rank}.bin"


async def write_file(file: Path, data: np.ndarray) -> None:
    """Write [bytes] uint8 to a new file.

    Raises:
        VersionExistsError: the file exists.
        WeightStoreError: it was not written.
    """

    def write() -> None:
        file.parent.mkdir(exist_ok=True)
        if file.exists():
            raise VersionExistsError(f"the version is already pushed: {file} exists")
        with file.open("xb") as opened:
            data.tofile(opened)

    try:
        await run_aside(write, name="weight-file")
    except OSError as error:
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


def check_folder(folder: Path) -> None:
    """Raise ValueError if the folder belongs to a running run, or is no store's."""
    is_stores = (folder / LOCK).exists() and is_unlocked(folder / LOCK)
    if folder.exists() and any(folder.iterdir()) and not is_stores:
        raise ValueError(
            f"weights.folder: {folder} already exists and belongs to a running run, or to something else: "
            "choose another folder or weights.state_dict_key"
        )
