"""Temporary files and processes of a run, removed once its process has ended."""

import json
import mmap
import os
import re
import signal
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

import pytest

from actors.launch import cleanup
from actors.launch.cleanup import (
    MAX_PATH,
    PREFIX,
    RUN_VARIABLE,
    find_by_environment,
    find_shared_memory,
    remove_unmapped,
)
from rl.utils.processes import ProcessId, identify, is_alive, kill
from tests.support.forked import run_in_fork


@pytest.fixture
def parent():
    """A folder with a short path: pytest's are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="relay-t-", dir="/tmp") as folder:
        yield Path(folder)


def in_new_process(parent, function):
    """Run `function` in a fork that is a run of its own; return its exit status and answer."""

    def run():
        os.environ["TMPDIR"] = tempfile.tempdir = str(parent)
        cleanup.RUN = uuid.uuid4().hex[:8]
        cleanup._make_folder.cache_clear()
        return function()

    return run_in_fork(run)


def gone(is_left):
    """Return True once `is_left` returns False, within 20 s."""
    deadline = time.monotonic() + 20
    while (left := is_left()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not left


def test_run_has_one_temporary_folder_which_goes(parent):
    def run_twice():
        with cleanup.guard_temporary_files():
            inside = tempfile.mkdtemp()
        with cleanup.guard_temporary_files():
            again = tempfile.mkdtemp()
        after = tempfile.gettempdir(), os.environ["TMPDIR"]
        return json.dumps([inside, again, *after, Path(inside).is_dir()])

    status, answer = in_new_process(parent, run_twice)
    assert status == 0
    inside, again, after, variable, was_there = json.loads(answer)
    (folder,) = {Path(path).parent for path in (inside, again)}
    assert folder.parent == parent
    assert folder.name.startswith(PREFIX)
    assert was_there
    assert (after, variable) == (str(parent), str(parent))
    assert gone(folder.exists)


def test_folder_and_processes_of_a_killed_run_are_removed(parent):
    def be_killed():
        with cleanup.guard_temporary_files():
            left = subprocess.Popen(["sleep", "600"], env={**os.environ, RUN_VARIABLE: cleanup.RUN})
            tempfile.mkdtemp()
            (parent / "pid").write_text(str(left.pid))
            os.kill(os.getpid(), signal.SIGKILL)

    status, _ = in_new_process(parent, be_killed)
    assert status == -signal.SIGKILL
    left = identify(int((parent / "pid").read_text()))
    try:
        assert gone(lambda: left is not None and is_alive(left))
        assert gone(lambda: list(parent.glob(f"{PREFIX}*")))
    finally:
        if left is not None:
            kill(left)


def test_folder_is_in_tmp_if_paths_would_be_too_long_for_sockets(parent):
    deep = parent / ("x" * MAX_PATH)
    deep.mkdir()

    def folder():
        with cleanup.guard_temporary_files():
            return os.environ["TMPDIR"]

    status, answer = in_new_process(deep, folder)
    assert status == 0
    assert re.fullmatch(rf"/tmp/{PREFIX}\w{{8}}", answer)
    assert gone(Path(answer).exists)
    assert list(deep.iterdir()) == []


def test_zombie_is_not_alive():
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert identify(process.pid) is None
    process.wait()


def test_processes_are_found_by_their_environment_and_killed_by_their_identity():
    environment = {**os.environ, "RELAY_TEST_MARK": "a=b"}
    with subprocess.Popen(["sleep", "600"], env=environment) as process:
        found = identify(process.pid)
        assert found is not None
        try:
            # The kernel shows the environment a moment after the program has begun.
            while not (shown := find_by_environment("RELAY_TEST_MARK", "a=b")):
                assert process.poll() is None
            assert shown == [found]
            assert find_by_environment("RELAY_TEST_MARK", "a") == []
            kill(
                ProcessId(process.pid, found.start_ticks - 1)
            )  # an earlier process with the same pid
            assert is_alive(found)
        finally:
            kill(found)
    assert find_by_environment("RELAY_TEST_MARK", "a=b") == []


def test_shared_memory_is_removed_only_if_no_process_maps_it():
    file = Path(f"/dev/shm/relay-test-processes {os.getpid()}")
    descriptor = os.open(file, os.O_CREAT | os.O_RDWR)
    os.ftruncate(descriptor, mmap.PAGESIZE)
    memory = mmap.mmap(descriptor, mmap.PAGESIZE)
    os.close(descriptor)
    try:
        mapped = find_shared_memory([os.getpid()])
        assert file in mapped
        assert remove_unmapped([file]) == []
        assert file.exists()
        memory.close()
        assert remove_unmapped([file]) == [file]
        assert not file.exists()
        assert remove_unmapped([file]) == []
    finally:
        file.unlink(missing_ok=True)
