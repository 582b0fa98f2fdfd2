"""Folders that appear under their name whole and on the disk, or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_LOCKED = ".being-written"
"""Ends the name of a hidden folder that is locked as long as somebody writes it."""


@contextmanager
def appearing_folder(path: str | Path) -> Iterator[Path]:
    """A hidden folder to write into, which becomes `path`, flushed, when the block ends without an error.

    Raises:
        FileExistsError: `path` is already there and not an empty folder.
    """
    path = Path(path).absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} already exists")
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent)
    with temporary_folder(path) as temporary:
        yield temporary
        publish(temporary, path)


@contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """A hidden folder beside `path`, so that `publish` stays within one file system; gone afterwards.

    While this process lives it is locked. The kernel drops the lock of a process that was killed,
    which tells `remove_leftovers` that nobody writes the folder any more.
    """
    folder = _hidden(path)
    locked = folder.with_name(f"{folder.name}{_LOCKED}")
    with ExitStack() as stack:
        for name in (folder, locked):
            stack.callback(shutil.rmtree, name, ignore_errors=True)
        folder.mkdir()
        descriptor = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        # Some network file systems cannot lock a folder; then it keeps a name that nobody looks for.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder = folder.rename(locked)
        yield folder


def remove_leftovers(parent: Path) -> None:
    """Remove temporary folders whose process was killed; those of a living one are locked."""
    for folder in parent.glob(f".*.{'[0-9a-f]' * 32}{_LOCKED}"):
        with suppress(OSError):  # it is locked, already gone, or somebody else's
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(descriptor)


def publish(temporary: Path, path: Path) -> None:
    """Flush everything to the disk, then let the folder appear under its name.

    Raises:
        FileExistsError: there is something under that name, other than an empty folder.
    """
    for file in (*temporary.rglob("*"), temporary):
        _flush(file)
    try:
        temporary.rename(path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise FileExistsError(f"{path} already exists") from error
        raise
    _flush(path.parent)


def remove(path: Path) -> None:
    """Remove a folder that `publish` let appear; killed on the way, it leaves nothing under its name."""
    hidden = _hidden(path)
    unlocked = path.rename(hidden.with_name(f"{hidden.name}{_LOCKED}"))
    shutil.rmtree(unlocked, ignore_errors=True)  # what cannot be removed now, `remove_leftovers` tries again


def _hidden(path: Path) -> Path:
    return path.parent / f".{path.name}.{uuid.uuid4().hex}"


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
