"""The doctor command on a run's folder."""

import pytest

from rl import doctor
from rl.observability.events import Events
from rl.observability.run_folder import RunFolder
from tests.support.watched_child import watched_child


@pytest.fixture
def run(tmp_path):
    with RunFolder.create(tmp_path, "run") as folder:
        yield folder


def test_spans_and_stacks_of_a_healthy_run_are_printed(run, capsys):
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


def test_folder_that_is_not_a_run_is_refused_with_status_2(tmp_path, capsys):
    assert doctor.main([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said == f"error: {tmp_path} is not the folder of a run: it has no status.json\n"
