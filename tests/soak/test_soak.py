"""The soak's check sees each thing that a run may leave or lack, and two short runs of it are clean."""

import getpass
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rl.observability.metrics import MetricsWriter
from rl.observability.run_folder import RunFolder
from tools.soak.leftovers import Leftovers, Watch, listening_ports
from tools.soak.main import NUM_STEPS, Outcome, check, parse_args, summary

LEAVES = """
import os, socket, subprocess, sys, tempfile
tempfile.mkdtemp(prefix="left-")
open("/dev/shm/relay-soak-test", "w").close()
code = (
    "import socket, time; server = socket.create_server(('127.0.0.1', 0));"
    "print(server.getsockname()[1], flush=True); time.sleep(600)"
)
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), child.pid)
"""


@pytest.fixture
def watch(tmp_path):
    return Watch(tmp_path / "tmp")


def run(code, watch):
    done = subprocess.run(
        [sys.executable, "-c", code], env=watch.environment(), stdout=subprocess.PIPE, text=True, timeout=60
    )
    return done.stdout


def test_what_a_process_leaves_is_found_and_ended(watch):
    try:
        port, pid = map(int, run(LEAVES, watch).split())
        left = watch.left(grace_s=0.1)
        assert list(left.processes) == [pid]
        assert left.ports == (port,)
        assert left.shared_memory == ("/dev/shm/relay-soak-test",)
        (temporary,) = left.temporary
        assert temporary.startswith(f"{watch.folder}/left-")
        assert f"process {pid}: {sys.executable}" in str(left)
        watch.end()
        assert watch.left(grace_s=10).processes == {}
    finally:
        watch.end()
        Path("/dev/shm/relay-soak-test").unlink()


def test_a_process_that_leaves_nothing_leaves_nothing(watch):
    run("import tempfile; tempfile.TemporaryDirectory().cleanup()", watch)
    left = watch.left(grace_s=10)
    assert (bool(left), str(left)) == (False, "nothing")


def test_what_does_not_heed_tmpdir_is_found_beside(tmp_path):
    (tmp_path / "also").mkdir()
    (tmp_path / "also" / "before").touch()
    watch = Watch(tmp_path / "tmp", also=tmp_path / "also")
    (tmp_path / "also" / "socket").touch()
    (tmp_path / "also" / "torchinductor_me").mkdir()
    (tmp_path / "also" / getpass.getuser()).mkdir()
    assert watch.left(grace_s=0).temporary == (str(tmp_path / "also" / "socket"),)


def test_ports_are_those_on_which_it_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert server.getsockname()[1] in listening_ports(os.getpid())
    assert server.fileno() == -1


def finished(folder, *, steps=range(1, NUM_STEPS + 1)):
    with RunFolder.create(folder, "run") as run:
        with MetricsWriter(run.metrics) as metrics:
            for step in steps:
                metrics.write({"step": step, "reward/mean": 0.5})
        for file in (run.config_json, run.rollouts, run.learning_curve):
            file.touch()
        run.mark_finished()
    return run.path


def found(run_folder, *, status=0, left=None):
    return check(run_folder, status=status, left=left or Leftovers(), limit_s=9)


def test_a_run_is_clean_only_if_it_did_all_and_left_nothing(tmp_path):
    assert found(finished(tmp_path / "clean")) == ()
    whole = finished(tmp_path / "whole")
    assert found(whole, status=3) == ("exit status 3",)
    killed = Leftovers(temporary=("/tmp/relay-run-x",))
    assert found(whole, status=None, left=killed) == ("it did not end within 9 s",)
    assert found(whole, left=Leftovers(temporary=("/tmp/x",))) == ("left behind: temporary: /tmp/x",)
    (whole / "checkpoints" / ".step-2.being-written").mkdir()
    (whole / "learning_curve.png").unlink()
    assert found(whole) == ("missing: learning_curve.png", "half written: .step-2.being-written")
    assert found(finished(tmp_path / "short", steps=[1, 2, 4])) == ("its steps are [1, 2, 4]",)
    with RunFolder.create(tmp_path, "unfinished") as run:
        run.metrics.touch()
    assert found(run.path)[0] == "its status is running"


def test_the_last_line_counts_what_was_not_clean():
    def outcome(mode, status, run_s, *problems):
        return Outcome(mode=mode, status=status, run_s=run_s, problems=problems)

    said = summary(
        [
            outcome("synchronous", 0, 10.0),
            outcome("asynchronous", None, 300.0, "it did not end within 300 s"),
            outcome("synchronous", 0, 12.0, "left behind: port 5"),
        ]
    )
    assert (said["runs"], said["clean"], said["hung"], said["left_something"]) == (3, 1, 1, 1)
    assert (said["median_s"], said["longest_s"]) == (12.0, 300.0)
    assert said["modes"] == {"synchronous": 2, "asynchronous": 1}
    assert len(json.loads(json.dumps(said))["problems"]) == 2


@pytest.mark.parametrize("option", [["--runs", "0"], ["--limit_s", "0"]])
def test_bad_numbers_are_refused(option, capsys):
    with pytest.raises(SystemExit):
        parse_args(option)
    assert "both must be above 0" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.long
def test_two_runs_of_a_soak_are_clean():
    with tempfile.TemporaryDirectory(prefix="relay-t-", dir="/tmp") as folder:
        ran = subprocess.run(
            [sys.executable, "-m", "tools.soak.main", "--runs", "2", "--folder", folder, "--shared_machine"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=600,
        )
    said = json.loads(ran.stdout.splitlines()[-1])
    assert (ran.returncode, said["runs"], said["clean"]) == (0, 2, 2), ran.stdout
    assert said["modes"] == {"synchronous": 1, "asynchronous": 1}
