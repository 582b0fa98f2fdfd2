"""A chosen process is killed at a chosen moment, once."""

import json
import os
import signal
import subprocess

import pytest

from actors.fault_injection import Fault, arm, parse_fault
from rl.observability.activity import THIS_PROCESS, Activity, doing
from rl.process_id import identify


def test_a_fault_is_read_from_its_text_and_told_as_it():
    text = "phase=push,victim=generator,count=2,delay_s=0.5"
    fault = parse_fault(text)
    assert fault == Fault(phase="push", victim="generator", count=2, delay_s=0.5)
    assert str(fault) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("phase=push", "victim is missing"),
        ("phase=push,victim=nobody", "victim='nobody': must be one of trainer, generator, reward, host"),
        ("phase=push,victim=host,often=3", "no often; there are phase, victim, count, delay_s"),
        ("phase=push,victim=host,count=x", "count='x': must be a number"),
        ("phase=push,victim=host,count=0", "count=0, delay_s=0.0: must be at least 1, and at least 0"),
        ("phase=push,victim=host,delay_s=nan", "delay_s=nan: must be at least 1, and at least 0"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_fault(text)


@pytest.fixture
def victims(tmp_path):
    """Sleeping processes that are known as two generators."""
    started = []
    for role in ("generator_0", "generator_1"):
        sleeper = subprocess.Popen(["sleep", "60"])
        Activity().start(tmp_path / "state", role=role, rank=0)
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
def armed(tmp_path):
    def arm_with(text):
        arm(text, logs=tmp_path)

    yield arm_with
    THIS_PROCESS.on_begin = None


def test_the_last_process_of_the_role_dies_at_the_chosen_count_and_no_other_ever(victims, armed, tmp_path):
    armed("phase=push,count=2,victim=generator")
    first, last = victims
    with doing("push"), doing("pull"):
        assert last.poll() is None
    with doing("push"):
        assert last.wait(20) == -signal.SIGKILL
    armed("phase=push,count=1,victim=generator")  # As in a run that was resumed.
    with doing("push"):
        assert first.poll() is None
    told = json.loads((tmp_path / "fault.json").read_text())
    assert told["fault"] == "phase=push,victim=generator,count=2,delay_s=0.0"
    assert told["pids"] == [last.pid]


def test_a_delay_lets_the_phase_begin(victims, armed):
    armed("phase=pull,victim=generator,delay_s=0.05")
    with doing("pull"):
        assert victims[1].poll() is None
    assert victims[1].wait(20) == -signal.SIGKILL


def test_a_victim_that_is_not_there_is_an_error(tmp_path, armed):
    armed("phase=pull,victim=reward")
    with pytest.raises(RuntimeError, match="no process of role 'reward'"), doing("pull"):
        pass
    assert not (tmp_path / "fault.json").exists()


def test_a_host_is_killed_with_all_that_runs_on_it(tmp_path, armed):
    shell = "sleep 60 & echo $!; sleep 61 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", shell], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        pids = [int(host.stdout.readline()) for _ in range(2)]
        processes = [identify(pid) for pid in pids]
        Activity().start(tmp_path / "state", role="generator", rank=0)
        file = tmp_path / "state" / "generator-0.json"
        assert processes[0] is not None
        told = json.loads(file.read_text()) | {"pid": pids[0], "start_ticks": processes[0].start_ticks}
        file.write_text(json.dumps(told))
        armed("phase=pull,victim=host")
        with doing("pull"):
            assert host.wait(20) == -signal.SIGKILL
        host.stdout.read()  # Until nobody has the other end: then they are about to be gone.
    while any(identify(pid) == process for pid, process in zip(pids, processes, strict=True)):
        os.sched_yield()
