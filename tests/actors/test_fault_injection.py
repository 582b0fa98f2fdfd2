"""Faults that kill a chosen process once, at a chosen moment."""

import json
import signal
import subprocess

import pytest

from rl.observability.spans import RECORDER, SpanRecorder, span
from rl.utils.processes import identify
from tools.fault_injection import FAULT_VARIABLE, Fault, arm, environment


@pytest.fixture
def victims(tmp_path):
    """Sleeping processes that are registered as two generators."""
    started = []
    for role in ("generator_0", "generator_1"):
        sleeper = subprocess.Popen(["sleep", "60"])
        SpanRecorder().start(tmp_path, role=role, rank=0)
        file = tmp_path / "state" / f"{role}-0.json"
        process = identify(sleeper.pid)
        assert process is not None
        told = json.loads(file.read_text()) | {"pid": process.pid, "start_ticks": process.start_ticks}
        file.write_text(json.dumps(told))
        started.append(sleeper)
    yield started
    for sleeper in started:
        sleeper.kill()
        sleeper.wait()


@pytest.fixture
def armed(tmp_path, monkeypatch):
    def arm_with(**settings):
        monkeypatch.setenv(FAULT_VARIABLE, environment(Fault(**settings))[FAULT_VARIABLE])
        arm(tmp_path)

    yield arm_with
    RECORDER.on_begin = None


def test_last_process_of_the_role_dies_once_at_the_chosen_count(victims, armed, tmp_path):
    armed(phase="push", count=2, victim="generator")
    first, last = victims
    with span("push"), span("pull"):
        assert last.poll() is None
    with span("push"):
        assert last.wait(20) == -signal.SIGKILL
    armed(phase="push", victim="generator")  # as in a resumed run
    with span("push"):
        assert first.poll() is None
    told = json.loads((tmp_path / "fault-push-generator.json").read_text())
    assert told["fault"] == {"phase": "push", "victim": "generator", "count": 2, "delay_s": 0.0}
    assert told["pids"] == [last.pid]
