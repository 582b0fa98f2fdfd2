"""Temporary files of a run are in a folder of its own, and gone after it, however it ended."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from actors import temporary_files
from actors.client import RUN, RUN_VARIABLE
from actors.processes import identify, is_alive, kill
from actors.temporary_files import MAX_PATH, PREFIX, remove_dead
from tests.support.forked import in_copy

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
    """A short one: that of pytest is too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="relay-t-", dir="/tmp") as folder:
        yield Path(folder)


def in_run(parent, function):
    """The exit status, and what `function` answers in a copy of this process that is such a run."""

    def run():
        os.environ["TMPDIR"] = tempfile.tempdir = str(parent)
        with temporary_files.temporary_files():
            return function()

    return in_copy(run)


def test_a_run_has_one_folder_from_start_to_end_and_leaves_none(parent):
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


def test_what_is_compiled_stays_where_later_runs_find_it(parent, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    _, answer = in_run(parent, lambda: os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert Path(answer).parent == parent
    assert Path(answer).name.startswith("torchinductor_")


def test_a_killed_run_s_files_and_processes_are_ended_by_the_next_and_a_living_run_s_are_not(parent):
    def be_killed():
        left = subprocess.Popen(["sleep", "600"], env={**os.environ, RUN_VARIABLE: RUN})
        tempfile.mkdtemp()
        (parent / "pid").write_text(str(left.pid))
        os.kill(os.getpid(), signal.SIGKILL)

    status, _ = in_run(parent, be_killed)
    assert status == -signal.SIGKILL
    left = identify(int((parent / "pid").read_text()))
    assert left is not None
    (folder,) = parent.glob(f"{PREFIX}*")
    try:

        def live():
            (mine,) = (path for path in parent.glob(f"{PREFIX}*") if path != folder)
            return json.dumps([folder.exists(), [str(path) for path in remove_dead(parent)], mine.exists()])

        status, answer = in_run(parent, live)
        assert (status, json.loads(answer)) == (0, [False, [], True])
        deadline = time.monotonic() + 10
        while is_alive(left) and time.monotonic() < deadline:
            os.sched_yield()
        assert not is_alive(left)
    finally:
        kill(left)


def test_a_folder_that_holds_no_run_of_ours_is_left_alone(parent):
    (parent / "relay-runs").mkdir()
    (parent / f"{PREFIX}file").write_text("x")
    (parent / f"{PREFIX}link").symlink_to(parent / "relay-runs")
    assert remove_dead(parent) == []
    assert len(list(parent.iterdir())) == 3


def test_where_paths_would_be_too_long_for_sockets_the_folder_is_in_the_ordinary_place(parent):
    deep = parent / ("x" * MAX_PATH)
    deep.mkdir()
    status, answer = in_run(deep, lambda: os.environ["TMPDIR"])
    assert status == 0
    assert re.fullmatch(rf"/tmp/{PREFIX}\w{{8}}", answer)
    shutil.rmtree(answer)  # which a copy of a process leaves to the next run
    assert list(deep.iterdir()) == []
