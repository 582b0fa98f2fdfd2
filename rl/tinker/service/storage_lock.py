"""A storage folder is one process's: another would take its half-written files for leftovers."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import TextIO

NAME = ".lock"


class StorageLock:
    """Held until `close`; however a process ends, the kernel lets go of it."""

    def __init__(self, folder: str | Path) -> None:
        """Makes the folder if it is missing.

        Raises:
            ValueError: it cannot be written, or another process is using it.
        """
        self.folder = Path(folder).expanduser()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = (self.folder / NAME).open("w")
        except OSError as error:
            raise ValueError(
                f"storage_folder={str(self.folder)!r}: cannot be written: {error.strerror}"
            ) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(
                f"storage_folder={str(self.folder)!r}: another process is using it; give one of its own"
            ) from None

    def close(self) -> None:
        """Idempotent."""
        self._file.close()
