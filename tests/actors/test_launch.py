"""Real processes of roles: environments, deadlines, signals and cleanup."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from actors.launch import cleanup, launcher, member
from actors.launch.calls import ActorTimeoutError
from actors.launch.placement import Placement
from rl.utils.processes import identify
from rl.weights import SETTINGS
from tests.support.launch_controller import Holder
from tests.support.monarch_meshes import monarch_meshes
from tests.support.runs import ROOT, start_controller, wait_until_gone


def test_actors_find_the_packages_of_the_controller_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [])
    assert cleanup.import_path() == f"{tmp_path}{os.pathsep}{ROOT}"


def test_free_port_is_outside_the_ephemeral_range():
    first, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    port = cleanup.free_port()
    assert 20_000 <= port < first
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))


def test_address_for_other_hosts_belongs_to_this_machine():
    with socket.socket() as probe:
        probe.bind((cleanup.find_own_address(), 0))


def test_processes_on_other_hosts_get_the_monarch_settings_of_this_one():
    env = member.process_env(role="trainer", threads=3, gpus=(4, 6))
    assert {name: env[name] for name in SETTINGS} == {name: os.environ[name] for name in SETTINGS}
    assert (env["OMP_NUM_THREADS"], env["CUDA_VISIBLE_DEVICES"]) == ("3", "4,6")
    assert "CUDA_VISIBLE_DEVICES" not in member.process_env(role="reward", threads=1)


def test_idle_threads_of_a_role_soon_sleep_unless_the_user_says_how_they_wait(monkeypatch):
    start = partial(member.process_env, role="trainer", threads=2)
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    assert start()["GOMP_SPINCOUNT"] == "2000"
    for name, value in (("OMP_WAIT_POLICY", "active"), ("GOMP_SPINCOUNT", "7")):
        with monkeypatch.context() as chosen:
            chosen.setenv(name, value)
            # The process inherits the value.
            assert "GOMP_SPINCOUNT" not in start()


SLOW_EXIT = """
import monarch.actor
from monarch._src.actor import actor_mesh
from monarch._src.actor.future import Future
from actors.launch.compat import hide_client_start

class Slow:
    def get(self, timeout):
        raise TimeoutError

def end_slowly(host_timeout):
    # Else Monarch's threads may set the status of the process.
    end(host_timeout=host_timeout).get(timeout=20)
    return answers.pop()

with hide_client_start():
    monarch.actor.this_host()
end, answers = monarch.actor.shutdown_context, [Future._resolved(None), Slow()]
monarch.actor.shutdown_context = actor_mesh.shutdown_context = end_slowly
"""


@pytest.mark.medium
def test_process_whose_monarch_client_ends_slowly_prints_no_traceback():
    run = subprocess.run(
        [sys.executable, "-c", SLOW_EXIT], capture_output=True, text=True, timeout=50
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_local_ranks_are_counted_per_host():
    envs = member.process_group_envs(["a", "a", "b", "b", "b"], address="10.0.0.7", port=20001)
    assert [env["RANK"] for env in envs] == ["0", "1", "2", "3", "4"]
    assert [env["LOCAL_RANK"] for env in envs] == ["0", "1", "0", "1", "2"]
    assert [env["LOCAL_WORLD_SIZE"] for env in envs] == ["2", "2", "3", "3", "3"]
    assert {env["WORLD_SIZE"] for env in envs} == {"5"}
    assert {(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in envs} == {("10.0.0.7", "20001")}


def test_nested_run_is_refused_and_leaves_the_signal_handlers(monkeypatch):
    monkeypatch.setattr(launcher.Launcher, "current", object())
    before = signal.getsignal(signal.SIGTERM)

    async def main(launcher):
        raise AssertionError("not reached")

    with pytest.raises(
        RuntimeError, match="this process runs actors already: end the other run first"
    ):
        launcher.run(main)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture(scope="module")
def meshes():
    with monarch_meshes() as meshes:
        yield meshes


@pytest.fixture(scope="module")
def role(meshes):
    """Two processes with the environment of a process group and two GPUs."""
    role = meshes.spawn_role("worker", num_procs=2, env={"A": "b"}, threads=3, gpus=[4, 6])
    meshes.run(launcher.setup_process_group_env(role))
    return role.mesh, role.mesh.spawn("holder", Holder)


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


@pytest.mark.medium
@pytest.mark.timeout(120)
def test_role_that_does_not_start_or_stop_in_time_is_named(meshes, caplog):
    says = (
        r"^starting role 'late' \(1 processes a host\): no answer within 0.001 s "
        r"\(timeouts.start_s\)$"
    )
    with pytest.raises(ActorTimeoutError, match=says):
        meshes.run(meshes.launcher.spawn_role(Placement(role="late", num_procs=1), timeout_s=0.001))
    role = meshes.spawn_role("deaf", num_procs=1)
    pids = meshes.pids(role.mesh)
    meshes.run(meshes.launcher.stop(role, timeout_s=0.001))
    assert wait_until_gone(pids) == []
    (warning,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert warning.startswith(
        "role deaf did not stop when asked: stopping role 'deaf': no answer within"
    )


def wait_for(controller, line):
    while (found := controller.stdout.readline()) != line:
        assert found, f"the controller ended before it said {line!r}"


@pytest.mark.medium
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("how", "signals", "said", "code"),
    [
        ("break", {}, "", 1),
        ("stuck", {"": signal.SIGINT}, "", -signal.SIGINT),
        ("hear and save", {"training\n": signal.SIGINT}, "saves\nsaved\n", -signal.SIGINT),
        ("hear and save", {"training\n": signal.SIGHUP}, "saves\nsaved\n", 128 + signal.SIGHUP),
        (
            "hear",
            {"training\n": signal.SIGINT, "saves\n": signal.SIGTERM},
            "",
            128 + signal.SIGTERM,
        ),
    ],
)
def test_first_signal_lets_a_listening_loop_save_and_no_end_leaves_anything_behind(
    how, signals, said, code
):
    """A second signal, which another thread receives while the event loop is idle, ends everything
    at once.
    """
    controller = start_controller("launch_controller", how)
    assert controller.stdout is not None
    run = json.loads(controller.stdout.readline())
    assert (len(run["pids"]), len(run["files"])) == (4, 2)
    for line, number in signals.items():
        if line:
            wait_for(controller, line)
        os.killpg(controller.pid, number)  # a terminal sends Ctrl-C to every process of the group
    rest, errors = controller.communicate(timeout=60)
    assert (rest, controller.returncode) == (said, code), errors
    assert wait_until_gone(run["pids"]) == []
    assert [file for file in run["files"] if Path(file).exists()] == []
    assert ("RuntimeError: as asked" in errors) == (how == "break")
    assert "Monarch internal logs" not in errors


SLOW_START = """
import os, pathlib, signal, time
if os.environ.get("RELAY_ROLE") == "slow":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pathlib.Path(os.environ["SLOW_START"], str(os.getpid())).touch()
    time.sleep(600)
"""


@pytest.mark.medium
@pytest.mark.timeout(120)
def test_ctrl_c_while_actors_start_ends_everything_at_once(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SLOW_START)
    controller = start_controller("launch_controller", "start", SLOW_START=str(tmp_path))
    wait_for(controller, "starting\n")
    while len(pids := [int(file.name) for file in tmp_path.iterdir() if file.name.isdigit()]) < 2:
        assert controller.poll() is None, controller.communicate()[1]
        time.sleep(0.05)
    os.killpg(controller.pid, signal.SIGINT)
    started = time.monotonic()
    _, errors = controller.communicate(timeout=60)
    assert time.monotonic() - started < 10, errors
    assert controller.returncode == -signal.SIGINT, errors
    assert wait_until_gone(pids) == []
