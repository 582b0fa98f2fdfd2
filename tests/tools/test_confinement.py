"""What happens where the kernel, or a container, has no seccomp or no Landlock: in a copy of this process
whose own filter refuses them."""

import asyncio
import ctypes
import json
import os
import struct

import pytest

from rl.tools.python_sandbox import PythonSandbox
from rl.tools.syscalls import CONDITIONAL, MACHINES
from tests.support.forked import in_copy

EINVAL, ENOSYS = 22, 38
LANDLOCK_CREATE_RULESET = 444
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
LIBC = ctypes.CDLL(None, use_errno=True)


def refuse(*, seccomp, landlock):
    """From now on this process and its children find no seccomp (any further filter), or no Landlock."""
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
    """How the sandbox is held there, and the last line that each piece of code says; or why there is none."""

    def copy():
        refuse(seccomp=seccomp, landlock=landlock)
        try:
            sandbox = PythonSandbox.Config(time_limit_s=20, **settings).build()
        except ValueError as error:
            return json.dumps(str(error))
        held = sandbox.confinement
        said = [asyncio.run(sandbox.run(piece)).text.splitlines()[-1] for piece in code]
        return json.dumps([held.seccomp, held.landlock_abi > 0, *said])

    status, answer = in_copy(copy)
    assert status == 0
    return json.loads(answer)


FORK = "import os\npid = os.fork()\nif pid == 0: os._exit(0)\nos.waitpid(pid, 0)[1]"
READ = "'root' in open('/etc/passwd').read()"
WRITE = "open('a', 'w')"
REMOVE = "import os; os.remove('main.py')"
DENIED = "PermissionError: [Errno 1] Operation not permitted"


def test_tool_is_refused_without_seccomp():
    said = on_such_a_kernel(seccomp=True)
    assert said.startswith("the Python sandbox cannot hold code on this machine: seccomp is not there: ")
    assert "prctl option 22: Invalid argument" in said
    assert "allow_unconfined=True runs it all the same" in said


def test_unconfined_code_has_its_files_held_by_landlock_alone():
    held = on_such_a_kernel(seccomp=True, allow_unconfined=True, code=[FORK, READ, "1 + 1"])
    assert held == [False, True, "0", "PermissionError: [Errno 13] Permission denied: '/etc/passwd'", "2"]


def test_without_landlock_no_file_is_written_or_removed_and_all_may_be_read():
    held = on_such_a_kernel(landlock=True, code=[WRITE, REMOVE, FORK, READ])
    assert held == [True, False, f"{DENIED}: 'a'", f"{DENIED}: 'main.py'", DENIED, "True"]


def test_with_both_all_is_held():
    denied = "PermissionError: [Errno 13] Permission denied: '/etc/passwd'"
    assert on_such_a_kernel(code=[f"{WRITE}.close()\n1", FORK, READ]) == [True, True, "1", DENIED, denied]


def test_kernel_that_changes_its_mind_after_the_check_shows_no_code():
    def copy():
        sandbox = PythonSandbox.Config(time_limit_s=20).build()
        refuse(seccomp=True, landlock=False)
        with pytest.raises(RuntimeError, match=r"^the Python sandbox: seccomp is not there"):
            asyncio.run(sandbox.run("print('seen')"))
        return "refused"

    assert in_copy(copy) == (0, "refused")
