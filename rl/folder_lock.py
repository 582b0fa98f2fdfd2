"""Folders that one process at a time has for itself, and frees also when it is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

LOCK = ".lock"


@contextlib.contextmanager
def usable(path: Path, as_what: str) -> Iterator[None]:
    """An error of the disk in a folder that was asked for, as a ValueError that names it."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path} cannot be {as_what}: {error.strerror}") from error


def make_folder(path: Path, as_what: str) -> Path | None:
    """Make `path`; returns the topmost folder that had to be made.

    Raises:
        ValueError: it cannot be made or written, or is none.
    """
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    existing = missing[-1].parent if missing else path
    if not existing.is_dir():
        raise ValueError(f"{path} cannot be {as_what}: {existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{path} cannot be {as_what}: {existing} is not writable")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be made: {error.strerror}") from error
    return missing[-1] if missing else None


def remove_empty(path: Path, *, topmost: Path | None) -> None:
    """Remove the folder and those around it up to `topmost`, as far as there is nothing in them."""
    with contextlib.suppress(OSError):  # not empty
        for folder in (path, *path.parents):
            if topmost is None or not folder.is_relative_to(topmost):
                break
            folder.rmdir()


def lock(path: Path, *, as_what: str, otherwise: str, name: str = LOCK) -> int:
    """File descriptor that holds the lock; the lock file names the process for others to read.

    Raises:
        ValueError: another process has it, or the file cannot be made; names the folder, and in the first
            case what to do `otherwise`.
    """
    with usable(path, as_what):
        lock_fd = os.open(path / name, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(lock_fd, 200).decode() or "another process"
        os.close(lock_fd)
        raise ValueError(f"{path} is in use by {holder}; {otherwise}") from error
    os.ftruncate(lock_fd, 0)
    with contextlib.suppress(OSError):  # a full disk is told where it is needed
        os.write(lock_fd, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return lock_fd


def is_free(file: Path) -> bool:
    """Whether nobody holds this lock; also where there is no such file."""
    try:
        lock_fd = os.open(file, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(lock_fd)


@contextlib.contextmanager
def having(path: Path, *, as_what: str, otherwise: str) -> Iterator[None]:
    """No other process has the folder within this context; it is made, and removed if it stays empty.

    Raises:
        ValueError: as `make_folder` and `lock`.
    """
    created = make_folder(path, as_what)
    try:
        lock_fd = lock(path, as_what=as_what, otherwise=otherwise)
    except ValueError:
        remove_empty(path, topmost=created)
        raise
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # somebody has removed it
            if created is not None and [entry.name for entry in path.iterdir()] == [LOCK]:
                (path / LOCK).unlink()
                remove_empty(path, topmost=created)
        os.close(lock_fd)
