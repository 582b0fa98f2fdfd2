"""However a run ends, nothing of it stays on the machine, or the next start removes it.

Looked for are processes, ports, files in shared memory, temporary files (of everything that heeds TMPDIR) and
locks, by `tools.soak.leftovers`. An error, and one signal, also while starting, are in test_faults.py.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from actors.temporary_files import PREFIX, remove_dead
from tests.support.runs import ROOT, command, hear_ctrl_c

pytestmark = [pytest.mark.medium, pytest.mark.timeout(240)]
LONG = (pytest.mark.slow, pytest.mark.long)
SHORT = ("--module", "tests.support.faulty_configs", "--config", "short", "--task.reward", "noise")
ENDLESS = (*SHORT, "--loop.num_steps", "500")
FAULTY = ("--module", "tests.support.faulty_configs", "--config")
SAVING = (*FAULTY, "saving", "--loop.num_steps", "500")
HOSTS = (*ENDLESS, "--launch.hosts", "process")
WARMS_UP = ("--warmup.num_steps", "400")
GRACE_S = 10.0


class Run:
    """A run of the command line, whose lines are read one by one."""

    def __init__(self, dump_folder, watch, *options, name="run"):
        self.folder = dump_folder / name
        self.process = subprocess.Popen(
            command(dump_folder, name, *options),
            cwd=ROOT,
            env={**watch.environment(), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=hear_ctrl_c,
        )
        self.lines = []

    def wait_for(self, line):
        assert self.process.stdout is not None
        for text in self.process.stdout:
            self.lines.append(text)
            if line in text:
                return
        raise AssertionError("".join(self.lines))

    def end(self, *, limit_s=60):
        """The exit status, once it has ended; what it printed is kept."""
        rest, _ = self.process.communicate(timeout=limit_s)
        self.lines.append(rest)
        return self.process.returncode

    def signal_group(self, number):
        os.killpg(self.process.pid, number)

    def wait_until_taken(self, number):
        """Until the kernel has handed the signal to the controller."""
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            status = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
            waiting = [int(line.split()[1], 16) for line in status if line.startswith(("SigPnd", "ShdPnd"))]
            if not any(pending & 1 << number - 1 for pending in waiting):
                return
            os.sched_yield()
        raise AssertionError(f"signal {number} is not taken")


@pytest.fixture
def start(tmp_path, watch):
    """Runs that do not outlive the test."""
    runs = []

    def started(*options, name="run"):
        runs.append(Run(tmp_path, watch, *options, name=name))
        return runs[-1]

    yield started
    for run in runs:
        if run.process.poll() is None:
            run.signal_group(signal.SIGKILL)
            run.process.wait()
    watch.end()


def temporary(watch):
    return sorted(path.name for path in watch.folder.iterdir())


def test_a_run_that_ends_by_itself_leaves_nothing(start, watch):
    run = start(*SHORT)
    assert run.end(limit_s=150) == 0, run.lines
    assert str(watch.left(grace_s=GRACE_S, run_folder=run.folder)) == "nothing"


@pytest.mark.parametrize(
    ("number", "status"),
    [
        pytest.param(signal.SIGTERM, 143, id="sigterm twice", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, id="ctrl-c twice", marks=LONG),
    ],
)
def test_a_run_that_is_stopped_at_once_leaves_nothing(start, watch, number, status):
    run = start(*ENDLESS)
    run.wait_for("reward")
    for _ in range(2):
        run.signal_group(number)
        run.wait_until_taken(number)  # two at once would be one
    assert run.end() == status, run.lines
    assert str(watch.left(grace_s=GRACE_S, run_folder=run.folder)) == "nothing"


@pytest.mark.parametrize(
    ("options", "line", "whole_group"),
    [
        pytest.param(ENDLESS, "reward", False, id="in a step"),
        pytest.param(ENDLESS, "reward", True, id="in a step, with its group", marks=LONG),
        pytest.param(ENDLESS, "starting", False, id="in the start", marks=LONG),
        pytest.param(HOSTS, "reward", False, id="in a step on simulated hosts", marks=LONG),
        pytest.param(WARMS_UP, "warm-up: started", False, id="in the warm-up", marks=LONG),
    ],
)
def test_what_a_killed_controller_leaves_is_one_folder_and_the_next_start_removes_it(
    start, watch, options, line, whole_group
):
    run = start(*options)
    run.wait_for(line)
    if whole_group:
        run.signal_group(signal.SIGKILL)
    else:
        run.process.kill()
    assert run.end() == -signal.SIGKILL
    left = watch.left(grace_s=GRACE_S, run_folder=run.folder, temporary=False)
    assert str(left) == "nothing"
    (folder,) = temporary(watch)
    assert folder.startswith(PREFIX)
    assert [path.name for path in remove_dead(watch.folder)] == [folder]
    assert temporary(watch) == []


@pytest.mark.slow
def test_a_start_in_the_same_dump_folder_cleans_up_after_a_killed_run_and_finishes(start, watch):
    killed = start(*SAVING)
    killed.wait_for("reward")
    killed.process.kill()
    assert killed.end() == -signal.SIGKILL
    (folder,) = temporary(watch)
    again = start(*SHORT, "--overwrite", "True")
    assert again.end(limit_s=150) == 0, again.lines
    assert str(watch.left(grace_s=GRACE_S, run_folder=again.folder)) == "nothing"
    assert (
        f"removed {watch.folder}/{folder} of a killed run"
        in (again.folder / "logs" / "controller-0.log").read_text()
    )
    assert [path for path in again.folder.rglob(".*") if path.name not in (".lock", ".metadata")] == []
