"""Folder of one play: made before the agent starts, removed with all that the agent left there.

    work/   working folder
    home/   HOME, with the caches in home/.cache
    tmp/    TMPDIR

Beside the working folder rather than in it, where an agent would meet files that are not its own.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

MAX_COLLECTED_BYTES = 256 * 1024
"""Bytes that are returned of a file."""
BLOCK_BYTES = 512
"""Unit of `st_blocks`."""


class PlayFolder:
    """Folder of one play, in which nobody else writes.

    Example:
        folder = PlayFolder("/tmp/relay-agents-x/1")
        folder.make({"task.md": "Write a poem."})
        ...
        folder.remove()
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.work = os.path.join(path, "work")
        """Absolute path of the working folder."""
        self._home = os.path.join(path, "home")
        self._temporary = os.path.join(path, "tmp")

    def make(self, files: Mapping[str, str]) -> None:
        """Make the folder with these texts in the working folder."""
        for path in (self._path, self.work, self._home, self._temporary):
            os.mkdir(path)
        for path, text in files.items():
            file = Path(self.work, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text.encode(errors="surrogatepass"))

    def list_variables(self, *, keep_home: bool) -> dict[str, str]:
        """Return the variables that lead programs into the folder."""
        variables = {"PWD": self.work, "TMPDIR": self._temporary}
        if not keep_home:
            variables["HOME"] = self._home
            variables["XDG_CACHE_HOME"] = os.path.join(self._home, ".cache")
        return variables

    def exceeds(self, *, max_bytes: int, max_files: int) -> bool:
        """Return whether the folder holds more; the search ends there."""
        num_files, num_bytes = 0, 0
        waiting = [self.work, self._home, self._temporary]
        while waiting:
            # The agent may remove and close folders meanwhile.
            with suppress(OSError), os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    num_files += 1
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        # The space on the disk: a sparse file may be longer than that.
                        status = entry.stat(follow_symlinks=False)
                        num_bytes += status.st_blocks * BLOCK_BYTES
                    if num_files > max_files or num_bytes > max_bytes:
                        return True
        return False

    def collect(self, paths: Iterable[str]) -> dict[str, str]:
        """Return the texts of those regular files that exist in the working folder.

        A link is followed if it stays there. The processes of the play must have ended.
        """
        texts = {}
        root = os.path.realpath(self.work)
        for path in paths:
            real = os.path.realpath(os.path.join(root, path))
            if os.path.commonpath([root, real]) != root:
                continue
            with suppress(OSError):
                data = _read_regular(real)
                if data is not None:
                    texts[path] = data.decode(errors="replace")
        return texts

    def remove(self) -> None:
        """Remove the folder, if it exists, with all that is in it."""
        remove_folder(self._path)


def _read_regular(path: str) -> bytes | None:
    """Return the beginning of a regular file; None for a folder, a pipe or a device."""
    # Opening a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        return file.read(MAX_COLLECTED_BYTES)


def remove_folder(path: str) -> None:
    """Remove a folder, also if its owner may neither read nor change what is in it.

    What cannot be removed is reported on stderr.
    """
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except (OSError, RecursionError):
        with suppress(OSError, RecursionError):
            _open_folders(path)
        # It has no limit of depth.
        done = subprocess.run(["rm", "-rf", "--", path], capture_output=True, text=True)
        if os.path.lexists(path):
            print(f"{path} could not be removed: {done.stderr[:500]}", file=sys.stderr, flush=True)


def _open_folders(path: str) -> None:
    """Give the owner all rights to a folder and to the folders below it."""
    os.chmod(path, stat.S_IRWXU)
    # From above, as a closed folder cannot be listed; links to folders are among them.
    for folder, names, _ in os.walk(path):
        for name in names:
            below = os.path.join(folder, name)
            if not os.path.islink(below):
                os.chmod(below, stat.S_IRWXU)
