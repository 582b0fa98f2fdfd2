"""The sandbox without seccomp or Landlock, in a forked process whose own filter refuses them."""

import asyncio
import ctypes
import json
import os
import struct

import pytest

from rl.tools.sandbox import PythonSandbox
from rl.tools.syscalls import CONDITIONAL, MACHINES
from tests.support.forked import run_in_fork

EINVAL, ENOSYS = 22, 38
LANDLOCK_CREATE_RULESET = 444
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
LIBC = ctypes.CDLL(None, use_errno=True)


def refuse(*, seccomp, landlock):
    """Refuse further seccomp filters or Landlock to this process and its children."""
    prctl = CONDITIONAL["prctl"][MACHINES[os.uname().machine][0]]
    assert prctl is not None
    program = [(0x20, 0, 0, 0)]
    if landlock:
        program += [(0x15, 0, 1, LANDLOCK_CREATE_RULESET), (0x06, 0, 0, ERRNO | ENOSYS)]
    if seccomp:
        program += [(0x15, 0, 3, prctl), (0x20, 0, 0, 16), (0x15, 0, 1, 22), (0x06, 0, 0, ERRNO | EINVAL)]
    program.append((0x06, 0, 0, ALLOW))
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    held = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(held)))
    assert LIBC.prctl(38, 1, 0, 0, 0) == 0
    assert LIBC.prctl(22, 2, ctypes.c_ulong(ctypes.addressof(header)), 0, 0) == 0


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
        ({"landlock": True}, "Landlock is missing: [Errno 38] system call 444: Function not implemented"),
    ],
)
def test_tool_is_refused_without_seccomp_or_landlock(lacks, reason):
    said = on_such_a_kernel(**lacks)
    assert said.startswith("the Python sandbox cannot confine code on this machine: ")
    assert reason in said
    assert "Set allow_unconfined=True to run code anyway" in said


def test_unconfined_code_is_held_by_what_there_is():
    code = [FORK, READ, "1 + 1"]
    assert on_such_a_kernel(seccomp=True, allow_unconfined=True, code=code) == ["0", DENIED_FILE, "2"]
    assert on_such_a_kernel(landlock=True, allow_unconfined=True, code=code) == [DENIED, "True", "2"]
    assert on_such_a_kernel(code=code) == [DENIED, DENIED_FILE, "2"]
