"""The doctor beside a run, as a user calls it."""

import os
import signal

import pytest

from rl import doctor
from rl.observability.events import Events
from rl.observability.run_folder import RunFolder
from tests.support.watched_child import watched_child


@pytest.fixture
def run(tmp_path):
    with RunFolder.create(tmp_path, "run") as folder:
        yield folder


def test_state_and_stacks_of_a_run_that_moves_are_printed_and_the_status_is_0(run, capsys):
    Events(run.events, wall_clock=lambda: 5.0).add("recovered", role="generator_0", after_s=1.5)
    with (
        watched_child(run.logs, "tasks", role="controller") as controller,
        watched_child(run.logs, "lock", role="trainer", rank=1) as trainer,
    ):
        assert doctor.main([str(run.path)]) == 0
        assert (controller.poll(), trainer.poll()) == (None, None)
    printed = capsys.readouterr().out
    assert (
        f"trainer[1]       alive     pid {trainer.pid}, version 7: does optim_step of version 7 for"
        in printed
    )
    assert 'event: {"time": 5.0, "event": "recovered", "role": "generator_0", "after_s": 1.5}' in printed
    assert "==== controller[0]: optim_step" in printed
    assert "in wait_for_an_answer" in printed
    assert "in take_twice" in printed


def test_a_run_that_hangs_is_said_to_and_the_status_is_1(run, capsys):
    with (
        watched_child(run.logs, "tasks", role="controller"),
        watched_child(run.logs, "lock", role="trainer") as trainer,
    ):
        os.kill(trainer.pid, signal.SIGSTOP)
        os.waitpid(trainer.pid, os.WUNTRACED)
        assert doctor.main([str(run.path)]) == 1
        printed = capsys.readouterr().out
        assert "PROBLEM: trainer[0] is stopped by a signal" in printed
        assert "no stacks: the process is stopped by a signal" in printed
        assert doctor.main([str(run.path), "--brief"]) == 1
        assert "====" not in capsys.readouterr().out


def test_a_folder_that_is_no_run_is_refused_with_status_2(tmp_path, capsys):
    assert doctor.main([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said == f"error: {tmp_path} is not the folder of a run: it has no status.json\n"


@pytest.mark.parametrize("value", ["0", "-1", "soon"])
def test_an_expectation_that_is_no_time_is_refused(value, tmp_path, capsys):
    with pytest.raises(SystemExit) as refused:
        doctor.main([str(tmp_path), "--expected_s", value])
    assert refused.value.code == 2
    assert "--expected_s" in capsys.readouterr().err
