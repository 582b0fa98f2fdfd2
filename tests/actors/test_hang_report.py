"""Hang reports about processes that did not answer."""

import asyncio
from pathlib import Path

import pytest

from actors.launch.calls import ActorLostError, ActorTimeoutError, is_caused_by_timeout, may_hang
from actors.launch.hang_report import add_hang_report, report_run
from actors.launch.member import RoleProcesses
from rl.distributed.process_group import CollectiveTimeoutError
from rl.observability.stacks import ProcessReport, format_excerpts, write_reports
from rl.utils.errors import RunError, list_causes
from rl.weights.types import WeightTimeoutError
from tests.support.watched_child import watched_child


def report_of(rank, stacks=""):
    return ProcessReport(
        role="trainer", name=f"trainer[{rank}]", spans="optim_step for 9.0 s", stacks=stacks
    )


def test_report_is_short_in_the_message_and_complete_in_the_file(tmp_path):
    stacks = (
        'Thread 0x1 (most recent call first):\n  File "/lib/python3.11/selectors.py", line 468 in '
        'select\nThread 0x2 (most recent call first):\n  File "/home/me/step.py", line 3 in step\n'
    )
    (tmp_path / "stacks-1.txt").write_text("of an earlier run")
    file = write_reports(
        [report_of(0, stacks)], tmp_path, title="trainer.optim_step gave no answer"
    )
    assert file == tmp_path / "stacks-2.txt"
    assert (tmp_path / "stacks-2.txt").read_text() == (
        "trainer.optim_step gave no answer\n\n==== trainer[0]: optim_step for 9.0 "
        f"s\n{stacks.rstrip()}\n"
    )
    lines = format_excerpts(
        [report_of(0, stacks), *map(report_of, range(1, 20))], file
    ).splitlines()
    assert lines[:2] == [
        "  trainer[0]: optim_step for 9.0 s",
        "    thread at /home/me/step.py:3 step",
    ]
    assert lines[-2:] == ["  and 12 more processes", f"  all stacks: {file}"]
    assert len([line for line in lines if "trainer[" in line]) == 8
    full_disk = write_reports([report_of(0)], tmp_path / "gone", title="x")
    assert format_excerpts([report_of(0)], full_disk) == "  trainer[0]: optim_step for 9.0 s"


def test_report_has_the_roles_of_the_run_and_other_live_processes(tmp_path):
    roles = [RoleProcesses(name="trainer", mesh=None, members=None, logs=tmp_path)]
    lost, error = (ActorLostError("x", role="trainer", ranks=ranks) for ranks in ([1], []))
    with (
        watched_child(tmp_path, "lock", role="trainer", rank=1),
        watched_child(tmp_path, "tasks", role="controller"),
        watched_child(tmp_path, "lock", role="gone") as gone,
    ):
        gone.kill()
        gone.wait()
        reports = {report.name: report for report in asyncio.run(report_run(roles, tmp_path))}
        # A rank that is known to be dead is not asked; one that does not answer Monarch is.
        for lost_rank in (lost, error):
            asyncio.run(add_hang_report(lost_rank, roles))
    assert sorted(reports) == ["controller[0]", "trainer[1]"]
    assert reports["trainer[1]"].spans.startswith("optim_step of version 7 for ")
    assert "take_twice" in reports["trainer[1]"].stacks
    assert "wait_for_an_answer" in reports["controller[0]"].stacks
    assert lost.more == ""
    assert error.more.startswith("  trainer[1]: optim_step of version 7 for ")
    assert "controller[0]" not in error.more
    assert "controller[0]" in Path(tmp_path / "stacks-1.txt").read_text()


def raised_from(error, cause):
    error.__cause__ = cause
    return error


class RemoteError(Exception):
    """Error with the shape of Monarch's wrapper around an actor's exception."""

    def __init__(self, exception):
        super().__init__(str(exception))
        self.exception = exception


@pytest.mark.parametrize(
    ("error", "is_timeout", "trainer_hangs"),
    [
        (WeightTimeoutError("x"), True, True),
        (raised_from(RunError("x"), TimeoutError()), True, True),
        (raised_from(RunError("x"), RemoteError(TimeoutError())), True, True),
        (
            raised_from(RunError("x"), raised_from(KeyError("y"), CollectiveTimeoutError("z"))),
            True,
            True,
        ),
        (ActorTimeoutError("x", role="trainer"), True, True),
        (ActorTimeoutError("x", role="generator_0"), True, False),
        (raised_from(RunError("x"), ActorTimeoutError("y", role="generator_0")), True, False),
        (ActorTimeoutError("x"), True, True),
        (raised_from(RunError("x"), RemoteError(KeyError("y"))), False, False),
        (RunError("x"), False, False),
    ],
)
def test_errors_caused_by_timeouts_are_recognised_and_the_role_that_may_hang(
    error, is_timeout, trainer_hangs
):
    assert is_caused_by_timeout(error) is is_timeout
    assert may_hang("trainer", after=error) is trainer_hangs


@pytest.mark.timeout(10)
def test_circle_of_causes_is_read_once():
    first, second = RunError("x"), RunError("y")
    assert list(list_causes(raised_from(first, raised_from(second, first)))) == [first, second]
