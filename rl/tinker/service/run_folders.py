"""Where runs and checkpoints lie on the disk, and removing what nobody reads any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rl.atomic_folder import remove, remove_leftovers, temporary_folder
from rl.tinker.errors import GoneError
from rl.tinker.service.names import FOLDERS, CheckpointPath, is_model_id


class RunFolders:
    """The layout that storage.py describes. Its methods may be called from several threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._readers: Counter[Path] = Counter()
        self._unwanted: set[Path] = set()
        """To be removed, perhaps when they were read."""

    def prepare(self) -> None:
        """Make the folder, and remove what processes that were killed had half written.

        Raises:
            ValueError: it cannot be written.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with temporary_folder(self._folder / "test"):
                pass
        except OSError as error:
            raise ValueError(
                f"storage_folder is {str(self._folder)!r}, which cannot be written: {error}"
            ) from error
        remove_leftovers(self._folder)
        for run in self.runs():
            for folder in FOLDERS.values():
                remove_leftovers(run / folder)

    def run(self, model_id: str) -> Path:
        assert is_model_id(model_id)
        return self._folder / model_id.replace(":", ".")

    def runs(self) -> list[Path]:
        return [run for run in self._folder.iterdir() if is_model_id(run.name.replace(".", ":"))]

    def versions(self, parent: Path) -> Iterator[tuple[str, int, Path]]:
        """Name, version, folder of what is in a run's `weights` or `sampler_weights`."""
        return (found for found in _on_disk(parent) if found[2] not in self._unwanted)

    def versions_of(self, path: CheckpointPath) -> list[tuple[int, Path]]:
        """The oldest first."""
        parent = self.run(path.model_id) / FOLDERS[path.kind]
        return sorted(
            (version, folder) for name, version, folder in self.versions(parent) if name == path.name
        )

    def next_version(self, path: CheckpointPath) -> int:
        """Above all that are there, with those that are deleted and still read."""
        parent = self.run(path.model_id) / FOLDERS[path.kind]
        return max((version for name, version, _ in _on_disk(parent) if name == path.name), default=0) + 1

    @contextmanager
    def reading(self, folder: Path) -> Iterator[None]:
        """It stays as long as the block lasts.

        Raises:
            GoneError: it is no longer there.
        """
        self._readers[folder] += 1  # before looking: `remove` looks for readers after saying that it removes
        try:
            if folder in self._unwanted or not folder.is_dir():
                raise GoneError("the checkpoint was deleted or replaced in the meantime")
            yield
        finally:
            self._readers[folder] -= 1
            if not self._readers[folder]:
                del self._readers[folder]
                if folder in self._unwanted:
                    self.remove(folder)

    def remove(self, folder: Path) -> None:
        """A checkpoint: it is not found from now on, and goes when nobody reads it."""
        self._unwanted.add(folder)
        if not self._readers[folder]:
            with suppress(FileNotFoundError):
                remove(folder)
            self._unwanted.discard(folder)

    def remove_if_empty(self, run: Path) -> None:
        if not any(any((run / folder).iterdir()) for folder in FOLDERS.values() if (run / folder).is_dir()):
            with suppress(FileNotFoundError):
                remove(run)


def _on_disk(parent: Path) -> Iterator[tuple[str, int, Path]]:
    """Name, version, folder."""
    for folder in parent.iterdir() if parent.is_dir() else ():
        name, _, version = folder.name.rpartition("@")
        if version.isascii() and version.isdigit() and not name.startswith("."):
            yield name, int(version), folder
