"""The leak check itself, on real processes and files."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from actors.launch.cleanup import SHARED_MEMORY, find_shared_memory
from tests.support import leaks

ROOT = Path(__file__).parents[2]
HOLDER = """
import mmap, sys
file = open(sys.argv[1], "r+b")
held = mmap.mmap(file.fileno(), 0)
input()
"""
CONFTEST = """
from tests.support import leaks
from tests.support.leaks import pytest_sessionfinish, pytest_sessionstart
leaks.GRACE_S = 1.0
"""
LEAKY = """
import subprocess
def test_leaky():
    subprocess.Popen(["sleep", "64"], start_new_session=True)
"""


def test_new_shared_memory_file_is_a_leak_unless_another_program_holds_it():
    file = SHARED_MEMORY / f"relay-test-{uuid.uuid4().hex}"
    file.write_bytes(b"x" * 4096)
    before = leaks.list_shared_memory() - {file.name}
    command = [sys.executable, "-c", HOLDER, str(file)]
    try:
        with pytest.raises(leaks.LeakError, match=str(file)):
            leaks.check_nothing_left(mark="no-such-mark", shared_memory_before=before, grace_s=0.0)
        with subprocess.Popen(command, stdin=subprocess.PIPE) as holder:
            while not find_shared_memory([holder.pid]):
                assert holder.poll() is None
            assert leaks.drop_files_of_others([file.name], own=[]) == set()
            assert leaks.drop_files_of_others([file.name], own=[holder.pid]) == {file.name}
            holder.kill()
    finally:
        file.unlink()


@pytest.mark.medium
@pytest.mark.timeout(150)
def test_session_with_a_leak_fails_although_its_tests_pass(tmp_path):
    """A worker of pytest-xdist runs the test, so that the leaked process has no parent."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_leaky.py").write_text(LEAKY)
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        "-n",
        "1",
    ]
    leaked = subprocess.run(
        [*argv, "test_leaky.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=70, check=False,
    )  # fmt: skip
    assert leaked.returncode == 1
    assert "1 passed" in leaked.stdout
    assert "sleep 64" in leaked.stdout
