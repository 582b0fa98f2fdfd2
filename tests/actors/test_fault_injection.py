"""Faults that kill a chosen process once, at a chosen moment."""

import json
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from rl.observability.spans import RECORDER, SpanRecorder, span
from rl.utils.processes import identify
from tools.fault_injection import FAULT_VARIABLE, Fault, arm, environment


def register(pid: int, role: str, logs: Path) -> None:
    """Write the state file of a process of a run."""
    SpanRecorder().start(logs, role=role, rank=0)
    file = logs / "state" / f"{role}-0.json"
    process = identify(pid)
    assert process is not None
    told = json.loads(file.read_text()) | {"pid": process.pid, "start_ticks": process.start_ticks}
    file.write_text(json.dumps(told))


@pytest.fixture
def victims(tmp_path):
    """Sleeping processes that are registered as two generators."""
    started = []
    for role in ("generator_0", "generator_1"):
        sleeper = subprocess.Popen(["sleep", "60"])
        register(sleeper.pid, role, tmp_path)
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


def test_host_dies_with_all_of_its_processes(armed, tmp_path):
    command = "sleep 60 & sleep 60 & echo started; wait"
    with subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        host.stdout.readline()
        processes = psutil.Process(host.pid).children()
        register(processes[0].pid, "generator_0", tmp_path)
        armed(phase="push", victim="host")
        with span("push"):
            assert host.wait(20) == -signal.SIGKILL
        assert len(processes) == 2
        assert psutil.wait_procs(processes, timeout=20)[1] == []
    told = json.loads((tmp_path / "fault-push-host.json").read_text())
    assert sorted(told["pids"]) == sorted([host.pid, *(process.pid for process in processes)])
