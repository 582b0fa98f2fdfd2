"""Confinement of the sandbox: the filter's program, run by an interpreter of the few BPF
instructions that it uses, so that the list for the machine that the tests do not run on is tested
too; and kernels without seccomp or Landlock.
"""

import asyncio
import json
import os
import signal
import struct

import pytest

from rl.tools.sandbox import PythonSandbox
from rl.tools.syscalls import (
    ABSENT,
    ALLOWED,
    CONDITIONAL,
    DONE,
    MACHINES,
    NEWEST,
    NUMBERS,
    make_seccomp_program,
)
from tests.support.forked import run_in_fork
from tests.support.kernels import install_filter

PID = 4321
ALLOW, EPERM, ENOSYS, NOTHING, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x00050000, 0x80000000
EINVAL = 0x00050016
HIGH = 1 << 32


def outcome(number, *arguments, machine="x86_64", arch=None):
    """Return the filter's decision for one call."""
    data = struct.pack("=IIQ", number, MACHINES[machine][1] if arch is None else arch, 0)
    data += struct.pack("=6Q", *(*arguments, *[0] * 6)[:6])
    program = make_seccomp_program(machine=machine, pid=PID)
    instructions = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    accumulator, at = 0, 0
    while True:
        operation, if_true, if_false, operand = instructions[at]
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, operand)
        elif operation == 0x54:
            accumulator &= operand
        elif operation == 0x06:
            return operand
        else:
            held = accumulator == operand if operation == 0x15 else accumulator > operand
            assert operation in (0x15, 0x25)
            at += if_true if held else if_false


BOTH = pytest.mark.parametrize("machine", list(MACHINES))


@BOTH
def test_every_number_has_the_outcome_of_its_list(machine):
    column = MACHINES[machine][0]
    listed = {
        numbers[column]: name for name, numbers in NUMBERS.items() if numbers[column] is not None
    }
    assert len(listed) == sum(numbers[column] is not None for numbers in NUMBERS.values())
    for number in range(NEWEST + 1):
        name = listed.get(number)
        if name in CONDITIONAL:
            continue
        expected = ALLOW if name in ALLOWED else NOTHING if name in DONE else EPERM
        assert outcome(number, machine=machine) == (ENOSYS if name in ABSENT else expected), (
            number,
            name,
        )


@BOTH
@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("clone", (0x003D0F00,), ALLOW),
        ("clone", (signal.SIGCHLD,), EPERM),
        ("clone", (0x10000000 | signal.SIGCHLD,), EPERM),
        ("mmap", (0, 4096, 3, 0x22), ALLOW),
        ("mmap", (0, 4096, 1, 0x802, 3), ALLOW),
        ("mmap", (0, 4096, 3, 0x01, 3), EPERM),
        ("mmap", (0, 4096, 3, 0x21), EPERM),
        ("mmap", (0, 4096, 3, 0x03, 3), EPERM),
        ("kill", (PID, 9), ALLOW),
        ("kill", (PID + 1, 0), EPERM),
        ("kill", (2**64 - 1, 9), EPERM),
        ("tgkill", (1, 1, 15), EPERM),
        ("openat", (3, 4, os.O_RDONLY | os.O_CLOEXEC), ALLOW),
        ("openat", (3, 4, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), ALLOW),
        ("openat", (3, 4, os.O_RDONLY | os.O_TRUNC), EPERM),
        ("openat", (3, 4, os.O_RDWR | os.O_TMPFILE), EPERM),
        ("fcntl", (3, 4), ALLOW),
        ("fcntl", (3, 8), EPERM),
        ("fcntl", (3, 1024), EPERM),
        ("ioctl", (1, 0x5401), ALLOW),
        ("ioctl", (1, 0x5412), EPERM),
        ("socketpair", (1, 1 | 0o2000000 | 0o4000), ALLOW),
        ("socketpair", (1, 2), EPERM),
        ("socketpair", (2, 1), EPERM),
        ("prctl", (15,), ALLOW),
        ("prctl", (22, 2), EPERM),
        ("prlimit64", (0, 7, 0), ALLOW),
        ("prlimit64", (0, 7, 4096), EPERM),
        ("prlimit64", (0, 7, HIGH), EPERM),
        ("prlimit64", (PID + 1, 7, 0), EPERM),
    ],
)
def test_call_is_judged_by_its_arguments(name, arguments, expected, machine):
    number = NUMBERS[name][MACHINES[machine][0]]
    assert outcome(number, *arguments, machine=machine) == expected


@BOTH
def test_calls_that_are_not_known_yet_do_not_exist_and_those_of_another_machine_end_the_process(
    machine,
):
    assert outcome(NEWEST + 1, machine=machine) == ENOSYS
    assert outcome(0x40000000 | 57, machine=machine) == ENOSYS  # fork, by the x32 interface
    assert outcome(0, machine=machine, arch=0x40000003) == KILL  # i386, on an x86_64 kernel


def test_machine_without_a_list_is_refused():
    with pytest.raises(ValueError, match="no list of system calls for machine 'riscv64'"):
        make_seccomp_program(machine="riscv64", pid=1)


# Kernels without seccomp or Landlock: a forked process whose own filter refuses them

LANDLOCK_CREATE_RULESET = 444


def refuse(*, seccomp, landlock):
    """Refuse further seccomp filters or Landlock to this process and its children."""
    prctl = CONDITIONAL["prctl"][MACHINES[os.uname().machine][0]]
    assert prctl is not None
    program = [(0x20, 0, 0, 0)]
    if landlock:
        program += [(0x15, 0, 1, LANDLOCK_CREATE_RULESET), (0x06, 0, 0, ENOSYS)]
    if seccomp:
        program += [(0x15, 0, 3, prctl), (0x20, 0, 0, 16), (0x15, 0, 1, 22), (0x06, 0, 0, EINVAL)]
    program.append((0x06, 0, 0, ALLOW))
    install_filter(program)


def on_such_a_kernel(*, seccomp=False, landlock=False, code=(), **settings):
    """Return the last line of each piece of code, or the reason of a refusal."""

    def copy():
        refuse(seccomp=seccomp, landlock=landlock)
        try:
            sandbox = PythonSandbox.Config(time_limit_s=20, **settings).build()
        except ValueError as error:
            return json.dumps(str(error))
        return json.dumps([asyncio.run(sandbox.run(piece)).text.splitlines()[-1] for piece in code])

    status, answer = run_in_fork(copy)
    assert status == 0
    return json.loads(answer)


FORK = "import os\npid = os.fork()\nif pid == 0: os._exit(0)\nos.waitpid(pid, 0)[1]"
READ = "'root' in open('/etc/passwd').read()"
DENIED = "PermissionError: [Errno 1] Operation not permitted"
DENIED_FILE = "PermissionError: [Errno 13] Permission denied: '/etc/passwd'"


@pytest.mark.parametrize(
    ("lacks", "reason"),
    [
        ({"seccomp": True}, "seccomp is missing: [Errno 22] prctl option 22: Invalid argument"),
        (
            {"landlock": True},
            "Landlock is missing: [Errno 38] system call 444: Function not implemented",
        ),
    ],
)
def test_tool_is_refused_without_seccomp_or_landlock(lacks, reason):
    said = on_such_a_kernel(**lacks)
    assert said.startswith("the Python sandbox cannot confine code on this machine: ")
    assert reason in said
    assert "Set allow_unconfined=True to run code anyway" in said


def test_unconfined_code_is_held_by_what_there_is():
    code = [FORK, READ, "1 + 1"]
    assert on_such_a_kernel(seccomp=True, allow_unconfined=True, code=code) == [
        "0",
        DENIED_FILE,
        "2",
    ]
    assert on_such_a_kernel(landlock=True, allow_unconfined=True, code=code) == [
        DENIED,
        "True",
        "2",
    ]
    assert on_such_a_kernel(code=code) == [DENIED, DENIED_FILE, "2"]


def test_kernel_that_changes_its_mind_after_the_check_runs_no_code():
    def copy():
        sandbox = PythonSandbox.Config(time_limit_s=20).build()
        refuse(seccomp=True, landlock=False)
        with pytest.raises(RuntimeError, match=r"^the Python sandbox: seccomp is missing"):
            asyncio.run(sandbox.run("print('seen')"))
        return "refused"

    assert run_in_fork(copy) == (0, "refused")
