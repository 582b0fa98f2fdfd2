"""SLURM jobs of a run; fake commands stand for SLURM's."""

import asyncio
import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from monarch.config import configured

from actors.config import LaunchConfig, SlurmConfig
from actors.launch import slurm
from actors.launch.calls import ActorCallError
from actors.launch.hosts import Hosts, check_reachable, make_job
from actors.launch.launcher import Launcher
from tests.actors.test_hosts import check_environments
from tests.support.fake_slurm import write_commands
from tests.support.placed import placed
from tests.support.runs import start_controller, wait_until_gone

ROLES = {"trainer": 8, "replicas": 2, "degree": 2}


@pytest.fixture
def submitted(tmp_path, monkeypatch):
    """Return a function that submits a job to an sbatch that only keeps its script, options and
    environment.
    """
    sbatch, cat, env = tmp_path / "sbatch", shutil.which("cat"), shutil.which("env")
    sbatch.write_text(
        f"""#!/bin/sh\n{cat} > "$0.script"\nprintf '%s\\n' "$@" > "$0.options"\n"""
        f"""{env} > "$0.env"\necho 0\n"""
    )
    sbatch.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))

    def submit(slurm=None, **fields):
        slurm = replace(slurm or SlurmConfig(), log_folder=str(tmp_path / "all logs"))
        launch = LaunchConfig(hosts="slurm", slurm=slurm, **fields)
        placements = placed(launch, **ROLES)
        with configured():
            job = make_job(launch, placements, placements.count_hosts())
            job.apply()
        kept = {
            name: (tmp_path / f"sbatch.{name}").read_text() for name in ("script", "options", "env")
        }
        return SimpleNamespace(job=job, **kept)

    return submit


def parsed(options):
    """Return the values of options by name."""
    return dict(line.removeprefix("--").partition("=")[::2] for line in options.splitlines())


def test_one_job_has_the_nodes_of_all_roles(submitted, tmp_path):
    slurm = SlurmConfig(
        partition="gpu", account="me", qos="high", time_limit="2-00:00", cpus_per_host=32,
        memory_per_host="512G", sbatch_args=("--constraint=h200", "--comment='a b'", "-L x"),
    )  # fmt: skip
    options = submitted(slurm, trainer_hosts=2, reward_hosts=1, job_name="mine").options
    name = f"mine_{os.getpid()}"
    assert parsed(options) == {
        "job-name": name, "ntasks-per-node": "1", "nodes": "5", "gpus-per-node": "4",
        "exclusive": "",
        "partition": "gpu", "account": "me", "qos": "high", "time": "2-00:00",
        "cpus-per-task": "32",
        "mem": "512G", "constraint": "h200", "comment": "a b", "-L": "", "x": "", "parsable": "",
        "no-kill": "", "no-requeue": "", "export": "ALL,SLURM_NO_KILL=set",  # a job outlives a node
        "output": f"{tmp_path}/all logs/slurm_%j_{name}.out",
        "error": f"{tmp_path}/all logs/slurm_%j_{name}.err",
    }  # fmt: skip


def test_each_node_gets_an_identity_and_starts_a_host(submitted):
    script = submitted(SlurmConfig(port=23456), python="/opt/my python").script
    assert subprocess.run(["/bin/bash", "-n"], input=script, text=True).returncode == 0
    (identities,) = (
        line for line in script.splitlines() if line.startswith("export MONARCH_SERVICE")
    )
    assert len(set(json.loads(shlex.split(identities)[1].partition("=")[2]))) == 3
    (srun,) = (line for line in script.splitlines() if line.startswith("srun"))
    *command, python, option, code = shlex.split(srun)
    # A cluster's own defaults may bind a task to one core, or end all tasks with the first.
    assert command == ["srun", "--cpu-bind=none", "--kill-on-bad-exit=0", "--wait=0"]
    assert (python, option) == ("/opt/my python", "-c")
    compile(code, "host", "exec")
    assert "run_worker_loop_forever" in code
    assert "{socket.gethostname()}:23456" in code


def test_device_count_is_that_of_the_largest_role_or_configured(submitted):
    assert parsed(submitted().options)["gpus-per-node"] == "8"
    assert parsed(submitted(gpus_per_host=16).options)["gpus-per-node"] == "16"
    shared = parsed(submitted(SlurmConfig(exclusive=False), gpus_per_host=0).options)
    assert not {"gpus-per-node", "exclusive"} & set(shared)
    shared = parsed(
        submitted(SlurmConfig(exclusive=False, partition="gpu", cpus_per_host=4)).options
    )
    assert (shared["gpus-per-node"], shared["cpus-per-task"], "exclusive" in shared) == (
        "8",
        "4",
        False,
    )


def test_a_job_around_the_controller_does_not_reach_the_run(submitted, monkeypatch):
    # srun refuses to have both this and the memory of a node.
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "4096")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    passed = submitted(SlurmConfig(memory_per_host="512G")).env
    assert "SLURM_MEM_PER_CPU" not in passed
    assert "SLURM_CONF=/etc/slurm.conf" in passed


async def start_and_end(launch):
    hosts = Hosts(launch, placed(launch, **ROLES))
    try:
        await hosts.start()
    finally:
        await hosts.end()


def test_missing_slurm_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    slurm = SlurmConfig(log_folder=str(tmp_path))
    launch = LaunchConfig(hosts="slurm", controller_address="127.0.0.1", slurm=slurm)
    says = r"no hosts from slurm job 'relay' \(logs in /.*\): .*'sbatch'"
    with configured(), pytest.raises(ActorCallError, match=says):
        asyncio.run(start_and_end(launch))


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ("RUNNING|node[1-2]|None", "Expected 3 nodes but got 2"),
        ("NODE_FAIL|node[1-2]|NodeDown", r"failed with status: \['NODE_FAIL', 'FAILED'\]"),
    ],
)
def test_queue_is_read_as_plain_text(tmp_path, monkeypatch, caplog, answer, error):
    echo = f'[ -e "$0.asked" ] && echo "{answer}" || echo "PENDING||Resources"; : > "$0.asked"'
    # The first answer is an error: a controller of SLURM that restarts loses no job.
    echo = f'[ -e "$0.up" ] || {{ : > "$0.up"; echo "Socket timed out" >&2; exit 1; }}; {echo}'
    scripts = {"sbatch": "echo 7", "squeue": echo, "scontrol": "echo node1; echo node2"}
    for name, script in {**scripts, "scancel": ""}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    slurm = SlurmConfig(log_folder=str(tmp_path))
    launch = LaunchConfig(hosts="slurm", controller_address="127.0.0.1", slurm=slurm)
    with configured(), pytest.raises(ActorCallError, match=error), caplog.at_level("INFO"):
        asyncio.run(start_and_end(launch))
    assert "SLURM job 7: squeue failed: Socket timed out" in caplog.text
    assert "SLURM job 7 is in the queue: Resources" in caplog.text


def test_job_that_cannot_be_cancelled_is_an_error_and_not_forgotten(submitted, tmp_path):
    job = submitted().job
    (tmp_path / "scancel").write_text(
        "#!/bin/sh\necho Unable to contact slurm controller >&2; exit 8\n"
    )
    (tmp_path / "scancel").chmod(0o700)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"^scancel failed: Unable to contact slurm controller$"
        ):
            job.kill()


def test_node_that_starts_no_processes_is_lost(monkeypatch):
    async def set_up(*_):
        raise ValueError("error spawning proc mesh: statuses: Timeout(30s)=0..1")

    lost: list[str] = []
    members = SimpleNamespace(set_up=SimpleNamespace(call=set_up))
    node = SimpleNamespace(spawn_procs=lambda **_: SimpleNamespace(spawn=lambda *_: members))
    config = LaunchConfig(hosts="slurm")
    monkeypatch.setattr(Launcher, "current", None)
    launcher = Launcher()
    hosts = SimpleNamespace(
        meshes={"trainer": node}, launch=config, mark_failed=lost.append, processes={}
    )
    monkeypatch.setattr(launcher, "hosts", hosts)
    with pytest.raises(
        ActorCallError, match=r"^starting role 'trainer' .*: error spawning proc mesh"
    ):
        asyncio.run(launcher.spawn_role(placed(config, **ROLES).trainer))
    assert lost == ["trainer"]


def test_controller_address_that_nodes_cannot_reach_is_refused(monkeypatch):
    launch = LaunchConfig(hosts="slurm")
    monkeypatch.setattr("socket.gethostbyname", lambda name: "127.0.1.1")
    says = (
        r"controller_address=None: .* 'login' resolves to 127\.0\.1\.1, where hosts of slurm "
        r"cannot reach"
    )
    with pytest.raises(ValueError, match=says):
        check_reachable(launch, hostname="login")
    check_reachable(LaunchConfig(), hostname="login")
    check_reachable(LaunchConfig(hosts="slurm", controller_address="10.0.0.7"), hostname="login")
    monkeypatch.setattr("socket.gethostbyname", lambda name: "10.0.0.7")
    check_reachable(launch, hostname="login")


def start_slurm_controller(tmp_path, **env):
    commands = write_commands(tmp_path / "bin")
    env |= {"PATH": f"{commands}:{os.environ['PATH']}", "LOG_FOLDER": str(tmp_path)}
    return start_controller("launch_controller", "wait", "slurm", **env), commands


@pytest.mark.medium
@pytest.mark.timeout(120)
def test_run_stopped_while_queued_leaves_no_job(tmp_path):
    controller, commands = start_slurm_controller(tmp_path, FAKE_SLURM_STATE="PENDING")
    deadline = time.monotonic() + 60
    while not (commands / "asked").exists():
        assert time.monotonic() < deadline
        os.sched_yield()
    controller.send_signal(signal.SIGTERM)
    _, errors = controller.communicate(timeout=60)
    assert controller.returncode == 143, errors
    assert (commands / "cancelled").exists()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_roles_run_on_slurm_nodes_and_the_guard_cancels_the_job_of_a_killed_controller(tmp_path):
    controller, commands = start_slurm_controller(tmp_path)
    assert controller.stdout is not None
    run = json.loads(controller.stdout.readline())
    check_environments(run["environments"])
    assert parsed((commands / "options").read_text())["nodes"] == "3"
    assert not (commands / "cancelled").exists()
    controller.kill()
    controller.communicate(timeout=60)
    assert wait_until_gone(run["actors"]) == []
    assert (commands / "cancelled").exists()
    for file in run["files"]:
        Path(file).unlink()


def test_a_job_is_lost_after_many_failures_in_a_row_only(submitted, monkeypatch):
    job = submitted().job
    answers: list[str | None] = []
    monkeypatch.setattr(slurm, "MAX_FAILURES", 3)

    def answer(command, **_):
        if (said := answers.pop(0)) is None:
            raise RuntimeError("squeue failed")
        return said

    monkeypatch.setattr(slurm, "_run_command", answer)
    answers += [None, None, "PENDING||None", None, None, None]
    found = [job.read_job("7") for _ in range(6)]
    states = [None if one is None else one["job_state"][0] for one in found]
    assert states == ["UNKNOWN", "UNKNOWN", "PENDING", "UNKNOWN", "UNKNOWN", None]


def test_a_command_that_hangs_is_an_error(monkeypatch):
    monkeypatch.setattr(slurm, "COMMAND_TIMEOUT_S", 0.2)
    with pytest.raises(RuntimeError, match=r"sleep did not end within 0.2 s"):
        slurm._run_command(["sleep", "20"])
