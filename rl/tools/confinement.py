"""A process gives up for good what code of a model must not have: by capabilities, limits of resources,
Landlock and seccomp, all through ctypes.

Every step is one way and holds without anybody watching; what remains to be watched from outside (wall-clock
time, output, number of files) is in `rl/tools/sandbox_process.py`.

Imported by the child of `rl/tools/python_sandbox.py`: nothing but the standard library, and of that only what
loads in a few milliseconds (not dataclasses, typing, signal, json, re).

Sources: capabilities(7), setrlimit(2), landlock(7), seccomp(2), prctl(2).
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys
from collections.abc import Mapping, Sequence

from rl.tools.syscalls import seccomp_program

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
_SIGKILL = 9
_CAPABILITY_VERSION_3 = 0x20080522
_CAPSET = {"x86_64": 126, "aarch64": 91}
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
"""The same numbers on every machine."""
_LANDLOCK_ABI_QUESTION, _LANDLOCK_RULE_PATH_BENEATH = 1, 1

_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_REMOVE_FILE, _MAKE_REG, _TRUNCATE = 1 << 5, 1 << 8, 1 << 14
_READ = _READ_FILE | _READ_DIR
_OWN = _READ | _WRITE_FILE | _REMOVE_FILE | _MAKE_REG | _TRUNCATE
"""Of the code's own folder: files in it, and no folders, links, pipes, sockets or devices."""
_OF_FILES = _READ_FILE | _WRITE_FILE | _TRUNCATE
"""What can be said of a path that is no folder."""

_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/dev/urandom")
"""What extension modules of the standard library load, and time zones."""


def confine(
    *, folder: str, readable: Sequence[str], limits: Mapping[str, int], parent: int, unfiltered: bool
) -> tuple[int, str]:
    """Confine this process and its future threads; only while it has a single thread.

    Returns the version of Landlock that holds it to its files, 0 without Landlock; and why system calls are
    not filtered, empty where they are.

    Args:
        folder: where it may make, write and remove files, if there is Landlock.
        readable: paths that it may read beside Python's own.
        limits: by name of the constant in `resource`, such as "RLIMIT_AS", in that constant's unit.
        parent: pid of the process with which this one ends.
        unfiltered: go on where seccomp is not there.

    Raises:
        OSError: a step is refused, or seccomp is not there.
    """
    for name, limit in limits.items():
        number = getattr(resource, name)
        _, hard = resource.getrlimit(number)
        # For CPU time a second more, as the signal at the first limit tells what happened.
        both = [limit, limit + 1 if name == "RLIMIT_CPU" else limit]
        if hard != resource.RLIM_INFINITY:
            both = [min(value, hard) for value in both]
        resource.setrlimit(number, (both[0], both[1]))
    _drop_capabilities()
    _end_with(parent)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    abi = _restrict_files(folder, readable)
    missing = ""
    try:
        _filter_system_calls(writes=abi > 0)
    except (OSError, ValueError) as error:
        if not unfiltered:
            raise OSError(f"seccomp is not there: {error}") from error
        missing = str(error)
    return abi, missing


def _end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent's thread is gone."""
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent:
        raise OSError(f"parent {parent} has ended")


def _drop_capabilities() -> None:
    """Those of root, who could raise limits again and read everybody's files; others have none."""
    number = _CAPSET.get(os.uname().machine)
    if number is None:
        return
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _system_call(number, header, bytes(24))


def _restrict_files(folder: str, readable: Sequence[str]) -> int:
    """Landlock's version, 0 where the kernel has none or it is switched off."""
    try:
        abi = _system_call(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_ABI_QUESTION)
    except OSError:
        return 0
    # What a version does not know cannot be handled; what is handled and has no rule is refused.
    files = (1 << 13) - 1
    files |= (1 << 13 if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0) | (1 << 15 if abi >= 5 else 0)
    tcp, scopes = 0b11, 0b11
    attributes = struct.pack("=QQQ", files, tcp, scopes)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = _system_call(_LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)
    own = os.path.join(sys.base_prefix, "lib"), os.path.join(sys.base_exec_prefix, sys.platlibdir)
    allowed = dict.fromkeys((*own, *_SYSTEM, *_SYSTEM_FILES, *readable), _READ)
    for path, access in {**allowed, "/dev/null": _READ_FILE | _WRITE_FILE, folder: _OWN}.items():
        _allow(ruleset, path, access & files)
    _system_call(_LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return abi


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # Not every system has every one of them.
    try:
        access &= ~0 if os.path.isdir(path) else _OF_FILES
        rule = struct.pack("=Qi", access, descriptor)
        _system_call(_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_RULE_PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)


def _filter_system_calls(*, writes: bool) -> None:
    """Raises OSError where the kernel takes no filter, ValueError where there is none for this machine."""
    program = seccomp_program(machine=os.uname().machine, pid=os.getpid(), writes=writes)
    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(code)))
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(header))


_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    if _libc.prctl(ctypes.c_int(option), *padded) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl option {option}: {os.strerror(number)}")


def _system_call(number: int, *arguments: bytes | int | None) -> int:
    """The raw call; bytes are passed by address, integers as long ones."""
    passed = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = _libc.syscall(ctypes.c_long(number), *passed)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"system call {number}: {os.strerror(code)}")
    return result
