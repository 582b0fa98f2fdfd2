"""Append-only file of bounded size: when it is half full, it replaces the file before it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from rl.utils.files import AppendFile


class BoundedFile:
    """Two files, such as x.1.jsonl and x.jsonl, that keep the newest lines within `max_bytes` together."""

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self.path = path
        self.max_line = max_bytes // 2
        """Largest number of bytes that can be appended at once."""
        self._file = AppendFile(path)

    def append(self, text: str) -> bool:
        """Append ASCII text, and return whether the oldest lines were dropped for it; raises OSError."""
        size = 0
        with suppress(FileNotFoundError):
            size = self.path.stat().st_size
        is_full = size > 0 and size + len(text) > self.max_line
        if is_full:
            self._file.close()
            self.path.replace(previous_file(self.path))
        self._file.append(text)
        return is_full

    def close(self) -> None:
        self._file.close()


def previous_file(path: Path) -> Path:
    """Return the path of the file with the older lines."""
    return path.with_suffix(f".1{path.suffix}")
