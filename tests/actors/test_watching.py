"""What a run's processes keep of what they do, each in a forked copy: it is one of a process."""

import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.watching import be_watched, draw_timeline, watched_controller
from rl.observability.activity import doing
from rl.observability.events import Events, read_events
from rl.observability.run_folder import RunFolder
from rl.observability.span_file import TimelineConfig
from rl.observability.spans import read_spans
from tests.support.disks import as_nobody
from tests.support.forked import in_copy


@pytest.fixture
def open_folder():
    """That another user reaches too."""
    with tempfile.TemporaryDirectory(prefix="relay-t-") as name:
        os.chmod(name, 0o777)
        yield Path(name)


def answer(function):
    status, told = in_copy(function)
    assert status == 0, told
    return json.loads(told)


def test_a_watched_process_keeps_its_spans_and_under_another_role_those_of_that_one(tmp_path):
    def act():
        be_watched(tmp_path, role="spare_0", rank=0)
        with doing("setup"):
            pass
        be_watched(tmp_path, role="generator_1", rank=0)
        with doing("generate", version=3):
            pass
        return json.dumps([(span.process, span.name, span.version) for span in read_spans(tmp_path)])

    assert answer(act) == [["spare_0[0]", "setup", None], ["generator_1[0]", "generate", 3]]


def test_a_process_keeps_nothing_where_the_timeline_is_off(tmp_path):
    def act():
        be_watched(tmp_path, role="trainer", rank=0, timeline=TimelineConfig(enable=False))
        with doing("push", version=1):
            pass
        return json.dumps(sorted(path.name for path in tmp_path.iterdir()))

    assert answer(act) == ["state"]


def test_a_run_that_fails_has_a_timeline_of_what_it_was_doing(tmp_path):
    def act():
        timeline = TimelineConfig()
        with RunFolder.create(tmp_path, "run") as folder:
            events = Events(folder.events, wall_clock=lambda: 1.0)
            try:
                with watched_controller(folder.logs, events, timeline=timeline), doing("step 3"):
                    raise ValueError("of the loss")
            except ValueError:
                draw_timeline(folder, timeline)
            drawn = json.loads(folder.timeline.read_text())["traceEvents"]
            # What another test gave up may still be under way in this process.
            ended = [e for e in drawn if e["ph"] == "X" and "unfinished" not in e["args"]]
            slices = [(e["name"], e["args"]) for e in ended]
            marks = [e["name"] for e in drawn if e["ph"] == "i"]
            return json.dumps([slices, marks, [event["event"] for event in read_events(folder.events)]])

    slices, marks, events = answer(act)
    assert slices == [["step 3", {"error": "ValueError: of the loss"}]]
    assert marks == events == ["started", "stopped"]


def test_a_timeline_that_cannot_be_written_ends_nothing_and_one_that_is_off_is_not_drawn(open_folder):
    def act():
        with RunFolder.create(open_folder, "run") as folder:
            be_watched(folder.logs, role="controller", rank=0)
            with doing("step 1"):
                pass
            draw_timeline(folder, TimelineConfig(enable=False))
            drawn = [folder.timeline.exists()]
            folder.path.chmod(0o555)
            draw_timeline(folder, TimelineConfig())
            folder.path.chmod(0o755)
            return json.dumps([*drawn, folder.timeline.exists()])

    assert json.loads(as_nobody(act)) == [False, False]


def test_no_timeline_is_a_reason_to_end_a_run(caplog):
    folder: Any = SimpleNamespace(logs=None, timeline="timeline.json")  # a mistake of ours
    draw_timeline(folder, TimelineConfig())
    (record,) = caplog.records
    assert record.getMessage().startswith("timeline.json was not written: TypeError")
