"""Attacks of code and text that a model wrote, on the sandbox and on what reads its replies.

Every attack stops by itself at 300 threads or 300 MB, also where nothing else stops it.
"""

import asyncio
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from rl.rollouts.judge import LabelGrade, NumberGrade
from rl.rollouts.replies import CALL_OPEN
from rl.tools import sandbox
from rl.tools.sandbox import PythonSandbox
from rl.tools.tool import BadCall, parse_calls
from rl.types import ToolCall
from tests.support.forked import answer_in_fork
from tests.support.kernels import become_nobody, refuse_users

NUM_THREADS = 64


def run(code, **settings):
    python = PythonSandbox.Config(**{"time_limit_s": 20, "cpu_limit_s": 20, **settings}).build()
    return asyncio.run(python.run(code))


# The end of the whole run, which only a sandbox that cannot confine itself may cause

FIND_TOKENS = """
import ctypes, os, re
libc = ctypes.CDLL(None)
reading, writing = os.pipe()
found = []
libc.sbrk.restype = ctypes.c_void_p
here, heap = id(found) & ~4095, libc.sbrk(0) & ~4095
pages = [*range(heap - (8 << 20), heap, 4096), *range(here - (16 << 20), here + (16 << 20), 4096)]
for page in pages:
    # The kernel refuses to copy from a page that is not there.
    if libc.write(writing, ctypes.c_void_p(page), 4096) == 4096:
        found += re.findall(rb"[0-9a-f]{64}", os.read(reading, 4096))
token = found[0].decode() if found else ""
for descriptor in range(1, 64):
    try:
        os.write(descriptor, (token + " all is lost").encode())
    except OSError:
        pass
os._exit(102)
"""


def test_code_cannot_end_the_run_in_the_name_of_the_sandbox():
    result = run(FIND_TOKENS)
    assert (result.reason, result.status) == ("error", 102)
    assert "all is lost" in result.output


# Threads

HOLD_S = 8
START_THREADS = f"""
import threading, time
threading.stack_size(32768)
hold = threading.Event()
try:
    for started in range(300):
        threading.Thread(target=hold.wait, daemon=True).start()
except RuntimeError:
    started -= 1
print(started + 2, flush=True)  # the thread that counts is one more
if started > 100:
    time.sleep({HOLD_S})
"""


@pytest.fixture
def folder():
    """Folder that every user can reach, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        yield Path(path)


def attack_as(user, folder):
    """Return the outcome of `START_THREADS`, run by this user, an ordinary one, or one without
    namespaces.
    """

    def attack():
        if user != "this user" and os.geteuid() == 0:
            become_nobody(folder)
        if user == "ordinary user without namespaces":
            refuse_users()
        tempfile.tempdir = str(folder)
        result = run(START_THREADS)
        return result.reason, result.output, result.wall_s

    return answer_in_fork(attack)


@pytest.mark.parametrize("user", ["this user", "ordinary user"])
def test_code_has_no_more_threads_than_allowed(user, folder):
    reason, output, _ = attack_as(user, folder)
    assert (reason, output) == ("ok", f"{NUM_THREADS}\n")


def test_many_threads_end_code_where_the_kernel_does_not_limit_them(folder):
    reason, _, wall_s = attack_as("ordinary user without namespaces", folder)
    assert reason == "thread limit"
    assert wall_s < HOLD_S


MAIN_THREAD_ENDS = """
import ctypes, os, threading
exit_thread = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
def go_on():
    CODE
threading.Thread(target=go_on).start()
ctypes.CDLL(None).syscall(exit_thread, 0)
"""


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import time; time.sleep(15)", "time limit"),
        (
            "import time\n    for n in range(99): open(str(n), 'w')\n    time.sleep(15)",
            "file limit",
        ),
    ],
)
def test_limits_hold_after_the_main_thread_has_ended(code, reason):
    result = run(MAIN_THREAD_ENDS.replace("CODE", code), time_limit_s=1)
    assert result.reason == reason
    assert result.wall_s < 10


def test_threads_are_limited_after_the_main_thread_has_ended():
    body = START_THREADS.replace("\n", "\n    ") + "os._exit(0)"
    result = run(MAIN_THREAD_ENDS.replace("CODE", body))
    assert (result.reason, result.output) == (
        "ok",
        f"{NUM_THREADS - 1}\n",
    )  # one is the main thread


# Disk and memory

HOLD_FILES = """
import ctypes, os, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
for n in range(300):
    name = str(n)
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
    os.write(descriptor, bytes(1 << 20))
    assert libc.mmap(None, 4096, 1, 2, descriptor, 0) != 2**64 - 1
    os.close(descriptor)
    REMOVE
    time.sleep(0.002)
print("held", n + 1)
"""


def test_code_holds_no_more_files_than_allowed():
    result = run(HOLD_FILES.replace("REMOVE", ""), max_files=10)
    assert (result.reason, result.output) == ("file limit", "")


def test_files_are_counted_at_the_end_of_a_short_call(monkeypatch):
    monkeypatch.setattr(sandbox, "LOOK_S", 60.0)
    code = "for n in range(10): open(str(n), 'w')"
    assert run(code, max_files=10).reason == "file limit"
    assert run(code, max_files=11).reason == "ok"


@pytest.mark.parametrize("remove", ["os.remove(name)", "os.rename(name, 'other')"])
def test_space_of_removed_files_is_free_after_the_call(remove, folder, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    free = shutil.disk_usage(folder).free
    result = run(HOLD_FILES.replace("REMOVE", remove), max_files=10)
    assert (result.reason, result.output) == ("ok", "held 300\n")
    assert [*folder.iterdir()] == []
    assert shutil.disk_usage(folder).free > free - (150 << 20)


@pytest.mark.parametrize(
    "attempt",
    [
        "os.open('.', os.O_RDWR | os.O_TMPFILE)",
        "mmap.mmap(os.open('main.py', os.O_RDONLY), 0, mmap.MAP_SHARED, mmap.PROT_READ)",
        "mmap.mmap(os.open('a', os.O_RDWR | os.O_CREAT), 4096)",
        "mmap.mmap(-1, 4096)",
    ],
    ids=["file without a name", "shared file", "shared file to write", "shared memory"],
)
def test_memory_that_is_not_counted_is_denied(attempt):
    result = run(
        f"import mmap, os\nwith open('a', 'wb') as file: file.write(bytes(4096))\n{attempt}"
    )
    assert result.output.splitlines()[-1].startswith(
        "PermissionError: [Errno 1] Operation not permitted"
    )


LEAVE_SHARED_MEMORY = """
import ctypes
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
size, taken = 30 << 20, 0
for _ in range(10):
    address = libc.mmap(None, size, 3, 0x21, -1, 0)
    if address in (None, 2**64 - 1):
        break
    ctypes.memset(address, 1, size)
    taken += size
    libc.munmap(address + 4096, size - 4096)  # one mapped page keeps the memory of all
print(taken >> 20)
"""


def test_memory_cannot_be_kept_beyond_its_limit():
    assert run(LEAVE_SHARED_MEMORY, memory_limit_mib=128).output == "0\n"


# Text

BLANKS = " " * 10_000


def seconds(function, text):
    started = time.process_time()
    function(text)
    return time.process_time() - started


@pytest.mark.parametrize(
    "grade", [NumberGrade(), LabelGrade(labels={"yes": 1.0, "no": 0.0})], ids=["number", "label"]
)
@pytest.mark.parametrize(
    "text",
    [
        f"{BLANKS}x", f"grade{BLANKS}x", f"{BLANKS}grade{BLANKS}x", "a " * 10_000,
        "grade " * 4_000, f"7{BLANKS}x",
        "- " * 10_000, "*" * 10_000, "1" * 10_000 + "x", "7\n" * 10_000, f"yes{BLANKS}x",
        "7 \n / \n" * 3_000,
    ],
)  # fmt: skip
def test_time_of_reading_a_grade_does_not_grow_with_the_square_of_the_answer(grade, text):
    assert seconds(grade.read, text) < 0.5


@pytest.mark.parametrize(
    "text",
    [
        f"{CALL_OPEN} " * 100_000,
        f"{CALL_OPEN}</tool_call>" * 100_000,
        f"{CALL_OPEN}{' ' * 1000}" * 2_000,
        f'{CALL_OPEN}["' * 100_000,
    ],
    ids=["open", "empty", "blanks", "strings"],
)
def test_time_of_reading_calls_does_not_grow_with_the_square_of_the_reply(text):
    assert seconds(parse_calls, text) < 1


def test_calls_beyond_the_limit_are_answered_by_one_error():
    call = f'{CALL_OPEN}{{"name": "a", "arguments": {{}}}}</tool_call>'
    calls = parse_calls(call * 1000)
    assert list(calls[:-1]) == [ToolCall(name="a", arguments={})] * 256
    assert calls[-1] == BadCall(error="Error: only the first 256 tool calls of a reply are read")
