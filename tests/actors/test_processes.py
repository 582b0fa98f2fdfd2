"""Process and shared-memory tools, on processes and files of this test."""

import mmap
import os
import subprocess
from pathlib import Path

from actors.processes import carrying_environment, mapped_shared_memory, remove_unmapped
from rl.utils.processes import ProcessId, identify, is_alive, kill


def living(pid):
    process = identify(pid)
    assert process is not None
    return process


def test_zombie_is_not_alive():
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert identify(process.pid) is None
    process.wait()


def test_processes_are_found_by_their_environment_and_killed_by_their_identity():
    environment = {**os.environ, "RELAY_TEST_MARK": "a=b"}
    with subprocess.Popen(["sleep", "600"], env=environment) as process:
        found = living(process.pid)
        assert carrying_environment("RELAY_TEST_MARK", "a=b") == [found]
        assert carrying_environment("RELAY_TEST_MARK", "a") == []
        kill(ProcessId(process.pid, found.start_ticks - 1))  # an earlier process with the same pid
        assert is_alive(found)
        kill(found)
    assert carrying_environment("RELAY_TEST_MARK", "a=b") == []


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
