"""The check itself, on real processes and files."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import leaks

ROOT = Path(__file__).parents[2]


@pytest.fixture
def shared_file() -> Iterator[Path]:
    path = leaks.SHARED_MEMORY / f"relay-test-{uuid.uuid4().hex}"
    path.write_bytes(b"x" * 4096)
    yield path
    path.unlink(missing_ok=True)


def test_a_child_is_named_and_ended() -> None:
    child = subprocess.Popen(["sleep", "61"])
    try:
        before = leaks.list_shared_memory()
        with pytest.raises(leaks.LeakError, match=rf"process {child.pid}: sleep 61"):
            # Time to have its arguments: Popen returns in the middle of the exec.
            leaks.check_nothing_left(mark="no-such-mark", shared_memory_before=before, grace_s=1.0)
        assert child.wait(timeout=10) == -9
    finally:
        child.kill()
        child.wait(timeout=10)


def test_an_orphan_is_found_by_its_mark() -> None:
    mark = uuid.uuid4().hex
    out = subprocess.run(
        # It ends when the orphan has its own arguments.
        ["sh", "-c", "sleep 62 > /dev/null 2>&1 & echo $!; until grep -q sleep /proc/$!/cmdline; do :; done"],
        env={**os.environ, leaks.MARK: mark},
        capture_output=True,
        text=True,
        timeout=10,
        check=True,
    )
    orphan = int(out.stdout)
    try:
        assert leaks.find_session_processes(mark).get(orphan) == "sleep 62"
        assert orphan not in leaks.find_session_processes("another mark")
    finally:
        os.kill(orphan, 9)


def test_a_new_shared_memory_file_is_named(shared_file: Path) -> None:
    before = leaks.list_shared_memory() - {shared_file.name}
    with pytest.raises(leaks.LeakError, match=str(shared_file)):
        leaks.check_nothing_left(mark="no-such-mark", shared_memory_before=before, grace_s=0.0)


def test_a_file_that_another_program_holds_is_not_ours(shared_file: Path) -> None:
    holder = subprocess.Popen(
        ["sh", "-c", f"exec 3< {shared_file}; echo; exec sleep 63"], stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert leaks.drop_files_of_others([shared_file.name], own=[]) == set()
        assert leaks.drop_files_of_others([shared_file.name], own=[holder.pid]) == {shared_file.name}
    finally:
        holder.kill()
        holder.communicate(timeout=10)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_session_that_leaves_something_fails_though_its_tests_pass(tmp_path: Path, workers: int) -> None:
    """Also where a worker of it ran the test, and what is left has no parent any more."""
    hooks = "from tests.support.leaks import pytest_sessionfinish, pytest_sessionstart\n"
    hooks += "from tests.support import leaks\nleaks.GRACE_S = 1.0\n"
    leaky = "import subprocess\ndef test_leaky():\n"
    leaky += "    subprocess.Popen(['sleep', '64'], start_new_session=True)\n"
    (tmp_path / "conftest.py").write_text(hooks)
    (tmp_path / "test_leaky.py").write_text(leaky)
    (tmp_path / "test_clean.py").write_text("def test_clean():\n    pass\n")

    def run(name: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", name]
        argv += ["-n", str(workers)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=50, check=False
        )

    assert run("test_clean.py").returncode == 0
    leaked = run("test_leaky.py")
    assert leaked.returncode == 1
    assert "1 passed" in leaked.stdout
    assert "sleep 64" in leaked.stdout
