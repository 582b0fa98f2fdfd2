"""Process and shared-memory tools, on processes and files of this test."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors.processes import carrying_environment, mapped_shared_memory, remove_unmapped, with_descendants
from rl.utils.processes import ProcessId, identify, is_alive, kill

PARENT = """
import subprocess, sys
subprocess.Popen(["sleep", "600"])
print("up", flush=True)
sys.stdin.read()
"""


def living(pid):
    process = identify(pid)
    assert process is not None
    return process


@pytest.fixture
def tree():
    """A process with a child; both sleep."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"up\n"
    processes = with_descendants([living(parent.pid)])
    yield parent, processes
    for process in processes:
        kill(process)
    parent.communicate()


def test_zombie_is_not_alive():
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert identify(process.pid) is None
    process.wait()


def test_descendants_are_found_and_killed(tree):
    parent, processes = tree
    names = sorted(Path(f"/proc/{p.pid}/comm").read_text().strip() for p in processes)
    assert len(processes) == 2
    assert names[1] == "sleep"
    for process in processes:
        kill(process)
    parent.wait()
    assert parent.returncode == -9


def test_processes_are_found_by_their_environment():
    environment = {**os.environ, "RELAY_TEST_MARK": "a=b"}
    process = subprocess.Popen(["sleep", "600"], env=environment)
    try:
        assert carrying_environment("RELAY_TEST_MARK", "a=b") == [living(process.pid)]
        assert carrying_environment("RELAY_TEST_MARK", "a") == []
    finally:
        process.kill()
        process.wait()
    assert carrying_environment("RELAY_TEST_MARK", "a=b") == []


def test_kill_spares_another_process_with_the_same_pid(tree):
    parent, _ = tree
    stranger = ProcessId(parent.pid, living(parent.pid).start_ticks - 1)
    kill(stranger)
    assert is_alive(living(parent.pid))


def test_shared_memory_is_removed_only_if_no_process_maps_it():
    file = Path(f"/dev/shm/relay-test-processes {os.getpid()}")
    descriptor = os.open(file, os.O_CREAT | os.O_RDWR)
    os.ftruncate(descriptor, mmap.PAGESIZE)
    memory = mmap.mmap(descriptor, mmap.PAGESIZE)
    os.close(descriptor)
    try:
        mapped = mapped_shared_memory([os.getpid()])
        assert file in mapped
        assert remove_unmapped([file]) == []
        assert file.exists()
        memory.close()
        assert remove_unmapped([file]) == [file]
        assert not file.exists()
        assert remove_unmapped([file]) == []
    finally:
        file.unlink(missing_ok=True)
