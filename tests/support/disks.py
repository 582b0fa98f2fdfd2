"""Full disks and read-only folders, for real, in a forked copy of this process.

A disk is a tmpfs in a mount namespace of the copy: root makes one, and so does whoever may make a user
namespace. Where the kernel allows neither, a limit on the length of files takes its place, which says "File
too large" instead of "No space left on device".
"""

from __future__ import annotations

import ctypes
import os
import resource
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.support.forked import limit_files, run_in_fork

FULL = "(No space left on device|File too large)"
"""Pattern of the error message on a full disk of `on_small_disk`."""
NOBODY = 65534
NEW_MOUNTS, NEW_USER = 0x0002_0000, 0x1000_0000
NO_SUID, RECURSIVE, PRIVATE = 0x2, 0x4000, 0x4_0000
FILLER = ".filler"

_libc = ctypes.CDLL(None, use_errno=True)


class SmallDisk:
    """A folder that is a separate disk, to be filled and freed."""

    def __init__(self, folder: Path, *, num_bytes: int) -> None:
        self.folder = folder
        self.is_mounted = mount_small(folder, num_bytes=num_bytes)

    def fill(self) -> None:
        """Fill the disk; only the last, partly used pages of existing files have room left."""
        if not self.is_mounted:
            limit_files(0)
            return
        with suppress(OSError), (self.folder / FILLER).open("ab", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))

    def free(self) -> None:
        if self.is_mounted:
            (self.folder / FILLER).unlink()
        else:
            limit_files(resource.RLIM_INFINITY)

    def entries(self) -> list[str]:
        """Return the paths of all files and folders except the filler."""
        paths = (str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))
        return sorted(path for path in paths if path != FILLER)


def on_small_disk(function: Callable[[SmallDisk], str], folder: Path, *, num_bytes: int = 1 << 20) -> str:
    """Return the answer of `function` in a forked copy that sees a small disk mounted on `folder`."""
    return _answer(lambda: function(SmallDisk(folder, num_bytes=num_bytes)))


def run_unprivileged(function: Callable[[], str]) -> str:
    """Return the answer of `function` in an unprivileged forked copy, to which file permissions apply."""

    def drop_and_call() -> str:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        return function()

    return _answer(drop_and_call)


def mount_small(folder: Path, *, num_bytes: int) -> bool:
    """Mount a tmpfs that only this process and its children see; return False if the kernel does not allow
    it."""
    uid, gid = os.geteuid(), os.getegid()
    if uid != 0 or _libc.unshare(NEW_MOUNTS) != 0:
        if _libc.unshare(NEW_MOUNTS | NEW_USER) != 0:
            return False
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    if _libc.mount(b"none", b"/", None, RECURSIVE | PRIVATE, None) != 0:
        return False
    options = f"size={num_bytes},mode=0777".encode()
    return bool(_libc.mount(b"relay-test", bytes(folder), b"tmpfs", NO_SUID, options) == 0)


def _answer(function: Callable[[], str]) -> str:
    def guarded() -> str:
        try:
            return function()
        except BaseException:  # noqa: BLE001  (told by the parent)
            return f"raised {traceback.format_exc()}"

    status, answer = run_in_fork(guarded)
    assert status == 0, status
    assert not answer.startswith("raised "), answer
    return answer
