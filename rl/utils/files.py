"""Files and folders that appear whole or not at all, and folders that only one process uses.

`replace_file` and `publish_folder` write under a temporary name and rename at the end, so a full
disk or a killed process never leaves half of anything under the final name. Locks are held by the
kernel for a living process (`filelock`), hence a killed process releases them.
"""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import socket
import stat
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

TMP_SUFFIX = ".tmp"
"""Suffix of a file that is still being written."""
LOCK = ".lock"
"""Name of the lock file in a locked folder."""
_BEING_WRITTEN = ".being-written"
_ACQUIRE_S = 10.0
"""Seconds to wait for a lock that another process holds only for a moment."""
MAX_JSON_BYTES = 1 << 28
"""Size of a JSON file that is read at once; the largest tokenizers have 2^25 bytes."""
MAX_DEPTH = 100
"""Levels of lists and objects in a JSON text."""
MAX_DIGITS = 100
"""Digits of an integer in a JSON text, all of which fit into a float; tokenizers have integers of
31 digits.
"""


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` at the end; an error leaves `path` as it is.

    Example:
        >>> with replace_file(Path("config.json")) as temporary:
        ...     temporary.write_text("{}")
    """
    temporary = path.with_name(f"{path.name}{TMP_SUFFIX}")
    # In a folder from elsewhere it may be a link to any file.
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        # Already renamed, or never made.
        with suppress(OSError):
            temporary.unlink()


@contextmanager
def publish_folder(path: str | Path) -> Iterator[Path]:
    """Yield a hidden folder that becomes `path`, flushed to disk, unless the block raises.

    Raises FileExistsError if `path` exists and is not an empty folder.
    """
    path = Path(path).absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} already exists")
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent)
    with make_temporary_folder(path) as temporary:
        yield temporary
        publish(temporary, path)


@contextmanager
def make_temporary_folder(path: Path) -> Iterator[Path]:
    """Yield a hidden folder next to `path`, hence on the same file system; remove it at the end.

    A lock file next to the folder is held meanwhile, so that `remove_leftovers` can tell a folder
    in use from the leftover of a killed process.
    """
    folder = _name_hidden(path)
    lock_file = _name_lock(folder)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        # Without locks on this file system the folder stays unmarked, and no other process touches
        # it.
        with suppress(OSError):
            stack.enter_context(FileLock(lock_file, timeout=_ACQUIRE_S, thread_local=False))
            stack.callback(lock_file.unlink, missing_ok=True)
        folder.mkdir()
        yield folder


def remove_leftovers(parent: Path) -> None:
    """Remove the temporary folders in `parent` whose process was killed."""
    for lock_file in parent.glob(f".*.{'[0-9a-f]' * 32}{_BEING_WRITTEN}{LOCK}"):
        # A living process holds the lock.
        with suppress(OSError, Timeout), FileLock(lock_file, blocking=False):
            folder = lock_file.with_name(lock_file.name.removesuffix(LOCK))
            shutil.rmtree(folder, ignore_errors=True)
            lock_file.unlink()


def publish(temporary: Path, path: Path) -> None:
    """Flush a temporary folder to disk, then rename it to `path`.

    Raises FileExistsError as `publish_folder`.
    """
    # Before the rename, or a power cut could leave the name with empty files.
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
    """Remove a folder at once under its name.

    `remove_leftovers` completes a removal that was interrupted.
    """
    hidden = _name_hidden(path)
    # First the lock file, by which `remove_leftovers` finds the folder.
    _name_lock(hidden).touch()
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
    if not hidden.exists():
        _name_lock(hidden).unlink(missing_ok=True)


def _name_hidden(path: Path) -> Path:
    return path.parent / f".{path.name}.{uuid.uuid4().hex}{_BEING_WRITTEN}"


def _name_lock(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{LOCK}")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Locked folders


@contextmanager
def name_folder_errors(path: Path, as_what: str) -> Iterator[None]:
    """Turn an OSError into a ValueError that names the folder and the option it was given for."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path} cannot be {as_what}: {error.strerror}") from error


def make_folder(path: Path, as_what: str) -> None:
    """Make a folder and its parents; raise ValueError if that fails."""
    with name_folder_errors(path, as_what):
        path.mkdir(parents=True, exist_ok=True)


def lock_folder(path: Path, *, as_what: str, otherwise: str) -> FileLock:
    """Make a folder and lock it for this process.

    The lock file names the process, for other processes to read.

    Raises:
        ValueError: another process holds the lock, in which case the message ends with `otherwise`,
            or the folder or its lock file cannot be made.
    """
    file = path / LOCK
    # Locking truncates the file, which may be a link to any file.
    if not is_regular(file, may_be_missing=True):
        raise ValueError(f"{file} is not a regular file: {path} cannot be locked; {otherwise}")
    lock = FileLock(file, blocking=False, mode=0o644, thread_local=False)
    make_folder(path, as_what)
    with name_folder_errors(path, as_what):
        try:
            lock.acquire()
        except Timeout as error:
            holder = file.read_text() or "another process"
            raise ValueError(f"{path} is in use by {holder}; {otherwise}") from error
    # A full disk is reported when something that matters is written.
    with suppress(OSError):
        file.write_text(f"process {os.getpid()} on {socket.gethostname()}")
    return lock


@contextmanager
def hold_folder_lock(path: Path, *, as_what: str, otherwise: str) -> Iterator[None]:
    """Hold the lock of a folder, which is made if it does not exist; see `lock_folder`."""
    lock = lock_folder(path, as_what=as_what, otherwise=otherwise)
    try:
        yield
    finally:
        lock.release()


# Files from elsewhere


def is_regular(file: Path, *, may_be_missing: bool = False) -> bool:
    """Return whether the path is a regular file itself, not a link to one."""
    try:
        return stat.S_ISREG(file.lstat().st_mode)
    except OSError:
        return may_be_missing


def open_regular(file: Path) -> BinaryIO:
    """Open a file for reading that may come from anybody: a regular file, and not through a link.

    A pipe or a device might never end, and a link might lead to any file of this user.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it is something else.
    """
    # Without O_NONBLOCK a pipe waits for its writer here.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(file, flags)
    except OSError as error:
        # A link, a socket.
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _make_not_regular_error(file) from error
        raise
    # Looked up by the open file: the name may lead to another file by now.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _make_not_regular_error(file)
    return open(descriptor, "rb")


def read_regular(file: Path) -> bytes:
    """Return the content of a file; see `open_regular`."""
    with open_regular(file) as content:
        return content.read()


def _make_not_regular_error(file: Path) -> OSError:
    return OSError(errno.EINVAL, "not a regular file", str(file))


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text that may come from anybody.

    Raises ValueError also for more than `MAX_DEPTH` levels, which no recursion would survive, and
    for an integer of more than `MAX_DIGITS`.
    """
    too_deep = f"it has more than {MAX_DEPTH} levels of lists and objects"
    try:
        value = json.loads(text, parse_int=_parse_integer)
    except RecursionError as error:
        raise ValueError(too_deep) from error

    # Level by level, as a recursion would end this process where the parser did not.
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        next_level: list[Any] = []
        for outer in level:
            content = outer.values() if isinstance(outer, dict) else outer
            next_level += [inner for inner in content if isinstance(inner, dict | list)]
        level = next_level
    if level:
        raise ValueError(too_deep)
    return value


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise ValueError if there is none."""
    if not file.is_file():
        raise ValueError(f"file {file} is missing")
    num_bytes = file.stat().st_size
    if num_bytes > MAX_JSON_BYTES:
        raise ValueError(f"file {file} has {num_bytes} bytes: must have at most {MAX_JSON_BYTES}")
    try:
        content = parse_json(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"file {file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"file {file} holds {type(content).__name__}, not an object")
    return content


def _parse_integer(digits: str) -> int:
    # The time for an integer grows with the square of its digits.
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"the integer {digits[:20]}... has more than {MAX_DIGITS} digits")
    return int(digits)


def read_json_lines(file: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield number and object of each line that is not blank, None for a damaged line.

    A missing file has no lines. Raises OSError for anything but a regular file, as `open_regular`.
    """
    with suppress(FileNotFoundError), open_regular(file) as content:
        lines = io.TextIOWrapper(content, encoding="utf-8", errors="replace", newline="\n")
        for number, line in enumerate(lines, start=1):
            if line.strip():
                value = None
                with suppress(ValueError):
                    value = parse_json(line)
                yield number, value if isinstance(value, dict) else None


# Files that grow


class AppendFile:
    """Append-only file that stores each text whole or not at all, also on a full disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: FileIO | None = None

    def open(self) -> FileIO:
        """Return the file, which is made if there is none; raises OSError."""
        if self._file is None:
            self._file = FileIO(self.path, "a+")
            # A killed process may have left its last line unfinished.
            size = os.fstat(self._file.fileno()).st_size
            if size and os.pread(self._file.fileno(), 1, size - 1) != b"\n":
                self._file.write(b"\n")
        return self._file

    def append(self, text: str) -> None:
        """Hand the text to the kernel, which keeps it even if this process is killed.

        An OSError changes nothing.
        """
        file = self.open()
        data = memoryview(text.encode("utf-8", errors="backslashreplace"))
        num_written = 0
        try:
            # The kernel may take a part, such as all that fits on the disk.
            while num_written < len(data):
                num_written += file.write(data[num_written:])
        except OSError:
            with suppress(OSError):
                if num_written:
                    file.truncate(os.fstat(file.fileno()).st_size - num_written)
            raise

    def sync(self) -> None:
        """Wait until the text is on the disk; raises OSError."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None


class BoundedFile:
    """Two files, such as x.1.jsonl and x.jsonl, with the newest lines within `max_bytes`."""

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self.path = path
        self.max_line = max_bytes // 2
        """Largest number of bytes that can be appended at once."""
        self._file = AppendFile(path)
        self._size: int | None = None
        """Bytes of the file, which only this object writes; None if unknown."""

    def append(self, text: str) -> bool:
        """Append text, and return whether the oldest lines were dropped for it; raises OSError."""
        size = self._measure() if self._size is None else self._size
        # Unknown while the text may be written in part.
        self._size = None
        num_bytes = len(text.encode("utf-8", "backslashreplace"))
        is_full = size > 0 and size + num_bytes > self.max_line
        if is_full:
            self._file.close()
            self.path.replace(get_previous_file(self.path))
            size = 0
        self._file.append(text)
        self._size = size + num_bytes
        return is_full

    def _measure(self) -> int:
        """Return the size of the file, 0 if there is none."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def close(self) -> None:
        self._file.close()


def get_previous_file(path: Path) -> Path:
    """Return the path of the file with the older lines."""
    return path.with_suffix(f".1{path.suffix}")
