"""Hang reports about processes that did not answer."""

import asyncio

import pytest

from actors.hang_report import (
    ProcessReport,
    format_reports,
    is_caused_by_timeout,
    report_run,
    write_reports,
)
from rl.distributed.process_group import CollectiveTimeoutError
from rl.utils.errors import RunError
from rl.weights.types import WeightTimeoutError
from tests.support.watched_child import watched_child


def test_report_is_short_in_the_message_and_complete_in_the_file(tmp_path):
    stacks = (
        'Thread 0x1 (most recent call first):\n  File "/lib/python3.11/selectors.py", line 468 in select\n'
        'Thread 0x2 (most recent call first):\n  File "/home/me/step.py", line 3 in step\n'
    )
    reports = [ProcessReport(name="trainer[0]", spans="optim_step of version 3 for 9.0 s", stacks=stacks)]
    (tmp_path / "stacks-1.txt").write_text("of an earlier deadline")
    file = write_reports(reports, tmp_path, title="trainer.optim_step gave no answer")
    assert file is not None
    assert file == tmp_path / "stacks-2.txt"
    assert format_reports(reports, file).splitlines() == [
        "  trainer[0]: optim_step of version 3 for 9.0 s",
        "    thread at /home/me/step.py:3 step",
        f"  all stacks: {file}",
    ]
    assert file.read_text() == (
        "trainer.optim_step gave no answer\n\n"
        f"==== trainer[0]: optim_step of version 3 for 9.0 s\n{stacks.rstrip()}\n"
    )


def test_message_lists_eight_processes():
    reports = [ProcessReport(name=f"trainer[{n}]", spans="idle for 1.0 s", stacks="") for n in range(20)]
    lines = format_reports(reports, None).splitlines()
    assert lines[-1] == "  and 12 more processes"
    assert len([line for line in lines if "trainer[" in line]) == 8


def test_report_of_a_run_has_its_roles_and_other_live_processes(tmp_path):
    with (
        watched_child(tmp_path, "lock", role="trainer", rank=1),
        watched_child(tmp_path, "tasks", role="controller"),
        watched_child(tmp_path, "lock", role="gone") as gone,
    ):
        gone.kill()
        gone.wait()
        reports = {report.name: report for report in asyncio.run(report_run([], tmp_path))}
    assert sorted(reports) == ["controller[0]", "trainer[1]"]
    assert reports["trainer[1]"].spans.startswith("optim_step of version 7 for ")
    assert "take_twice" in reports["trainer[1]"].stacks
    assert "wait_for_an_answer" in reports["controller[0]"].stacks


def raised_from(error, cause):
    error.__cause__ = cause
    return error


class RemoteError(Exception):
    """Error with the shape of Monarch's wrapper around an actor's exception."""

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
def test_errors_caused_by_timeouts_are_recognised(error, is_one):
    assert is_caused_by_timeout(error) is is_one
