"""The leak check itself, on real processes and files."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.processes import SHARED_MEMORY
from tests.support import leaks

ROOT = Path(__file__).parents[2]


@pytest.fixture
def shared_file() -> Iterator[Path]:
    path = SHARED_MEMORY / f"relay-test-{uuid.uuid4().hex}"
    path.write_bytes(b"x" * 4096)
    yield path
    path.unlink(missing_ok=True)


def test_new_shared_memory_file_is_named(shared_file: Path) -> None:
    before = leaks.list_shared_memory() - {shared_file.name}
    with pytest.raises(leaks.LeakError, match=str(shared_file)):
        leaks.check_nothing_left(mark="no-such-mark", shared_memory_before=before, grace_s=0.0)


def test_file_held_by_another_program_is_not_a_leak(shared_file: Path) -> None:
    mapping = (
        f"import mmap; f = open({str(shared_file)!r}, 'r+b'); m = mmap.mmap(f.fileno(), 0); print(); input()"
    )
    holder = subprocess.Popen([sys.executable, "-c", mapping], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert leaks.drop_files_of_others([shared_file.name], own=[]) == set()
        assert leaks.drop_files_of_others([shared_file.name], own=[holder.pid]) == {shared_file.name}
    finally:
        holder.kill()
        holder.communicate(timeout=10)


@pytest.mark.timeout(150)
def test_session_with_a_leak_fails_although_its_tests_pass(tmp_path: Path) -> None:
    """A worker of pytest-xdist runs the test, so that the leaked process has no parent."""
    hooks = "from tests.support.leaks import pytest_sessionfinish, pytest_sessionstart\n"
    hooks += "from tests.support import leaks\nleaks.GRACE_S = 1.0\n"
    leaky = "import subprocess\ndef test_leaky():\n"
    leaky += "    subprocess.Popen(['sleep', '64'], start_new_session=True)\n"
    (tmp_path / "conftest.py").write_text(hooks)
    (tmp_path / "test_leaky.py").write_text(leaky)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "-n", "1"]
    leaked = subprocess.run(
        [*argv, "test_leaky.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=70,
        check=False,
    )
    assert leaked.returncode == 1
    assert "1 passed" in leaked.stdout
    assert "sleep 64" in leaked.stdout
