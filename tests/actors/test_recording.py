"""Spans that a run's processes record. Each test runs in a forked copy, since a process has one recorder."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from actors.recording import record_controller, record_process
from rl.observability.events import Events, read_events
from rl.observability.run_folder import RunFolder
from rl.observability.spans import TimelineConfig, span
from rl.observability.timeline import write_timeline_of_run
from tests.support.disks import run_unprivileged
from tests.support.forked import run_in_fork


@pytest.fixture
def open_folder():
    """A folder that other users can reach."""
    with tempfile.TemporaryDirectory(prefix="relay-t-") as name:
        os.chmod(name, 0o777)
        yield Path(name)


def answer(function):
    status, told = run_in_fork(function)
    assert status == 0, told
    return json.loads(told)


def test_ended_spans_are_not_recorded_without_a_timeline(tmp_path):
    def act():
        record_process(tmp_path, role="trainer", rank=0, timeline=TimelineConfig(enable=False))
        with span("push", version=1):
            pass
        return json.dumps(sorted(path.name for path in tmp_path.iterdir()))

    assert answer(act) == ["state"]


def test_failed_run_has_a_timeline(tmp_path):
    def act():
        timeline = TimelineConfig()
        with RunFolder.create(tmp_path, "run") as folder:
            events = Events(folder.events, wall_clock=lambda: 1.0)
            try:
                with record_controller(folder.logs, events, timeline=timeline), span("step 3"):
                    raise ValueError("of the loss")
            except ValueError:
                write_timeline_of_run(folder.logs, folder.timeline, timeline=timeline)
            drawn = json.loads(folder.timeline.read_text())["traceEvents"]
            # Spans of earlier tests in this process may be unfinished.
            ended = [e for e in drawn if e["ph"] == "b" and "unfinished" not in e["args"]]
            slices = [(e["name"], e["args"]) for e in ended]
            marks = [e["name"] for e in drawn if e["ph"] == "i"]
            return json.dumps([slices, marks, [event["event"] for event in read_events(folder.events)]])

    slices, marks, events = answer(act)
    assert slices == [["step 3", {"error": "ValueError: of the loss"}]]
    assert marks == events == ["started", "stopped"]


def test_timeline_that_is_disabled_or_cannot_be_written_is_skipped(open_folder):
    def act():
        with RunFolder.create(open_folder, "run") as folder:
            record_process(folder.logs, role="controller", rank=0)
            with span("step 1"):
                pass
            write_timeline_of_run(folder.logs, folder.timeline, timeline=TimelineConfig(enable=False))
            drawn = [folder.timeline.exists()]
            folder.path.chmod(0o555)
            write_timeline_of_run(folder.logs, folder.timeline, timeline=TimelineConfig())
            folder.path.chmod(0o755)
            return json.dumps([*drawn, folder.timeline.exists()])

    assert json.loads(run_unprivileged(act)) == [False, False]


def test_error_in_the_timeline_is_logged(caplog):
    logs: Any = None  # a bug
    write_timeline_of_run(logs, Path("timeline.json"), timeline=TimelineConfig())
    (record,) = caplog.records
    assert record.getMessage().startswith("timeline.json was not written: ")
