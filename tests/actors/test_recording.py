"""Spans that a run's processes record. Each test runs in a forked copy, since a process has one recorder."""

import json
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from actors.run import recorded
from rl.observability.events import read_events
from rl.observability.run_folder import RunFolder
from rl.observability.spans import TimelineConfig, span
from tests.support.forked import run_in_fork


def answer(function):
    status, told = run_in_fork(function)
    assert status == 0, told
    return json.loads(told)


def test_failed_run_has_a_timeline(tmp_path):
    def act():
        with RunFolder.create(tmp_path, "run") as folder:
            config: Any = SimpleNamespace(timeline=TimelineConfig())
            plan: Any = SimpleNamespace(resumed=None)
            with suppress(ValueError), recorded(config, plan, folder, resumes=False), span("step 3"):
                raise ValueError("of the loss")
            drawn = json.loads(folder.timeline.read_text())["traceEvents"]
            # Spans of earlier tests in this process may be unfinished.
            ended = [e for e in drawn if e["ph"] == "b" and "unfinished" not in e["args"]]
            slices = [(e["name"], e["args"]) for e in ended]
            marks = [e["name"] for e in drawn if e["ph"] == "i"]
            return json.dumps([slices, marks, [event["event"] for event in read_events(folder.events)]])

    slices, marks, events = answer(act)
    assert slices == [["step 3", {"error": "ValueError: of the loss"}]]
    assert marks == events == ["started", "stopped"]
