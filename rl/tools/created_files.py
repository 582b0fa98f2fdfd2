"""Count of the files that were ever created or renamed in a folder, by inotify(7).

Listing a folder does not find files that were removed: they keep their space as long as a
descriptor or a memory mapping holds them. Renames count because many of them fill the kernel's
queue, which then loses creations.
"""

from __future__ import annotations

import ctypes
import os
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

_IN_MOVED_FROM, _IN_MOVED_TO, _IN_CREATE, _IN_DELETE = 0x40, 0x80, 0x100, 0x200
# Removals and renames lie between two creations under one name, which the kernel would otherwise
# report as one.
_WATCHED = _IN_CREATE | _IN_DELETE | _IN_MOVED_FROM | _IN_MOVED_TO
_EVENT = struct.Struct("=iIII")
"""`struct inotify_event` without the name: watch, event, cookie, length of the name."""
_READ_BYTES = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)


class CreatedFiles:
    """Number of files created and renamed in each of the watched folders, not below them.

    Raises:
        OSError: the limit of inotify instances or watches is reached (`/proc/sys/fs/inotify`).
    """

    def __init__(self) -> None:
        self._instance = _checked(
            "max_user_instances", _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        )
        self._counts: dict[int, int] = {}
        weakref.finalize(self, os.close, self._instance)

    @contextmanager
    def watched(self, folder: str) -> Iterator[int]:
        """Count in a folder, which must be removed afterwards: that ends the watch."""
        added = _libc.inotify_add_watch(
            self._instance, os.fsencode(folder), ctypes.c_uint32(_WATCHED)
        )
        watch = _checked("max_user_watches", added)
        self._counts[watch] = 0
        try:
            yield watch
        finally:
            del self._counts[watch]

    def count(self, watch: int) -> int:
        """Return the number of files created and renamed so far in a watched folder."""
        try:
            events = os.read(self._instance, _READ_BYTES)
        except BlockingIOError:
            events = b""
        at = 0
        while at < len(events):
            source, event, _, name_bytes = _EVENT.unpack_from(events, at)
            at += _EVENT.size + name_bytes
            if event & (_IN_CREATE | _IN_MOVED_TO) and source in self._counts:
                self._counts[source] += 1
        return self._counts[watch]


def _checked(limit: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        hint = f"raise the sysctl fs.inotify.{limit}, or the limit of open files"
        raise OSError(number, f"inotify: {os.strerror(number)}; {hint}")
    return result
