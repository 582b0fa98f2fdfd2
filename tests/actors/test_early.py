"""A generator's process that is started before the config is known, and who takes it."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from actors.launch import early
from actors.launch.early import end_early, start_early, suit_network, take_early

ENV = {"RELAY_ROLE": "generator", "OMP_NUM_THREADS": "1", "TMPDIR": "/tmp/x", "HF_TOKEN": ""}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An early start without a process, and the list of what was ended."""
    ended: list[object] = []
    processes: Any = SimpleNamespace(name="generator")
    monkeypatch.setattr(early, "_early", early._Early(processes=processes, env=ENV))
    monkeypatch.setattr(early, "_began", True)
    monkeypatch.setattr(early, "find_processes_of_role", lambda *_, **__: ["process"])
    monkeypatch.setattr(early, "kill", ended.append)
    return SimpleNamespace(processes=processes, ended=ended)


def test_role_that_would_start_the_same_process_takes_it_once(started):
    env = {"RELAY_ROLE": "generator", "OMP_NUM_THREADS": "2", "HF_TOKEN": ""}
    assert take_early("trainer", env=env, is_alone=True) is None
    assert take_early("reward", env=env, is_alone=True) is None
    assert take_early("generator", env=env, is_alone=True) is started.processes
    assert take_early("generator", env=env, is_alone=True) is None  # a restart
    end_early()
    assert started.ended == []


@pytest.mark.parametrize(
    ("role", "change", "is_alone"),
    [
        ("generator", {}, False),  # two ranks, or another host
        ("generator_0", {}, True),  # several generators
        ("generator", {"HF_TOKEN": None}, True),  # it may have the secret (launch.keep_env)
        ("generator", {"VLLM_X": "1"}, True),
    ],
)
def test_process_that_no_role_can_use_is_ended(started, role, change, is_alone):
    env = {name: value for name, value in (ENV | change).items() if value is not None}
    assert take_early(role, env=env, is_alone=is_alone) is None
    assert started.ended == ["process"]


def test_process_that_died_is_not_taken(started):
    early._note_fault(SimpleNamespace(report=lambda: "killed by signal 9"))
    assert take_early("generator", env=ENV, is_alone=True) is None


@pytest.mark.parametrize(
    ("launch", "need", "anew"),
    [
        ({}, None, False),
        ({"isolate_network": True}, None, False),
        ({"isolate_network": False}, None, True),
        ({"on_cluster": True}, None, True),
        ({}, "the judge", True),
    ],
)
def test_program_whose_actors_need_the_machines_network_starts_anew(
    started, monkeypatch, launch, need, anew
):
    programs: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda *command: programs.append(command))
    monkeypatch.setenv(early.VARIABLE, "1")
    config: Any = SimpleNamespace(**{"isolate_network": None, "on_cluster": False} | launch)
    suit_network(config, needs_network=need)
    assert programs == ([(sys.executable, [sys.executable, *sys.orig_argv[1:]])] if anew else [])
    assert os.environ[early.VARIABLE] == ("0" if anew else "1")
    assert started.ended == (["process"] if anew else [])


@pytest.mark.parametrize(
    ("options", "is_of_use"),
    [
        ("--loop.num_steps 1", True),
        ("", True),
        ("--help", False),
        ("--help-all", False),
        ("--loop.num_steps 1 -h", False),
        ("--explain json", False),
        ("--explain=json", False),
        ("--launch.dry_run", False),
        ("--launch.hosts=slurm", False),
        ("--name --launched", True),
    ],
)
def test_only_programs_that_start_actors_here_start_one_early(monkeypatch, options, is_of_use):
    starts: list[str] = []
    monkeypatch.setattr(early, "_start", lambda: starts.append(options))
    monkeypatch.setattr(early, "GPU_DEVICES", ())
    monkeypatch.delenv(early.VARIABLE, raising=False)
    for cores, variable, expected in (
        ({0, 1}, "1", is_of_use),
        ({0}, "1", False),
        ({0, 1}, "0", False),
    ):
        starts.clear()
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores)
        monkeypatch.setenv(early.VARIABLE, variable)
        with start_early(options.split()):
            assert bool(starts) == expected


def test_process_imports_what_a_generator_needs(monkeypatch, tmp_path):
    imported: list[str] = []
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(early, "import_module", imported.append)
    monkeypatch.setattr(early, "setup_logging", lambda *_, **__: None)
    early.import_engine()
    assert imported == ["actors.generator", "actors.vllm.core"]
    assert list(tmp_path.iterdir()) == [tmp_path / early.BEGUN]


CONTROLLER = """
import asyncio, os, signal, sys, time
from actors.launch import early
from actors.launch.cleanup import find_processes_of_role
from actors.launch.launcher import supervise
from actors.launch.placement import Placement
from actors.vllm.environment import ENVIRONMENT
from rl.observability.logs import QUIET_ENVIRONMENT
from rl.utils.processes import is_alive

early.GPU_DEVICES, early.BEGIN_LIMIT_S = (), 0.0
early.import_engine = os.getpid  # vLLM is not needed here, and takes long to import.
find = lambda: find_processes_of_role("generator", parents=[os.getpid()])

async def take():
    async with supervise() as launcher:
        role = await launcher.spawn_role(
            Placement(role="generator", num_procs=1, threads=2),
            env=QUIET_ENVIRONMENT | ENVIRONMENT | {"OMP_NUM_THREADS": "2"},
        )
        return role.local[0]

with early.start_early([]):
    while not (processes := find()):
        time.sleep(0.01)
    (first,) = processes
    if sys.argv[1] == "unused":
        print(first.pid)
    elif sys.argv[1] == "dead":
        time.sleep(3)  # It is up, and Monarch looks after it.
        os.kill(first.pid, signal.SIGKILL)
        while not early._early.is_lost:
            time.sleep(0.05)
        print(asyncio.run(take()) != first)
    else:
        print(asyncio.run(take()) == first)
if sys.argv[1] == "unused":
    while is_alive(first):
        time.sleep(0.01)
"""


@pytest.mark.medium
@pytest.mark.timeout(120)
def test_processes_started_early_are_taken_replaced_or_ended():
    environment = {**os.environ, early.VARIABLE: "1"}
    programs = {
        how: subprocess.Popen(
            [sys.executable, "-c", CONTROLLER, how],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for how in ("alive", "dead", "unused")
    }
    said = {how: program.communicate(timeout=100) for how, program in programs.items()}
    assert {how: program.returncode for how, program in programs.items()} == dict.fromkeys(
        said, 0
    ), said
    assert (said["alive"][0], said["dead"][0]) == ("True\n", "True\n"), said
