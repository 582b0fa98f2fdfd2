"""The system calls that confined Python code may make, as a seccomp filter.

A list of what is allowed, so that what nobody thought of, and what later kernels add, is refused.
`seccomp_program` is a pure function to a BPF program (seccomp(2), include/uapi/linux/bpf_common.h):
the same list for x86_64 and aarch64, by the numbers of each.

Imported by the child of `rl/tools/python_sandbox.py` as well: nothing but the standard library.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

Numbers = Mapping[str, tuple[int | None, int | None]]
"""By name: the number on x86_64 and on aarch64; None where that machine has no such call."""

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""By `os.uname().machine`: the column of `Numbers`, and the AUDIT_ARCH that the kernel names it by."""

# fmt: off
ALLOWED: Numbers = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "stat": (4, None),
    "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291), "poll": (7, None), "ppoll": (271, 73),
    "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216),
    "madvise": (28, 233), "mincore": (27, 232), "brk": (12, 214), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "pread64": (17, 67), "pwrite64": (18, 68),
    "readv": (19, 65), "writev": (20, 66), "preadv": (295, 69), "pwritev": (296, 70), "access": (21, None),
    "faccessat": (269, 48), "faccessat2": (439, 439), "pipe": (22, None), "pipe2": (293, 59),
    "select": (23, None), "pselect6": (270, 72), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24),
    "pause": (34, None), "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None), "getitimer": (36, 102),
    "setitimer": (38, 103), "alarm": (37, None), "timer_create": (222, 107), "timer_settime": (223, 110),
    "timer_gettime": (224, 108), "timer_getoverrun": (225, 109), "timer_delete": (226, 111),
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getuid": (102, 174),
    "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getgroups": (115, 158),
    "getresuid": (118, 148), "getresgid": (120, 150), "getpgrp": (111, None), "getpgid": (121, 155),
    "getsid": (124, 156), "getcpu": (309, 168), "getpriority": (140, 141), "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123), "sched_getparam": (143, 121), "sched_getscheduler": (145, 120),
    "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126), "sendfile": (40, 71),
    "copy_file_range": (326, 285), "exit": (60, 93), "exit_group": (231, 94), "uname": (63, 160),
    "flock": (73, 32), "ftruncate": (77, 46), "getdents": (78, None), "getdents64": (217, 61),
    "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "readlink": (89, None),
    "readlinkat": (267, 78), "statfs": (137, 43), "fstatfs": (138, 44), "sysinfo": (99, 179),
    "times": (100, 153), "getrusage": (98, 165), "getrlimit": (97, 163), "futex": (202, 98),
    "set_tid_address": (218, 96), "set_robust_list": (273, 99), "get_robust_list": (274, 100),
    "restart_syscall": (219, 128), "epoll_create": (213, None), "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22), "eventfd": (284, None),
    "eventfd2": (290, 19), "getrandom": (318, 278), "membarrier": (324, 283), "rseq": (334, 293),
    "arch_prctl": (158, None), "umask": (95, 166), "close_range": (436, 436), "fadvise64": (221, 223),
    "sendto": (44, 206), "recvfrom": (45, 207),
}
# Change the entries of a folder: only where Landlock says of which one.
WRITES: Numbers = {
    "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38),
    "renameat2": (316, 276),
}
# Said to be done, and not done: waiting for a disk is nothing that such code needs.
DONE: Numbers = {
    "fsync": (74, 82), "fdatasync": (75, 83), "msync": (26, 227),
}
# Their arguments are behind pointers, which a filter cannot follow. C libraries take clone and openat then.
ABSENT: Numbers = {
    "clone3": (435, 435), "openat2": (437, 437),
}
# By their arguments, see `_conditional`.
CONDITIONAL: Numbers = {
    "clone": (56, 220), "open": (2, None), "openat": (257, 56), "kill": (62, 129), "tgkill": (234, 131),
    "rt_sigaction": (13, 134), "fcntl": (72, 25), "ioctl": (16, 29), "socketpair": (53, 199),
    "prctl": (157, 167), "prlimit64": (302, 261),
}
# fmt: on

NEWEST = 450
"""The last system call that was known when the lists were written; later ones do not exist for the code."""

EPERM, ENOSYS = 1, 38
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _JUMP_EQUAL, _JUMP_GREATER, _AND, _RETURN = 0x20, 0x15, 0x25, 0x54, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
"""Offsets in `struct seccomp_data`."""

CLONE_THREAD = 0x00010000
O_ACCMODE, O_CREAT, O_TRUNC = 0o3, 0o100, 0o1000
AF_UNIX, SOCK_STREAM, SOCK_TYPE_MASK = 1, 1, 0xF
SIGXCPU = 24
PR_SET_NAME, PR_GET_NAME, PR_SET_VMA = 15, 16, 0x53564D41
FCNTL_COMMANDS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)
"""Duplicates, flags and locks. Not F_SETOWN and F_SETSIG, with which the kernel sends any signal to any
process of the user, nor leases and notifications, which signal too."""
IOCTL_REQUESTS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""

Instruction = tuple[int, int, int, int]
"""Operation, jump if true, jump if false, operand."""


def seccomp_program(*, machine: str, pid: int, writes: bool) -> bytes:
    """The filter as an array of `struct sock_filter`.

    Args:
        machine: as `os.uname().machine` says.
        pid: of the process that is filtered: it may signal itself, nobody else.
        writes: whether files may be written, made and removed. False where nothing else
            (Landlock) holds the code to one folder.

    Raises:
        ValueError: there is no list for this machine.
    """
    if machine not in MACHINES:
        raise ValueError(f"no list of system calls for machine {machine!r}, only for {list(MACHINES)}")
    column, arch = MACHINES[machine]
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_JUMP_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        # Also the x32 calls of an x86_64 kernel, whose numbers have bit 30 set.
        (_JUMP_GREATER, 0, 1, NEWEST),
        (_RETURN, 0, 0, _ERRNO | ENOSYS),
    ]
    rules: list[tuple[Numbers, Sequence[Instruction]]] = [
        (ALLOWED, _returns(_ALLOW)),
        (WRITES, _returns(_ALLOW if writes else _ERRNO | EPERM)),
        (DONE, _returns(_ERRNO | 0)),
        (ABSENT, _returns(_ERRNO | ENOSYS)),
    ]
    conditional = _conditional(pid=pid, writes=writes)
    rules += [({name: numbers}, conditional[name]) for name, numbers in CONDITIONAL.items()]
    for calls, body in rules:
        for numbers in calls.values():
            number = numbers[column]
            if number is not None:
                program += [(_JUMP_EQUAL, 0, len(body), number), *body]
    program += _returns(_ERRNO | EPERM)
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _conditional(*, pid: int, writes: bool) -> dict[str, list[Instruction]]:
    """What is done at each call of `CONDITIONAL`. Every list ends in a return, as it spoils the number."""
    own = _argument_is(0, (pid,))
    return {
        "clone": _argument_is(0, (CLONE_THREAD,), mask=CLONE_THREAD),
        "open": _opens(1, writes=writes),
        "openat": _opens(2, writes=writes),
        "kill": own,
        "tgkill": own,
        # Its default action stays, which is the end of the process at its limit of CPU time.
        "rt_sigaction": _argument_is(0, (SIGXCPU,), found=_ERRNO | EPERM, otherwise=_ALLOW),
        "fcntl": _argument_is(1, FCNTL_COMMANDS),
        "ioctl": _argument_is(1, IOCTL_REQUESTS),
        # For the event loop of asyncio. Of streams alone: a datagram could be sent to any address.
        "socketpair": [
            *_jump_unless_argument_is(0, AF_UNIX, over=5),
            *_argument_is(1, (SOCK_STREAM,), mask=SOCK_TYPE_MASK),
            *_returns(_ERRNO | EPERM),
        ],
        "prctl": _argument_is(0, (PR_SET_NAME, PR_GET_NAME, PR_SET_VMA)),
        # Reading one's own limits: no other process, no new values (a null pointer, of two halves).
        "prlimit64": [
            *_jump_unless_argument_is(0, 0, over=5),
            *_jump_unless_argument_is(2, 0, over=3),
            (_LOAD, 0, 0, _ARGUMENTS + 2 * 8 + 4),
            (_JUMP_EQUAL, 0, 1, 0),
            *_returns(_ALLOW),
            *_returns(_ERRNO | EPERM),
        ],
    }


def _opens(flags: int, *, writes: bool) -> list[Instruction]:
    """By the flags of open: for reading; for writing where `writes`. Never reading that truncates, which
    Landlock did not look at before Linux 6.2."""
    if writes:
        mask = O_ACCMODE | O_TRUNC
        return _argument_is(flags, (O_TRUNC,), mask=mask, found=_ERRNO | EPERM, otherwise=_ALLOW)
    return _argument_is(flags, (0,), mask=O_ACCMODE | O_CREAT | O_TRUNC)


def _argument_is(
    index: int,
    values: Sequence[int],
    *,
    mask: int | None = None,
    found: int = _ALLOW,
    otherwise: int = _ERRNO | EPERM,
) -> list[Instruction]:
    """By the lower half of an argument, which is all of it in the kernel's eyes (int, unsigned int) or all
    that it looks at (clone's flags)."""
    body: list[Instruction] = [(_LOAD, 0, 0, _ARGUMENTS + 8 * index)]
    if mask is not None:
        body.append((_AND, 0, 0, mask))
    for position, value in enumerate(values):
        body.append((_JUMP_EQUAL, len(values) - position, 0, value))
    return [*body, (_RETURN, 0, 0, otherwise), (_RETURN, 0, 0, found)]


def _jump_unless_argument_is(index: int, value: int, *, over: int) -> list[Instruction]:
    return [(_LOAD, 0, 0, _ARGUMENTS + 8 * index), (_JUMP_EQUAL, 0, over, value)]


def _returns(action: int) -> list[Instruction]:
    return [(_RETURN, 0, 0, action)]
