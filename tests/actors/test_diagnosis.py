"""What is told of processes that somebody has waited for."""

import asyncio
import pickle

import pytest

from actors.diagnosis import Report, Watched, exceeded_a_deadline, reports_of_run, told, write_reports
from rl.distributed.process_group import CollectiveTimeoutError
from rl.errors import RunError
from rl.weights.errors import WeightTimeoutError
from tests.support.watched_child import watched_child


def test_a_report_tells_what_and_where_in_few_lines_and_all_of_it_in_a_file(tmp_path):
    stacks = (
        'Thread 0x1 (most recent call first):\n  File "/lib/python3.11/selectors.py", line 468 in select\n'
        'Thread 0x2 (most recent call first):\n  File "/home/me/step.py", line 3 in step\n'
    )
    reports = [Report(name="trainer[0]", doing="optim_step of version 3 for 9.0 s", stacks=stacks)]
    (tmp_path / "stacks-1.txt").write_text("of an earlier deadline")
    file = write_reports(reports, tmp_path, title="trainer.optim_step gave no answer")
    assert file is not None
    assert file == tmp_path / "stacks-2.txt"
    assert told(reports, file).splitlines() == [
        "  trainer[0]: optim_step of version 3 for 9.0 s",
        "    thread at /home/me/step.py:3 step",
        f"  all stacks: {file}",
    ]
    assert file.read_text() == (
        "trainer.optim_step gave no answer\n\n"
        f"==== trainer[0]: optim_step of version 3 for 9.0 s\n{stacks.rstrip()}\n"
    )


def test_many_processes_are_not_all_told_in_a_message():
    reports = [Report(name=f"trainer[{n}]", doing="nothing for 1.0 s", stacks="") for n in range(20)]
    lines = told(reports, None).splitlines()
    assert lines[-1] == "  and 12 more processes"
    assert len([line for line in lines if "trainer[" in line]) == 8


def test_a_disk_that_takes_no_file_leaves_the_message(tmp_path):
    assert write_reports([], tmp_path / "absent", title="x") is None


def test_a_run_is_told_by_its_roles_and_by_whoever_else_says_what_it_does(tmp_path):
    with (
        watched_child(tmp_path, "lock", role="trainer", rank=1),
        watched_child(tmp_path, "tasks", role="controller"),
        watched_child(tmp_path, "lock", role="gone") as gone,
    ):
        gone.kill()
        gone.wait()
        role = Watched(role="other", num_ranks=0, logs=tmp_path, members=None)
        reports = {report.name: report for report in asyncio.run(reports_of_run([role]))}
    assert sorted(reports) == ["controller[0]", "trainer[1]"]
    assert reports["trainer[1]"].doing.startswith("optim_step of version 7 for ")
    assert "take_twice" in reports["trainer[1]"].stacks
    assert "wait_for_an_answer" in reports["controller[0]"].stacks


def raised_from(error, cause):
    error.__cause__ = cause
    return error


class RemoteError(Exception):
    """As Monarch hands on what an actor raised."""

    def __init__(self, exception):
        super().__init__(str(exception))
        self.exception = exception


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (WeightTimeoutError("x"), True),
        (raised_from(RunError("x"), TimeoutError()), True),
        (raised_from(RunError("x"), RemoteError(TimeoutError())), True),
        (raised_from(RunError("x"), raised_from(KeyError("y"), CollectiveTimeoutError("z"))), True),
        (raised_from(RunError("x"), RemoteError(KeyError("y"))), False),
        (RunError("x"), False),
    ],
)
def test_an_error_is_known_that_is_one_of_a_deadline_or_comes_of_one(error, is_one):
    assert exceeded_a_deadline(error) is is_one


def test_what_is_known_beside_the_message_travels_with_the_error():
    error = WeightTimeoutError("push of version 3 not finished")
    error.where, error.more = "step 3", "  trainer[0]: push"
    came = pickle.loads(pickle.dumps(error))
    assert str(came) == "step 3: push of version 3 not finished\n  trainer[0]: push"
