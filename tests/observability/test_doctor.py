"""Health of a run, as judged from its folder, and the doctor command."""

import json
import os
import re
import signal
import subprocess
from dataclasses import dataclass

import pytest

from rl import doctor, report, timeline
from rl.doctor import examine
from rl.observability.events import Events
from rl.observability.run_folder import RunFolder
from rl.observability.spans import SpanRecorder
from rl.utils.processes import identify
from tests.support.watched_child import watched_child


@dataclass
class Watched:
    """Run's folder with this process as its controller, and another process that sleeps."""

    run: RunFolder
    controller: SpanRecorder
    sleeper: subprocess.Popen[bytes]

    def record_sleeper_as(self, role):
        recorder = SpanRecorder()
        file = recorder.start(self.run.logs, role=role, rank=0)
        recorder.stop()
        process = identify(self.sleeper.pid)
        assert process is not None
        record = json.loads(file.read_text()) | {"pid": process.pid, "start_ticks": process.start_ticks}
        file.write_text(json.dumps(record))

    def kill_sleeper(self):
        self.sleeper.kill()
        self.sleeper.wait()

    def write_metrics(self, *records):
        self.run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))

    def age(self, seconds):
        """Move the controller's spans back by this many seconds."""
        file = self.run.logs / "state" / "controller-0.json"
        record = json.loads(file.read_text())
        record["clock_offset_s"] += seconds
        file.write_text(json.dumps(record))


@pytest.fixture
def run(tmp_path):
    with RunFolder.create(tmp_path, "run") as folder:
        yield folder


@pytest.fixture
def watched(run):
    controller = SpanRecorder()
    controller.start(run.logs, role="controller", rank=0)
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        yield Watched(run, controller, sleeper)
        sleeper.kill()
    controller.stop()


def test_run_with_a_recent_step_is_healthy(watched):
    watched.record_sleeper_as("trainer")
    watched.write_metrics({"step": 3, "time/step_s": 2.0}, {"step": 4, "time/step_s": 30.0})
    watched.controller.begin("step 5", None)
    health = examine(watched.run.path)
    assert (health.status, health.problems) == ("running", ())
    assert re.search(r"running; the last step was step 4, \d\.\d s ago", health.text)
    assert f"controller[0]    alive     pid {os.getpid()}: step 5 for 0." in health.text
    assert f"trainer[0]       alive     pid {watched.sleeper.pid}: idle for 0." in health.text
    assert health.text.endswith("no problem found; the controller may wait up to 150 s for one thing")


def test_silent_controller_is_a_problem(watched):
    watched.write_metrics({"step": 4, "time/step_s": 2.0})
    watched.controller.begin("waits for trainer.optim_step", None)
    assert examine(watched.run.path).problems == ()
    watched.age(61.0)
    (problem,) = examine(watched.run.path).problems
    says = "in the controller nothing has begun or ended for 61 s, expected are at most 60 s"
    assert problem.startswith(says)
    assert "waits for trainer.optim_step for 61." in problem
    assert examine(watched.run.path, expected_s=100.0).problems == ()


def test_dead_or_stopped_actor_is_a_problem(watched):
    watched.record_sleeper_as("generator_1")
    os.kill(watched.sleeper.pid, signal.SIGSTOP)
    os.waitpid(watched.sleeper.pid, os.WUNTRACED)
    health = examine(watched.run.path)
    assert health.problems == ("generator_1[0] is stopped by a signal",)
    assert "generator_1[0]   STOPPED" in health.text
    watched.kill_sleeper()
    health = examine(watched.run.path)
    assert health.problems == ("generator_1[0] is dead",)
    assert "PROBLEM: generator_1[0] is dead" in health.text


def test_run_without_its_controller_has_ended_or_finished(watched):
    watched.record_sleeper_as("controller")
    watched.kill_sleeper()
    health = examine(watched.run.path)
    problems = ("the controller is dead, and the run has not finished",)
    assert (health.status, health.problems) == ("ended", problems)
    watched.run.mark_finished()
    health = examine(watched.run.path)
    assert (health.status, health.problems) == ("finished", ())
    assert health.text.endswith("the run has finished")


def test_command_prints_spans_and_stacks_of_a_healthy_run(run, capsys):
    Events(run.events, wall_clock=lambda: 5.0).add("recovered", role="generator_0", after_s=1.5)
    with (
        watched_child(run.logs, "tasks", role="controller") as controller,
        watched_child(run.logs, "lock", role="trainer", rank=1) as trainer,
    ):
        assert doctor.main([str(run.path)]) == 0
        assert (controller.poll(), trainer.poll()) == (None, None)
    printed = capsys.readouterr().out
    assert f"trainer[1]       alive     pid {trainer.pid}, version 7: optim_step of version 7 for" in printed
    assert 'event: {"time": 5.0, "event": "recovered", "role": "generator_0", "after_s": 1.5}' in printed
    assert "==== controller[0]: optim_step" in printed
    assert "in wait_for_an_answer" in printed
    assert "in take_twice" in printed


@pytest.mark.parametrize("command", [doctor, report, timeline])
def test_commands_refuse_a_folder_that_is_not_a_run(command, tmp_path, capsys):
    assert command.main([str(tmp_path)]) == 2
    assert f"error: {tmp_path} is not the folder of a run: it has no" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
