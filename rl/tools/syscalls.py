"""The system calls that confined Python code may make, as a seccomp filter.

An allow-list, so that forgotten calls and those of later kernels are refused.
`make_seccomp_program` returns a BPF program (seccomp(2), include/uapi/linux/bpf_common.h) from one
list for x86_64 and aarch64.

The sandbox's child imports this file too, so it needs nothing but the standard library.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

Numbers = Mapping[str, tuple[int | None, int | None]]
"""Numbers on x86_64 and aarch64 by name; None if that machine has no such call."""

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of `Numbers` and AUDIT_ARCH of the kernel, by `os.uname().machine`."""

# fmt: off
ALLOWED: Numbers = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "stat": (4, None),
    "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291), "poll": (7, None),
    "ppoll": (271, 73),
    "lseek": (8, 62), "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216),
    "madvise": (28, 233), "mincore": (27, 232), "brk": (12, 214), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "pread64": (17, 67),
    "pwrite64": (18, 68),
    "readv": (19, 65), "writev": (20, 66), "preadv": (295, 69), "pwritev": (296, 70),
    "access": (21, None),
    "faccessat": (269, 48), "faccessat2": (439, 439), "pipe": (22, None), "pipe2": (293, 59),
    "select": (23, None), "pselect6": (270, 72), "dup": (32, 23), "dup2": (33, None),
    "dup3": (292, 24),
    "pause": (34, None), "nanosleep": (35, 101), "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None),
    "getitimer": (36, 102),
    "setitimer": (38, 103), "alarm": (37, None), "timer_create": (222, 107),
    "timer_settime": (223, 110),
    "timer_gettime": (224, 108), "timer_getoverrun": (225, 109), "timer_delete": (226, 111),
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getuid": (102, 174),
    "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getgroups": (115, 158),
    "getresuid": (118, 148), "getresgid": (120, 150), "getpgrp": (111, None), "getpgid": (121, 155),
    "getsid": (124, 156), "getcpu": (309, 168), "getpriority": (140, 141), "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123), "sched_getparam": (143, 121), "sched_getscheduler": (145, 120),
    "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126),
    "sendfile": (40, 71),
    "copy_file_range": (326, 285), "exit": (60, 93), "exit_group": (231, 94), "uname": (63, 160),
    "flock": (73, 32), "ftruncate": (77, 46), "getdents": (78, None), "getdents64": (217, 61),
    "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "readlink": (89, None),
    "readlinkat": (267, 78), "statfs": (137, 43), "fstatfs": (138, 44), "sysinfo": (99, 179),
    "times": (100, 153), "getrusage": (98, 165), "getrlimit": (97, 163), "futex": (202, 98),
    "set_tid_address": (218, 96), "set_robust_list": (273, 99), "get_robust_list": (274, 100),
    "restart_syscall": (219, 128), "epoll_create": (213, None), "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22),
    "eventfd": (284, None),
    "eventfd2": (290, 19), "getrandom": (318, 278), "membarrier": (324, 283), "rseq": (334, 293),
    "arch_prctl": (158, None), "umask": (95, 166), "close_range": (436, 436),
    "fadvise64": (221, 223),
    "sendto": (44, 206), "recvfrom": (45, 207), "unlink": (87, None), "unlinkat": (263, 35),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "rt_sigaction": (13, 134),
}
# Reported as done without being done: such code need not wait for a disk.
DONE: Numbers = {
    "fsync": (74, 82), "fdatasync": (75, 83), "msync": (26, 227),
}
# Their arguments are behind pointers, which a filter cannot follow; C libraries fall back to clone
# and openat.
ABSENT: Numbers = {
    "clone3": (435, 435), "openat2": (437, 437),
}
# Allowed depending on their arguments, see `_list_conditions`.
CONDITIONAL: Numbers = {
    "clone": (56, 220), "mmap": (9, 222), "open": (2, None), "openat": (257, 56), "kill": (62, 129),
    "tgkill": (234, 131), "fcntl": (72, 25), "ioctl": (16, 29), "socketpair": (53, 199),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
}
# fmt: on

NUMBERS: Numbers = {**ALLOWED, **DONE, **ABSENT, **CONDITIONAL}
NEWEST = 450
"""Newest system call known when the lists were written; the code gets ENOSYS for later ones."""

EPERM, ENOSYS = 1, 38
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _JUMP_EQUAL, _JUMP_GREATER, _AND, _RETURN = 0x20, 0x15, 0x25, 0x54, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
"""Offsets in `struct seccomp_data`."""

CLONE_THREAD = 0x00010000
MAP_TYPE, MAP_PRIVATE = 0xF, 2
O_ACCMODE, O_TRUNC, O_TMPFILE = 0o3, 0o1000, 0o20000000
AF_UNIX, SOCK_STREAM, SOCK_TYPE_MASK = 1, 1, 0xF
PR_SET_NAME, PR_GET_NAME, PR_SET_VMA = 15, 16, 0x53564D41
FCNTL_COMMANDS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)
"""Duplicates, flags and locks. Excluded are F_SETOWN and F_SETSIG, which let the kernel send any
signal to any process of the user, and leases and notifications, which send signals too."""
IOCTL_REQUESTS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
_EVERY_BIT = 0xFFFFFFFF

Instruction = tuple[int, int, int, int]
"""Operation, jump if true, jump if false, and operand."""
Condition = tuple[float, int, Sequence[int]]
"""Number of an argument, mask, and allowed values of the argument's lower half: the kernel reads no
more of an int or of clone's flags. Half a number more is the upper half."""


def make_seccomp_program(*, machine: str, pid: int) -> bytes:
    """Return the filter as an array of `struct sock_filter`.

    Raises ValueError for a machine without a list.

    Args:
        machine: as in `os.uname().machine`.
        pid: the filtered process, which may send signals only to itself.
    """
    if machine not in MACHINES:
        raise ValueError(
            f"no list of system calls for machine {machine!r}, only for {list(MACHINES)}"
        )
    column, arch = MACHINES[machine]
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_JUMP_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        # Covers the x32 calls of an x86_64 kernel too, whose numbers have bit 30 set.
        (_JUMP_GREATER, 0, 1, NEWEST),
        (_RETURN, 0, 0, _ERRNO | ENOSYS),
    ]
    bodies: dict[str, list[Instruction]] = {}
    for names, action in ((ALLOWED, _ALLOW), (DONE, _ERRNO), (ABSENT, _ERRNO | ENOSYS)):
        for name in names:
            bodies[name] = [(_RETURN, 0, 0, action)]
    for name, conditions in _list_conditions(pid).items():
        bodies[name] = _allow_if(conditions)
    for name, body in bodies.items():
        number = NUMBERS[name][column]
        if number is not None:
            program += [(_JUMP_EQUAL, 0, len(body), number), *body]
    program.append((_RETURN, 0, 0, _ERRNO | EPERM))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _list_conditions(pid: int) -> dict[str, list[Condition]]:
    """Return the conditions for each call of `CONDITIONAL`, all of which must hold."""
    own: list[Condition] = [(0, _EVERY_BIT, (pid,))]
    # Not a read-only open that truncates, which Landlock did not check before Linux 6.2, and no
    # file without a name, which the parent cannot count.
    opens = (O_ACCMODE | O_TRUNC | O_TMPFILE, (0, 1, 2, 1 | O_TRUNC, 2 | O_TRUNC))
    return {
        "clone": [(0, CLONE_THREAD, (CLONE_THREAD,))],
        # Shared memory, even anonymous, keeps all its pages while one of them is mapped: beyond
        # RLIMIT_AS.
        "mmap": [(3, MAP_TYPE, (MAP_PRIVATE,))],
        "open": [(1, *opens)],
        "openat": [(2, *opens)],
        "kill": own,
        "tgkill": own,
        "fcntl": [(1, _EVERY_BIT, FCNTL_COMMANDS)],
        "ioctl": [(1, _EVERY_BIT, IOCTL_REQUESTS)],
        # For the event loop of asyncio. Streams only: a datagram could be sent to any address.
        "socketpair": [(0, _EVERY_BIT, (AF_UNIX,)), (1, SOCK_TYPE_MASK, (SOCK_STREAM,))],
        "prctl": [(0, _EVERY_BIT, (PR_SET_NAME, PR_GET_NAME, PR_SET_VMA))],
        # Reading the process's own limits: pid 0, and a null pointer (in two halves) as new values.
        "prlimit64": [(index, _EVERY_BIT, (0,)) for index in (0, 2, 2.5)],
    }


def _allow_if(conditions: Sequence[Condition]) -> list[Instruction]:
    body: list[Instruction] = []
    for index, mask, values in conditions:
        body += [(_LOAD, 0, 0, _ARGUMENTS + int(8 * index)), (_AND, 0, 0, mask)]
        # An equal value jumps over the rest of the values and the refusal.
        body += [(_JUMP_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
        body.append((_RETURN, 0, 0, _ERRNO | EPERM))
    return [*body, (_RETURN, 0, 0, _ALLOW)]
