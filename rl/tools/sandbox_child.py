"""The child process of `rl/tools/sandbox.py`: confines itself, then runs the code that it was sent.

Started in an empty folder, with a request on standard input: a marshalled dict, because both sides
run the same Python. Every call waits for the imports of this file, so it imports only parts of the
standard library that load in a few milliseconds (not dataclasses, typing, signal, json, re).

The confinement consists of a user or a user namespace of its own, dropped capabilities, resource
limits, Landlock and seccomp, all through ctypes, and is irreversible. Sources: capabilities(7),
user_namespaces(7), setrlimit(2), landlock(7), seccomp(2), prctl(2).
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import struct
import sys
from collections.abc import Mapping, Sequence
from types import CodeType

from rl.tools.syscalls import make_seccomp_program

LAUNCH = (
    "import sys; sys.path.insert(0, sys.argv[1]); from rl.tools import sandbox_child; "
    "sandbox_child.main()"
)
ENDED_BY_ERROR, OUT_OF_MEMORY = 1, 101
"""Exit statuses."""
NAME = "main.py"
"""File in the folder that holds the code; tracebacks quote it."""
RESERVE = 1 << 20
"""Bytes kept for the report of a MemoryError."""
ONLY_AST = 0x400
"""`ast.PyCF_ONLY_AST`."""

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_SIGKILL = 9
_CLONE_NEWUSER = 0x10000000
_FIRST_UNUSED_UID = 0x70000000
"""First of 2**28 user ids that no distribution, systemd or container runtime assigns."""
_CAPABILITY_VERSION_3 = 0x20080522
_CAPSET = {"x86_64": 126, "aarch64": 91}
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
"""System call numbers, the same on every machine."""
_LANDLOCK_ABI_QUESTION, _LANDLOCK_RULE_PATH_BENEATH = 1, 1

_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_REMOVE_FILE, _MAKE_REG, _TRUNCATE = 1 << 5, 1 << 8, 1 << 14
_READ = _READ_FILE | _READ_DIR
_OWN = _READ | _WRITE_FILE | _REMOVE_FILE | _MAKE_REG | _TRUNCATE
"""Rights in the code's own folder: regular files, but no folders, links, pipes, sockets or devices.
"""
_OF_FILES = _READ_FILE | _WRITE_FILE | _TRUNCATE
"""Rights that apply to a path that is not a folder."""
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/dev/urandom")
"""Files that extension modules of the standard library load, and time zones."""

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Exit with the code's exit status, or write the reason of a refusal into the pipe."""
    request = marshal.load(sys.stdin.buffer)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    # Line by line, because stderr has the same pipe, and what is buffered is lost when the process
    # is killed.
    sys.stdout.reconfigure(  # type: ignore[union-attr]
        errors="backslashreplace", line_buffering=True
    )
    sys.path[0:1] = request["import_paths"]
    try:
        confine(
            folder=os.getcwd(),
            readable=request["import_paths"],
            limits=request["limits"],
            parent=request["parent"],
            unconfined=request["unconfined"],
        )
    except OSError as error:
        os.write(request["refusal"], str(error).encode())
        raise SystemExit(ENDED_BY_ERROR) from None
    # Before the code runs, so that no message in this pipe is the code's.
    os.close(request["refusal"])
    raise SystemExit(run(request["code"]))


def run(code: str) -> int:
    """Run code like a notebook cell and return the exit status.

    A cell prints the value of its last expression.
    """
    reserve = [bytes(RESERVE)]
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    sys.argv = [NAME]
    try:
        for part, is_value in _compile_parts(code):
            # Executes statements too, and returns None for them.
            value = eval(part, module.__dict__)
            if is_value and value is not None:
                print(repr(value))
        sys.stdout.flush()
    except SystemExit:
        raise
    except MemoryError as error:
        reserve.clear()
        _report(error)
        return OUT_OF_MEMORY
    except BaseException as error:  # noqa: BLE001  (any error of the code is its result)
        _report(error)
        return ENDED_BY_ERROR
    return 0


def _compile_parts(code: str) -> list[tuple[CodeType, bool]]:
    """Compile all statements except a last expression, and that expression."""
    # Without the module ast, whose import takes five times as long as everything else here.
    tree = compile(code, NAME, "exec", ONLY_AST)
    if not tree.body or type(tree.body[-1]).__name__ != "Expr":
        return [(compile(tree, NAME, "exec"), False)]

    last = tree.body.pop()
    expression = compile("None", NAME, "eval", ONLY_AST)
    expression.body = last.value
    return [(compile(tree, NAME, "exec"), False), (compile(expression, NAME, "eval"), True)]


def _report(error: BaseException) -> None:
    """Print the traceback, beginning with the code's own frames."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != NAME:
        frames = frames.tb_next
    try:
        sys.stdout.flush()
        sys.__excepthook__(type(error), error.with_traceback(frames), frames)
    except MemoryError:
        os.write(2, b"MemoryError\n")


def confine(
    *,
    folder: str,
    readable: Sequence[str],
    limits: Mapping[str, int],
    parent: int,
    unconfined: bool,
) -> None:
    """Confine this process and its future threads; it must have a single thread.

    Args:
        folder: where the process may create, write and remove files.
        readable: further paths that the process may read, besides Python's own.
        limits: resource limits by their name in `resource`, such as "RLIMIT_AS", in that limit's
            unit. RLIMIT_NPROC is set only where this process's threads can be counted apart from
            its user's other ones.
        parent: pid of the parent; this process dies with it.
        unconfined: continue without Landlock or seccomp where they are missing; otherwise OSError.
    """
    apart = _count_threads_apart()
    for name, limit in limits.items():
        if name == "RLIMIT_NPROC" and not apart:
            continue
        number = getattr(resource, name)
        _, hard = resource.getrlimit(number)
        # One more second of CPU time until SIGKILL, so that SIGXCPU at the soft limit can be
        # recognized.
        highest = limit + 1 if name == "RLIMIT_CPU" else limit
        if hard != resource.RLIM_INFINITY:
            limit, highest = min(limit, hard), min(highest, hard)
        resource.setrlimit(number, (limit, highest))
    _drop_capabilities()
    _end_with_parent(parent)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    steps = {"Landlock": lambda: _restrict_files(folder, readable), "seccomp": _filter_system_calls}
    for name, step in steps.items():
        try:
            step()
        except (OSError, ValueError) as error:
            if not unconfined:
                raise OSError(f"{name} is missing: {error}") from error


def _count_threads_apart() -> bool:
    """Give this process a user that has no other processes, as RLIMIT_NPROC counts.

    Returns False if the kernel refuses.

    Root, for whom the kernel does not enforce that limit, takes another real user id, and keeps the
    effective one, by which files are accessed. Anybody else counts anew in a user namespace.
    """
    try:
        os.setresuid(_FIRST_UNUSED_UID + (int.from_bytes(os.urandom(4)) >> 4), -1, -1)
        return True
    except OSError:
        apart = _libc.unshare(_CLONE_NEWUSER) == 0
        # Else root alone may look at the process, which has just had capabilities.
        _prctl(_PR_SET_DUMPABLE, 1)
        return bool(apart)


def _end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent's thread ends."""
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent:
        raise OSError(f"parent {parent} has ended")


def _drop_capabilities() -> None:
    """Drop root's capabilities, which could raise limits again and read every file."""
    number = _CAPSET.get(os.uname().machine)
    if number is not None:
        header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
        _make_system_call(number, header, bytes(24))


def _restrict_files(folder: str, readable: Sequence[str]) -> None:
    """Apply Landlock; raise OSError if the kernel has none or it is switched off."""
    abi = _make_system_call(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_ABI_QUESTION)
    # A ruleset may name only rights that this version knows; a named right without a rule is
    # refused.
    files = (1 << 13) - 1
    files |= 1 << 13 if abi >= 2 else 0
    files |= _TRUNCATE if abi >= 3 else 0
    files |= 1 << 15 if abi >= 5 else 0
    tcp, scopes = 0b11, 0b11
    attributes = struct.pack("=QQQ", files, tcp, scopes)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = _make_system_call(_LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)
    own = os.path.join(sys.base_prefix, "lib"), os.path.join(sys.base_exec_prefix, sys.platlibdir)
    allowed = dict.fromkeys((*own, *_SYSTEM, *_SYSTEM_FILES, *readable), _READ)
    for path, access in {**allowed, "/dev/null": _READ_FILE | _WRITE_FILE, folder: _OWN}.items():
        _allow(ruleset, path, access & files)
    _make_system_call(_LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # Not every system has all of these paths.
    try:
        access &= ~0 if os.path.isdir(path) else _OF_FILES
        rule = struct.pack("=Qi", access, descriptor)
        _make_system_call(_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_RULE_PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)


def _filter_system_calls() -> None:
    """Install the seccomp filter.

    Raises OSError if the kernel takes none, ValueError if this machine has none.
    """
    program = make_seccomp_program(machine=os.uname().machine, pid=os.getpid())
    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(
        struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    )
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(header))


def _prctl(option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    if _libc.prctl(ctypes.c_int(option), *padded) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl option {option}: {os.strerror(number)}")


def _make_system_call(number: int, *arguments: bytes | int | None) -> int:
    """Make a raw system call; bytes are passed by address, integers as longs."""
    passed = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = _libc.syscall(ctypes.c_long(number), *passed)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"system call {number}: {os.strerror(code)}")
    return result
