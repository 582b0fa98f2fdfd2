"""The Python sandbox with real processes, of which nothing is left afterwards."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rl.tools.sandbox import ROOT, PythonSandbox
from rl.tools.tool import ToolError, ToolTimeoutError

DEADLINE_S = 20.0
"""Timeout for events that take milliseconds on an idle machine."""


def limited(**settings):
    return PythonSandbox.Config(
        **{"time_limit_s": DEADLINE_S, "cpu_limit_s": 20, **settings}
    ).build()


@pytest.fixture(scope="module")
def sandbox():
    return limited()


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Give the sandboxes a temporary folder, and check that no folder and no process is left."""
    path = tmp_path / "folders"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    yield path
    assert list(path.iterdir()) == []
    assert processes_in(path) == []


def processes_in(path):
    """Pids of processes whose working folder is, or was, below `path`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(folder / "cwd").startswith(str(path)):
                found.append(int(folder.name))
    return found


def run(sandbox, code):
    return asyncio.run(sandbox.run(code))


BEGIN = "open('begun', 'w'); import time; time.sleep(60)"


async def until(holds):
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.005)


async def begun(folders, *, num=1):
    """Wait until `num` sandboxes run `BEGIN`."""
    await until(lambda: len(list(folders.glob("*/begun"))) >= num)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("6 * 7", "42"),
        ("print('a')\nx = 2\nx ** 10", "a\n1024"),
        ("x = 5", "(no output)"),
        ("'é\\ud800'", "'é\\ud800'"),
        ("import sys; print(1); print('to stderr', file=sys.stderr); print(2); 3",
            "1\nto stderr\n2\n3"),
        ("import math, json, re, collections, datetime, decimal, fractions, hashlib, zlib, random; "
         "1", "1"),
        ("import zoneinfo; zoneinfo.ZoneInfo('Europe/Paris').key", "'Europe/Paris'"),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nA(1)", "A(x=1)"),
        ("import asyncio; asyncio.run(asyncio.sleep(0, 'slept'))", "'slept'"),
        ("from concurrent.futures import ThreadPoolExecutor as T\nlist(T(4).map(abs, [-1, 2]))",
            "[1, 2]"),
        ("import tempfile\nf = tempfile.TemporaryFile()\nf.write(b'abc')", "3"),
        ("import os\nopen('a', 'w')\nos.rename('a', 'b')\nos.remove('b')\nos.listdir()",
            "['main.py']"),
        ("__name__", "'__main__'"),
    ],
)  # fmt: skip
def test_code_answers_with_what_it_prints_and_its_last_value(sandbox, code, message):
    assert asyncio.run(sandbox.call({"code": code})) == message


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "print('a')\n1 / 0",
            'a\nTraceback (most recent call last):\n  File "main.py", line 2, in',
        ),
        ("def f(:", "SyntaxError"),
        ("import sys; sys.exit('bye')", "bye"),
        ("import os; os._exit(102)", "Error: exit status 102"),
        ("print(1, flush=True); import os; os.abort()", "1\nError: ended by SIGABRT"),
        ("import os; os.kill(os.getpid(), 40)", "Error: ended by signal 40"),
        ("input()", "EOFError"),
        ("import numpy", "ModuleNotFoundError"),
        ("def f(): f()\nf()", "RecursionError"),
    ],
)
def test_error_of_the_code_is_a_tool_error(sandbox, code, message):
    with pytest.raises(ToolError) as caught:
        asyncio.run(sandbox.call({"code": code}))
    assert message in str(caught.value)
    assert not isinstance(caught.value, ToolTimeoutError)
    assert "sandbox_child" not in str(caught.value)


def test_nothing_is_inherited(sandbox, monkeypatch):
    monkeypatch.setenv("RELAY_SECRET", "s3cret")
    code = """
import os
def is_open(n):
    try:
        os.fstat(n)
    except OSError:
        return False
    return True
# Python itself sets LC_CTYPE.
print(set(os.environ) - {"LC_CTYPE"}, os.listdir(), os.getsid(0) == os.getpid())
print([n for n in range(64) if is_open(n)])
"""
    with open(__file__) as ours:
        os.set_inheritable(ours.fileno(), True)
        assert run(sandbox, code).output == "set() ['main.py'] True\n[0, 1, 2]\n"


def test_modules_of_import_paths_are_there_and_cannot_be_changed(tmp_path):
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "helper.py").write_text("answer = 42")
    sandbox = limited(import_paths=(str(tmp_path / "extra"),))
    assert run(sandbox, "import helper; helper.answer").output == "42\n"
    assert "PermissionError" in run(sandbox, "import helper; open(helper.__file__, 'w')").output
    assert (tmp_path / "extra" / "helper.py").read_text() == "answer = 42"


ATTEMPTS = [
    "os.fork()",
    "os.posix_spawn('/bin/true', ['true'], {})",
    "os.execv('/bin/true', ['true'])",
    "import subprocess; subprocess.run(['true'])",
    "import multiprocessing; multiprocessing.get_context('fork').Process(target=print).start()",
    "import socket; socket.socket()",
    "import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9')",
    "os.kill(parent, 0)",
    "os.killpg(os.getpgid(parent), 0)",
    "os.kill(-1, 0)",
    "import fcntl; fcntl.fcntl(1, fcntl.F_SETOWN, parent)",
    "open('/etc/passwd')",
    "open(f'/proc/{parent}/environ')",
    "open('/proc/self/maps')",
    "open('/proc/self/mem', 'r+b')",
    "os.listdir('/')",
    "os.listdir('..')",
    "open('../beside', 'w')",
    "os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)",
    "open(os.__file__, 'a')",
    "os.symlink('/etc/passwd', 'link')",
    "os.link('/etc/passwd', 'link')",
    "os.mkdir('folder')",
    "os.mkfifo('pipe')",
    "os.chmod('main.py', 0)",
    "os.truncate('main.py', 0)",
    "os.setpriority(os.PRIO_PROCESS, parent, 19)",
    "os.sched_setaffinity(0, [0])",
]
TRY = """
for attempt in ATTEMPTS:
    try:
        exec(attempt)
    except Exception as error:  # urllib wraps the error of the socket
        denied = isinstance(error, PermissionError) or "Operation not permitted" in str(error)
        print(denied, attempt, repr(error))
    else:
        print(False, attempt)
"""


def test_everything_outside_is_denied(sandbox, tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("kept")
    deletions = ["os.remove(kept)", "os.rename(kept, 'b')", "shutil.rmtree(os.path.dirname(kept))"]
    attempts = [*ATTEMPTS, *deletions]
    code = (
        f"import os, shutil\nparent, kept = os.getppid(), {str(kept)!r}\nATTEMPTS = "
        f"{attempts!r}\n{TRY}"
    )
    lines = run(sandbox, code).output.splitlines()
    assert len(lines) == len(attempts)
    assert [line for line in lines if not line.startswith("True ")] == []
    assert kept.read_text() == "kept"


def test_raw_system_calls_are_denied(sandbox):
    """Call through ctypes, past Python's own checks; all calls are harmless if they succeed."""
    x86_64 = {
        "fork": 57, "vfork": 58, "clone": 56, "clone3": 435, "execve": 59, "execveat": 322,
        "socket": 41,
        "connect": 42, "bind": 49, "sendmsg": 46, "ptrace": 101, "process_vm_readv": 310,
        "tkill": 200,
        "rt_sigqueueinfo": 129, "pidfd_open": 434, "pidfd_send_signal": 424, "pidfd_getfd": 438,
        "unshare": 272, "setns": 308, "mount": 165, "chroot": 161, "pivot_root": 155,
        "io_uring_setup": 425,
        "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "memfd_create": 319, "shmget": 29,
        "keyctl": 250, "setuid": 105, "capset": 126, "fallocate": 285, "inotify_init": 253,
        "open_by_handle_at": 304, "personality": 135, "modify_ldt": 154, "acct": 163,
        "settimeofday": 164,
    }  # fmt: skip
    numbers = x86_64 if os.uname().machine == "x86_64" else {}
    assert numbers, f"no numbers here for {os.uname().machine}"
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"for name, number in {numbers!r}.items():\n"
        "    result = libc.syscall(number, 0, 0, 0, 0, 0)\n"
        "    print(name, result, ctypes.get_errno())\n"
    )
    said = [line.split() for line in run(sandbox, code).output.splitlines()]
    assert [name for name, _, _ in said] == list(numbers)
    assert [line for line in said if line[1] != "-1" or line[2] not in ("1", "38")] == []


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: "
        "time.sleep(1)",
        "import os\nos.close(1); os.close(2)\nwhile True: pass",
        "try:\n    while True: pass\nfinally:\n    while True: pass",
    ],
    ids=["loops", "sleeps", "ignores SIGTERM", "closes its output", "catches"],
)
def test_code_that_does_not_end_is_killed_at_its_time_limit(code):
    sandbox = limited(time_limit_s=0.3)
    started = time.monotonic()
    with pytest.raises(ToolTimeoutError, match="stopped at its time limit"):
        asyncio.run(sandbox.call({"code": f"print('begun', flush=True)\n{code}"}))
    assert 0.3 <= time.monotonic() - started < 5


@pytest.mark.medium
@pytest.mark.parametrize(
    ("block", "least_s"),
    [("", 1.0), ("import signal; signal.pthread_sigmask(0, [signal.SIGXCPU])\n", 2.0)],
)
def test_cpu_time_ends_code_by_the_kernel(block, least_s):
    """At the first limit, or, where its signal is blocked, a second later."""
    result = run(limited(cpu_limit_s=1), f"{block}while True: pass")
    assert (result.reason, result.text) == ("time limit", "Error: stopped at its time limit")
    # One core at most, so CPU time is no more than wall-clock time, but for the ticks it is counted
    # by.
    assert result.wall_s >= least_s * 0.9


@pytest.mark.parametrize(
    "code", ["x = bytearray(10 << 30)", "x = []\nwhile True: x.append(bytearray(1 << 20))"]
)
def test_memory_ends_at_its_limit(code):
    result = run(limited(memory_limit_mib=128), code)
    assert result.reason == "memory limit"
    assert 'File "main.py"' in result.output
    assert result.text.endswith("MemoryError\nError: stopped at its memory limit")


@pytest.mark.parametrize("stream", [1, 2])
def test_output_ends_at_its_limit(stream):
    sandbox = limited(max_output_bytes=1000)
    assert run(sandbox, "print('x' * 999)").reason == "ok"
    result = run(
        sandbox, f"import os\nn = 0\nwhile True:\n    n += 1; os.write({stream}, b'%09d\\n' % n)"
    )
    assert result.reason == "output limit"
    assert result.output == "".join(f"{n:09d}\n" for n in range(1, 101))


def test_files_have_a_size_and_a_number(sandbox):
    big = run(limited(max_file_mib=1), "open('a', 'wb').write(bytes(3 << 20))")
    assert (big.reason, big.output.splitlines()[-1]) == (
        "error",
        "OSError: [Errno 27] File too large",
    )
    many = run(
        limited(max_files=10), "import time\nfor n in range(10): open(str(n), 'w')\ntime.sleep(60)"
    )
    assert many.reason == "file limit"
    opened = run(sandbox, "files = []\nwhile True: files.append(open('main.py'))")
    assert opened.output.splitlines()[-1] == "OSError: [Errno 24] Too many open files: 'main.py'"


def test_calls_wait_for_one_of_the_slots(folders):
    sandbox = limited(num_at_once=2, wait_limit_s=0.2)

    async def calls():
        running = [asyncio.create_task(sandbox.run(BEGIN)) for _ in range(2)]
        await begun(folders, num=2)
        with pytest.raises(ToolTimeoutError, match=r"not run: all 2 slots were taken for 0\.2 s"):
            await sandbox.call({"code": "1"})
        assert len(list(folders.iterdir())) == len(processes_in(folders)) == 2
        running[0].cancel()
        await asyncio.wait([running[0]])
        answer = (await sandbox.run("'in the free slot'")).output
        running[1].cancel()
        await asyncio.wait([running[1]])
        return answer

    assert asyncio.run(calls()) == "'in the free slot'\n"


def test_process_has_no_rights_and_a_cancelled_call_leaves_nothing(sandbox, folders):
    async def cancel():
        calls = [asyncio.create_task(sandbox.run(BEGIN))]
        await begun(folders)
        (pid,) = processes_in(folders)
        status = dict(
            line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        # Another call has only begun to start.
        calls.append(asyncio.create_task(sandbox.run(BEGIN)))
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert [call.cancelled() for call in calls] == [True, True]
        assert processes_in(folders) == []
        return status

    status = asyncio.run(cancel())
    assert [int(status[f"Cap{name}"], 16) for name in ("Prm", "Eff", "Inh", "Amb")] == [0, 0, 0, 0]
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


@pytest.mark.medium
def test_code_ends_with_the_process_that_asked_for_it(folders):
    script = (
        "import asyncio, sys\nfrom rl.tools.sandbox import PythonSandbox\n"
        "sandbox = PythonSandbox.Config(time_limit_s=60).build()\n"
        f"asyncio.run(sandbox.run({BEGIN!r}))\n"
    )
    environment = {**os.environ, "TMPDIR": str(folders)}
    asking = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=environment)
    asyncio.run(begun(folders))
    asking.kill()
    asking.wait(DEADLINE_S)
    asyncio.run(until(lambda: not processes_in(folders)))
    (remains,) = folders.iterdir()
    shutil.rmtree(remains)  # the killed process cannot


def test_folder_that_unconfined_code_removed_has_no_files(tmp_path):
    sandbox = PythonSandbox.Config().build()
    assert sandbox._find_exceeded(str(tmp_path / "removed"), pid=2**30) is None
