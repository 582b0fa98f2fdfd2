"""Appending to a file so that each piece is in it whole or not at all, also when the disk is full."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class WholeLines:
    """A file that is opened by the first piece, and then kept open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def open(self) -> None:
        """Make the file; raises OSError."""
        if self._descriptor is None:
            self._descriptor = os.open(
                self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
            )

    def append(self, text: str) -> None:
        """Hand the text to the kernel, which writes it also when this process is killed.

        Raises:
            OSError: it does not fit, or cannot be written; the file is as it was.
        """
        self.open()
        assert self._descriptor is not None
        size = os.fstat(self._descriptor).st_size
        rest = memoryview(text.encode("utf-8", errors="backslashreplace"))
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, size)
            raise

    def sync(self) -> None:
        """Wait until the disk keeps what was appended; raises OSError."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)
