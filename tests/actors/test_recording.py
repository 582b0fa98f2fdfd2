"""Spans that a run's processes record. Each test runs in a forked copy, since a process has one recorder."""

import json
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from actors.run import recorded
from rl.observability.events import read_events
from rl.observability.run_folder import RunFolder
from rl.observability.spans import TimelineConfig, span
from rl.observability.timeline import read_spans
from tests.support.forked import run_in_fork


def test_failed_run_has_its_spans_and_events(tmp_path):
    def act():
        with RunFolder.create(tmp_path, "run") as folder:
            config: Any = SimpleNamespace(timeline=TimelineConfig())
            plan: Any = SimpleNamespace(resumed=None)
            with suppress(ValueError), recorded(config, plan, folder, resumes=False), span("step 3"):
                raise ValueError("of the loss")
            spans = [(span.name, span.error) for span in read_spans(folder.logs)]
            return json.dumps([spans, [event["event"] for event in read_events(folder.events)]])

    status, told = run_in_fork(act)
    assert status == 0, told
    assert json.loads(told) == [[["step 3", "ValueError: of the loss"]], ["started", "stopped"]]
