"""A file that is replaced whole, or stays as it is: also when the disk is full, or the process is killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SUFFIX = ".tmp"
"""Ends the name of what a process that was killed had not finished."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write: it takes the place of `path` when the block ends, or is removed on an error."""
    temporary = path.with_name(f"{path.name}{SUFFIX}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        with suppress(OSError):  # it is in its place, or was never made
            temporary.unlink()
