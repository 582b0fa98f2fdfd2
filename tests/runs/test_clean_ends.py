"""Processes, ports, shared memory, temporary files (where TMPDIR is respected) and locks of ended runs:
nothing stays, or the next start removes it. `tests.support.leftovers` looks for them. Runs that end by an
error or one signal are in test_faults.py.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from actors.temporary_files import PREFIX, remove_dead
from tests.support.runs import ROOT, command, restore_ctrl_c

pytestmark = [pytest.mark.medium, pytest.mark.timeout(240)]
LONG = (pytest.mark.slow, pytest.mark.long)
SHORT = ("--module", "tests.support.faulty_configs", "--config", "short", "--task.reward", "noise")
ENDLESS = (*SHORT, "--loop.num_steps", "500")
HOSTS = (*ENDLESS, "--launch.hosts", "process")
GRACE_S = 10.0


class Run:
    """Command-line run whose output is read line by line."""

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
            preexec_fn=restore_ctrl_c,
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
        """Wait for the end, keep the remaining output and return the exit status."""
        rest, _ = self.process.communicate(timeout=limit_s)
        self.lines.append(rest)
        return self.process.returncode

    def signal_group(self, number):
        os.killpg(self.process.pid, number)

    def wait_until_taken(self, number):
        """Wait until the kernel has delivered the signal to the controller."""
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
    """Return a function that starts runs, which do not outlive the test."""
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
    return sorted(path.name for path in watch.folder.iterdir() if path.suffix != ".lock")


@pytest.mark.slow
def test_run_stopped_by_two_signals_leaves_nothing_behind(start, watch):
    run = start(*ENDLESS)
    run.wait_for("reward")
    for _ in range(2):
        run.signal_group(signal.SIGTERM)
        run.wait_until_taken(signal.SIGTERM)  # two pending signals of one number would be merged
    assert run.end() == 143, run.lines
    assert str(watch.left(grace_s=GRACE_S, run_folder=run.folder)) == "nothing"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        pytest.param(ENDLESS, "reward", id="in a step"),
        pytest.param(ENDLESS, "starting", id="in the start", marks=LONG),
        pytest.param(HOSTS, "reward", id="in a step on simulated hosts", marks=LONG),
    ],
)
def test_killed_controller_leaves_one_folder_which_the_next_start_removes(start, watch, options, line):
    run = start(*options)
    run.wait_for(line)
    run.process.kill()
    assert run.end() == -signal.SIGKILL
    left = watch.left(grace_s=GRACE_S, run_folder=run.folder, temporary=False)
    assert str(left) == "nothing"
    (folder,) = temporary(watch)
    assert folder.startswith(PREFIX)
    assert [path.name for path in remove_dead(watch.folder)] == [folder]
    assert temporary(watch) == []
