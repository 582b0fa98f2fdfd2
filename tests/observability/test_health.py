"""Health of a run, as judged from its folder: healthy, hanging, dead or finished."""

import json
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from rl.doctor import examine
from rl.observability.run_folder import RunFolder
from rl.observability.spans import SpanRecorder
from rl.utils.processes import identify


@dataclass
class Folder:
    """A run's folder, with this process as its controller."""

    path: Path
    run: RunFolder
    controller: SpanRecorder

    def add_record_of(self, role, process, **changed):
        """Write a record of another process; `changed` are moments, in seconds before now."""
        activity = SpanRecorder()
        file = activity.start(self.run.logs, role=role, rank=0)
        activity.stop()
        record = json.loads(file.read_text())
        record |= {"pid": process.pid, "start_ticks": process.start_ticks}
        file.write_text(json.dumps(record))

    def write_metrics(self, *records):
        self.run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))

    def age(self, seconds):
        """Move the start of the controller's spans back by this many seconds."""
        file = self.run.logs / "state" / "controller-0.json"
        record = json.loads(file.read_text())
        record["clock_offset_s"] += seconds
        file.write_text(json.dumps(record))


@pytest.fixture
def folder(tmp_path):
    with RunFolder.create(tmp_path, "run") as run:
        controller = SpanRecorder()
        controller.start(run.logs, role="controller", rank=0)
        yield Folder(run.path, run, controller)
        controller.stop()


@pytest.fixture
def sleeper():
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_run_with_a_recent_step_is_healthy(folder, sleeper):
    folder.add_record_of("trainer", identify(sleeper.pid))
    folder.write_metrics({"step": 3, "time/step_s": 2.0}, {"step": 4, "time/step_s": 30.0})
    folder.controller.begin("step 5", None)
    health = examine(folder.path)
    assert (health.status, health.last_step, health.problems) == ("running", 4, ())
    assert health.expected_s == 150.0
    assert health.last_step_age_s is not None
    assert 0 <= health.last_step_age_s < 60
    said = health.describe()
    assert "running; the last step was step 4, 0." in said
    assert f"controller[0]    alive     pid {os.getpid()}: step 5 for 0." in said
    assert f"trainer[0]       alive     pid {sleeper.pid}: idle for 0." in said


def test_silent_controller_is_a_problem(folder):
    folder.write_metrics({"step": 4, "time/step_s": 2.0})
    folder.controller.begin("waits for trainer.optim_step", None)
    assert examine(folder.path).problems == ()
    folder.age(61.0)
    (problem,) = examine(folder.path).problems
    assert problem.startswith(
        "in the controller nothing has begun or ended for 61 s, expected are at most 60 s"
    )
    assert "waits for trainer.optim_step for 61." in problem
    assert examine(folder.path, expected_s=100.0).problems == ()


def test_dead_actor_is_a_problem(folder, sleeper):
    folder.add_record_of("generator_1", identify(sleeper.pid))
    sleeper.kill()
    sleeper.wait()
    health = examine(folder.path)
    assert health.problems == ("generator_1[0] is dead",)
    assert "generator_1[0]   dead" in health.describe()
    assert "PROBLEM: generator_1[0] is dead" in health.describe()


def test_stopped_actor_is_a_problem(folder, sleeper):
    folder.add_record_of("reward", identify(sleeper.pid))
    os.kill(sleeper.pid, signal.SIGSTOP)
    os.waitpid(sleeper.pid, os.WUNTRACED)
    health = examine(folder.path)
    assert health.problems == ("reward[0] is stopped by a signal",)
    assert "reward[0]        STOPPED" in health.describe()


def test_run_with_a_dead_controller_has_ended(folder, sleeper):
    folder.add_record_of("controller", identify(sleeper.pid))
    sleeper.kill()
    sleeper.wait()
    health = examine(folder.path)
    assert (health.status, health.problems) == (
        "ended",
        ("the controller is dead, and the run has not finished",),
    )


def test_finished_run_has_no_problems(folder, sleeper):
    folder.add_record_of("controller", identify(sleeper.pid))
    folder.run.mark_finished()
    sleeper.kill()
    sleeper.wait()
    health = examine(folder.path)
    assert (health.status, health.problems) == ("finished", ())
    assert health.describe().endswith("the run has finished")
