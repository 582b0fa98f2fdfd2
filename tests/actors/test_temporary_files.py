"""Temporary files of a run: one folder, removed at the end or by the next run."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest

from actors import processes, temporary_files
from actors.processes import RUN_VARIABLE
from actors.temporary_files import MAX_PATH, PREFIX, remove_dead
from rl.utils.processes import identify, is_alive, kill
from tests.support.forked import run_in_fork

INSIDE = """
import json, os, sys, tempfile
from actors.temporary_files import temporary_files
with temporary_files():
    inside = tempfile.mkdtemp()
with temporary_files():
    again = tempfile.mkdtemp()
print(json.dumps([inside, again, tempfile.gettempdir(), os.environ["TMPDIR"], os.path.isdir(inside)]))
"""


@pytest.fixture
def parent():
    """A folder with a short path: pytest's are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="relay-t-", dir="/tmp") as folder:
        yield Path(folder)


def folders(parent):
    return [path for path in parent.glob(f"{PREFIX}*") if path.is_dir()]


def in_run(parent, function):
    """Run `function` as a run in a forked copy of this process; return its exit status and answer."""

    def run():
        os.environ["TMPDIR"] = tempfile.tempdir = str(parent)
        processes.RUN = uuid.uuid4().hex[:8]
        with temporary_files.temporary_files():
            return function()

    return run_in_fork(run)


def test_run_has_one_temporary_folder_and_removes_it(parent):
    ran = subprocess.run(
        [sys.executable, "-c", INSIDE],
        env=os.environ | {"TMPDIR": str(parent)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    inside, again, after, variable, was_there = json.loads(ran.stdout)
    (folder,) = {Path(path).parent for path in (inside, again)}
    assert folder.parent == parent
    assert folder.name.startswith(PREFIX)
    assert was_there
    assert (after, variable) == (str(parent), str(parent))
    assert list(parent.iterdir()) == []


def test_compile_cache_is_kept_for_later_runs(parent, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    _, answer = in_run(parent, lambda: os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert Path(answer).parent == parent
    assert Path(answer).name.startswith("torchinductor_")


def test_next_run_removes_what_a_killed_run_left_and_spares_living_runs(parent):
    def be_killed():
        left = subprocess.Popen(["sleep", "600"], env={**os.environ, RUN_VARIABLE: processes.RUN})
        tempfile.mkdtemp()
        (parent / "pid").write_text(str(left.pid))
        os.kill(os.getpid(), signal.SIGKILL)

    status, _ = in_run(parent, be_killed)
    assert status == -signal.SIGKILL
    left = identify(int((parent / "pid").read_text()))
    assert left is not None
    (folder,) = folders(parent)
    try:

        def live():
            (mine,) = folders(parent)
            return json.dumps([folder.exists(), [str(path) for path in remove_dead(parent)], mine.exists()])

        status, answer = in_run(parent, live)
        assert (status, json.loads(answer)) == (0, [False, [], True])
        deadline = time.monotonic() + 10
        while is_alive(left) and time.monotonic() < deadline:
            os.sched_yield()
        assert not is_alive(left)
    finally:
        kill(left)


def test_folder_is_in_tmp_if_paths_would_be_too_long_for_sockets(parent):
    deep = parent / ("x" * MAX_PATH)
    deep.mkdir()
    status, answer = in_run(deep, lambda: os.environ["TMPDIR"])
    assert status == 0
    assert re.fullmatch(rf"/tmp/{PREFIX}\w{{8}}", answer)
    shutil.rmtree(answer)  # a forked copy leaves it to the next run
    Path(f"{answer}.lock").unlink()
    assert list(deep.iterdir()) == []
