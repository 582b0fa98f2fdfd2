"""Kernels and users that lack something, imitated in a forked process."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
ALLOW, EPERM = 0x7FFF0000, 0x00050001
NOBODY = 65534
_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20000, 4096, 16384, 1 << 18
_UNSHARE = {"x86_64": 272, "aarch64": 97}
_SETRESUID = {"x86_64": 117, "aarch64": 147}

Instruction = tuple[int, int, int, int]


def install_filter(program: Sequence[Instruction]) -> None:
    """Install a seccomp filter for this process and its children."""
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    held = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(held)))
    assert LIBC.prctl(38, 1, 0, 0, 0) == 0
    assert LIBC.prctl(22, 2, ctypes.c_ulong(ctypes.addressof(header)), 0, 0) == 0


def refuse_users() -> None:
    """Refuse user namespaces and other user ids, as many containers do."""
    machine = os.uname().machine
    calls = (_UNSHARE[machine], _SETRESUID[machine])
    refused = [
        instruction for call in calls for instruction in ((0x15, 0, 1, call), (0x06, 0, 0, EPERM))
    ]
    install_filter([(0x20, 0, 0, 0), *refused, (0x06, 0, 0, ALLOW)])


def become_nobody(folder: Path) -> None:
    """Become an ordinary user for good; root only. `folder` becomes that user's.

    An interpreter in a home folder, which other users cannot open, is mounted in `folder`, for this
    process only.
    """
    python = Path(os.path.realpath(sys.executable))
    if not all(parent.stat().st_mode & 0o001 for parent in python.parents):
        _mount_python(python, seen=folder / "python")
    os.chown(folder, NOBODY, NOBODY)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def _mount_python(python: Path, *, seen: Path) -> None:
    assert LIBC.unshare(_CLONE_NEWNS) == 0, "this test needs CAP_SYS_ADMIN where it runs as root"
    assert LIBC.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None) == 0
    seen.mkdir()
    assert (
        LIBC.mount(
            os.fsencode(sys.base_prefix), os.fsencode(seen), None, ctypes.c_ulong(_MS_BIND), None
        )
        == 0
    )
    sys.executable = str(seen / python.relative_to(os.path.realpath(sys.base_prefix)))
