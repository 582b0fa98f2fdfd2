"""Roles on real processes: what they start with, and that nothing of them stays."""

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from actors import launch, members
from actors.calls import ActorTimeoutError
from actors.processes import identify
from rl.errors import RunError
from rl.weights.monarch_env import SETTINGS
from tests.support.launch_controller import Holder
from tests.support.monarch_meshes import monarch_meshes
from tests.support.runs import hear_ctrl_c

ROOT = Path(__file__).parents[2]


def test_bad_numbers_are_refused_before_anything_starts():
    with pytest.raises(ValueError, match="role 'trainer': num_procs=0 and threads=1 must be at least 1"):
        asyncio.run(launch.spawn_role("trainer", num_procs=0))
    with pytest.raises(ValueError, match="num_procs=1 and threads=0"):
        asyncio.run(launch.spawn_role("trainer", num_procs=1, threads=0))
    with pytest.raises(ValueError, match=r"role 'trainer': gpus=\[0\] are fewer than num_procs=2"):
        asyncio.run(launch.spawn_role("trainer", num_procs=2, gpus=[0]))


def test_free_port_is_outside_the_range_the_system_hands_out():
    first, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    port = members.free_port()
    assert 20_000 <= port < first
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))


def test_address_for_other_hosts_is_one_of_this_machine():
    with socket.socket() as probe:
        probe.bind((members.outward_address(), 0))


def test_processes_on_other_hosts_are_told_how_monarch_is_set_here():
    env = members.process_env("trainer", 3, [4, 6])
    assert {name: env[name] for name in SETTINGS} == {name: os.environ[name] for name in SETTINGS}
    assert (env["OMP_NUM_THREADS"], env["CUDA_VISIBLE_DEVICES"]) == ("3", "4,6")
    assert "CUDA_VISIBLE_DEVICES" not in members.process_env("reward", 1, None)


def test_ranks_of_several_hosts_count_on_their_own_host():
    envs = members.process_group_envs(["a", "a", "b", "b", "b"], address="10.0.0.7", port=20001)
    assert [env["RANK"] for env in envs] == ["0", "1", "2", "3", "4"]
    assert [env["LOCAL_RANK"] for env in envs] == ["0", "1", "0", "1", "2"]
    assert [env["LOCAL_WORLD_SIZE"] for env in envs] == ["2", "2", "3", "3", "3"]
    assert {env["WORLD_SIZE"] for env in envs} == {"5"}
    assert {(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in envs} == {("10.0.0.7", "20001")}


@pytest.fixture(scope="module")
def meshes():
    with monarch_meshes() as meshes:
        yield meshes


@pytest.fixture(scope="module")
def role(meshes):
    """Two processes with a process group's environment and two GPUs."""
    mesh = meshes.run(launch.spawn_role("worker", num_procs=2, env={"A": "b"}, threads=3, gpus=[4, 6]))
    meshes.run(launch.setup_process_group_env(mesh))
    return mesh, mesh.spawn("holder", Holder)


@pytest.mark.medium
@pytest.mark.timeout(120)
def test_processes_get_their_environment_and_ranks(meshes, role):
    _, holder = role
    answers = [env for _, env in meshes.run(holder.environment.call()).items()]
    for rank, env in enumerate(answers):
        assert (env["RANK"], env["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("2", "2")
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert (env["RELAY_ROLE"], env["A"], env["OMP_NUM_THREADS"]) == ("worker", "b", "3")
        assert env["CUDA_VISIBLE_DEVICES"] == "4,6"
    assert answers[0]["MASTER_PORT"] == answers[1]["MASTER_PORT"]


@pytest.mark.medium
@pytest.mark.timeout(120)
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_actor_processes_leave_it_to_the_controller_to_end_them(meshes, role, signal_number):
    mesh, holder = role
    for pid in meshes.pids(mesh):
        os.kill(pid, signal_number)
    assert len(meshes.run(holder.environment.call())) == 2


@pytest.mark.medium
@pytest.mark.timeout(120)
def test_stop_ends_children_and_shared_memory_and_spares_other_roles(meshes, role):
    mesh, _ = role
    other = meshes.spawn_mesh(1, process_group=False)
    ((_, (pids, file)),) = meshes.run(other.spawn("holder", Holder).hold.call()).items()
    assert all(identify(pid) for pid in pids)
    meshes.stop(other)
    meshes.stop(other)
    assert not any(identify(pid) for pid in pids)
    assert not Path(file).exists()
    assert all(identify(pid) for pid in meshes.pids(mesh))
    with pytest.raises(ValueError, match="not a running role"):
        meshes.run(launch.setup_process_group_env(other))


@pytest.mark.medium
@pytest.mark.timeout(120)
def test_a_role_that_does_not_come_up_in_time_stops_the_run_by_its_name(meshes):
    says = r"^starting role 'late' \(1 processes a host\): no answer within 0.001 s$"
    with pytest.raises(ActorTimeoutError, match=says):
        meshes.run(launch.spawn_role("late", num_procs=1, timeout_s=0.001))
    assert issubclass(ActorTimeoutError, RunError)


@pytest.mark.medium
@pytest.mark.timeout(120)
def test_a_role_that_does_not_stop_when_asked_is_named_in_a_warning_and_killed(meshes, caplog):
    mesh = meshes.run(launch.spawn_role("deaf", num_procs=1))
    pids = meshes.pids(mesh)
    meshes.run(launch.stop(mesh, timeout_s=0.001))
    assert wait_until_gone(pids) == []
    (warning,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert warning.startswith("role deaf did not stop when asked: stopping role 'deaf': no answer within")


HELPERS = (" relay_member", " setup", " logger")
"""Actors beside everybody's: of `actors.launch`, and of Monarch."""


def reported(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "INFO"]


@pytest.mark.medium
@pytest.mark.timeout(120)
def test_a_process_that_exits_is_an_error_soon_and_the_controller_lives(meshes, caplog):
    caplog.set_level(logging.INFO, logger="actors.launch")
    mesh = meshes.spawn_mesh(1, process_group=False)
    holder = mesh.spawn("holder", Holder)
    start = time.monotonic()
    with pytest.raises(Exception, match="exited with non-zero code 3"):
        meshes.run(holder.exit_now.call())
    assert time.monotonic() - start < 5
    # Monarch tells the controller on its own time, and perhaps twice; of earlier tests' actors too.
    while not any("launch_controller.Holder holder" in error for error in reported(caplog)):
        assert time.monotonic() - start < 30
        meshes.run(asyncio.sleep(0.01))
    # Of the actor that was asked, not of the helpers that shared its process.
    assert not any(helper in error for error in reported(caplog) for helper in HELPERS)
    meshes.stop(mesh)


def read_run(how):
    """The controller's process, and the pids and shared-memory files of its run."""
    controller = subprocess.Popen(
        [sys.executable, "-m", "tests.support.launch_controller", how],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hear_ctrl_c,
    )
    assert controller.stdout is not None
    return controller, json.loads(controller.stdout.readline())


def wait_until_gone(pids):
    deadline = time.monotonic() + 10
    while any(identify(pid) for pid in pids) and time.monotonic() < deadline:
        os.sched_yield()
    return [pid for pid in pids if identify(pid)]


@pytest.mark.medium
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("how", "signal_number", "exit_code"),
    [
        ("return", None, 0),
        ("raise", None, 1),
        ("crash", None, 0),
        ("broken", None, 0),
        ("stuck", signal.SIGINT, -signal.SIGINT),
        ("wait", signal.SIGTERM, 143),
    ],
)
def test_nothing_of_a_run_is_left(how, signal_number, exit_code):
    controller, run = read_run(how)
    assert (len(run["pids"]), len(run["files"])) == (4, 2)
    if signal_number is not None:
        # As a terminal sends Ctrl-C: to every process of the group.
        os.killpg(controller.pid, signal_number)
    _, errors = controller.communicate(timeout=60)
    assert controller.returncode == exit_code, errors
    assert wait_until_gone(run["pids"]) == []
    assert [file for file in run["files"] if Path(file).exists()] == []
    assert ("RuntimeError: as asked" in errors) == (how == "raise")
    assert "Monarch internal logs" not in errors


def read_until(controller, line):
    assert controller.stdout is not None
    while (found := controller.stdout.readline()) != line:
        assert found, f"the controller ended before it said {line!r}"


@pytest.mark.medium
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("signal_number", "exit_code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)]
)
def test_a_first_signal_lets_the_loop_save_before_all_is_ended(signal_number, exit_code):
    controller, run = read_run("hear and save")
    read_until(controller, "training\n")
    os.killpg(controller.pid, signal_number)
    said, errors = controller.communicate(timeout=60)
    assert said == "saves\nsaved\n"
    assert controller.returncode == exit_code, errors
    assert wait_until_gone(run["pids"]) == []
    assert [file for file in run["files"] if Path(file).exists()] == []


@pytest.mark.medium
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("first", "second", "exit_code"),
    [
        (signal.SIGINT, signal.SIGINT, -signal.SIGINT),
        (signal.SIGTERM, signal.SIGTERM, 143),
        (signal.SIGINT, signal.SIGTERM, 143),
    ],
)
def test_a_second_signal_ends_at_once_and_in_order(first, second, exit_code):
    controller, run = read_run("hear")
    read_until(controller, "training\n")
    os.killpg(controller.pid, first)
    read_until(controller, "saves\n")
    os.killpg(controller.pid, second)
    said, errors = controller.communicate(timeout=60)
    assert said == ""
    assert controller.returncode == exit_code, errors
    assert wait_until_gone(run["pids"]) == []
    assert [file for file in run["files"] if Path(file).exists()] == []


@pytest.mark.medium
@pytest.mark.timeout(120)
def test_actor_processes_die_with_a_killed_controller():
    controller, run = read_run("wait")
    actors, children = run["pids"][::2], run["pids"][1::2]
    try:
        controller.kill()
        controller.wait(timeout=60)
        assert wait_until_gone(actors) == []
    finally:
        # Their own children, and their files, do outlive a controller that was killed.
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for file in run["files"]:
            Path(file).unlink()
        controller.communicate(timeout=60)
