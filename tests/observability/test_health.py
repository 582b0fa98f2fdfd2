"""Runs that move, hang, are dead or done, as their folders tell it."""

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from rl.observability.activity import Activity
from rl.observability.health import examine
from rl.observability.run_folder import RunFolder
from rl.process_id import identify


@dataclass
class Folder:
    """A run's folder, with this process as its controller."""

    path: Path
    run: RunFolder
    controller: Activity

    def told_by(self, role, process, **changed):
        """A record of another process: `changed` are moments, in seconds before now."""
        activity = Activity()
        file = activity.start(self.run.logs / "state", role=role, rank=0)
        activity.stop()
        record = json.loads(file.read_text())
        record |= {"pid": process.pid, "start_ticks": process.start_ticks}
        file.write_text(json.dumps(record))

    def write_metrics(self, *records):
        self.run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))

    def age(self, seconds):
        """All that the controller has begun was so many seconds earlier."""
        file = self.run.logs / "state" / "controller-0.json"
        record = json.loads(file.read_text())
        for moment in (record["changed"], record["idle"], *(d["oldest"] for d in record["doing"])):
            moment["since_monotonic_s"] -= seconds
        file.write_text(json.dumps(record))


@pytest.fixture
def folder(tmp_path):
    with RunFolder.create(tmp_path, "run") as run:
        controller = Activity()
        controller.start(run.logs / "state", role="controller", rank=0)
        yield Folder(run.path, run, controller)
        controller.stop()


@pytest.fixture
def sleeper():
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_a_run_whose_last_step_was_a_moment_ago_moves(folder, sleeper):
    folder.told_by("trainer", identify(sleeper.pid))
    folder.write_metrics({"step": 3, "time/step_s": 2.0}, {"step": 4, "time/step_s": 30.0})
    folder.controller.begin("step 5", None)
    health = examine(folder.path)
    assert (health.status, health.last_step, health.problems) == ("running", 4, ())
    assert health.expected_s == 150.0
    assert health.last_step_age_s is not None
    assert 0 <= health.last_step_age_s < 60
    said = health.describe()
    assert "running; step 4 was the last, 0." in said
    assert f"controller[0]    alive     pid {os.getpid()}: does step 5 for 0." in said
    assert f"trainer[0]       alive     pid {sleeper.pid}: does nothing for 0." in said


def test_a_controller_in_which_nothing_happens_is_stuck(folder):
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


def test_a_wait_for_the_trainer_that_is_too_long_is_found_beside_other_calls_that_end(folder):
    folder.write_metrics({"step": 4, "time/step_s": 2.0})
    folder.controller.begin("waits for trainer.optim_step", None)
    folder.age(75.0)
    record = json.loads((folder.run.logs / "state" / "controller-0.json").read_text())
    record["changed"]["since_monotonic_s"] = time.monotonic()
    (folder.run.logs / "state" / "controller-0.json").write_text(json.dumps(record))
    (problem,) = examine(folder.path).problems
    assert problem == "the controller waits for trainer.optim_step for 75 s, expected are at most 60 s"


def test_before_the_first_step_the_start_has_its_own_deadline(folder):
    config = {"values": {"timeouts": {"setup_s": 300.0}}}
    folder.run.config_json.write_text(json.dumps(config))
    folder.age(299.0)
    assert examine(folder.path).problems == ()
    folder.age(2.0)
    assert len(examine(folder.path).problems) == 1


def test_a_dead_actor_of_a_living_run_is_a_problem(folder, sleeper):
    folder.told_by("generator_1", identify(sleeper.pid))
    sleeper.kill()
    sleeper.wait()
    health = examine(folder.path)
    assert health.problems == ("generator_1[0] is dead",)
    assert "generator_1[0]   dead" in health.describe()
    assert "PROBLEM: generator_1[0] is dead" in health.describe()


def test_a_stopped_actor_is_a_problem(folder, sleeper):
    folder.told_by("reward", identify(sleeper.pid))
    os.kill(sleeper.pid, signal.SIGSTOP)
    os.waitpid(sleeper.pid, os.WUNTRACED)
    health = examine(folder.path)
    assert health.problems == ("reward[0] is stopped by a signal",)
    assert "reward[0]        STOPPED" in health.describe()


def test_a_run_whose_controller_was_killed_has_ended_and_not_finished(folder, sleeper):
    folder.told_by("controller", identify(sleeper.pid))
    sleeper.kill()
    sleeper.wait()
    health = examine(folder.path)
    assert (health.status, health.problems) == (
        "ended",
        ("its controller is dead, and the run has not finished",),
    )


def test_a_finished_run_has_no_problem_though_nobody_lives(folder, sleeper):
    folder.told_by("controller", identify(sleeper.pid))
    folder.run.mark_finished()
    sleeper.kill()
    sleeper.wait()
    health = examine(folder.path)
    assert (health.status, health.problems) == ("finished", ())
    assert health.describe().endswith("it has finished")


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ValueError, match=r"is not the folder of a run: it has no status\.json"):
            examine(path)
