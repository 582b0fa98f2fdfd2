"""Attacks on the processes of a run by other users of the machine."""

import json
import os
import pwd
import re
import socket
import subprocess
import sys
import uuid
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Timer

import pytest
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from actors.launch import compat, isolation, member
from actors.launch.cleanup import free_port
from actors.launch.compat import list_monarch_threads
from actors.launch.isolation import forget_empty_secrets, isolate
from actors.vllm.compat import _serve_ranks_store
from rl import weights
from rl.config import cli
from rl.distributed.process_group import CommConfig, World, connect
from rl.rollouts.judge import Judge
from rl.rollouts.rubric import Criterion, Rubric
from rl.utils.errors import RunError
from rl.utils.namespaces import NETWORK
from tests.support.distributed import run_ranks

ROOT = Path(__file__).resolve().parent.parent.parent
NOBODY = 65534
CONTROLLER = "tests.support.attacked_controller"
UNPRIVILEGED = ("unshare", "--user", "--map-user=1234", "--map-group=1234")
"""Start of a command: a process without capabilities, whose user is 1234 for itself."""
AS_A_PROGRAM = f"""
import runpy
from rl.utils.namespaces import enter_user_namespace
enter_user_namespace()
runpy.run_module({CONTROLLER!r}, run_name="__main__", alter_sys=True)
"""


def owned_sockets(pid):
    links = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()]
    return {match[1] for link in links if (match := re.fullmatch(r"socket:\[(\d+)\]", link))}


def listening_names(pid):
    """Return the abstract unix sockets on which a process listens, in any of its threads'
    namespaces.
    """
    inodes = owned_sockets(pid)
    names = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for row in map(str.split, (thread / "net/unix").read_text().splitlines()):
            if row[3] == "00010000" and row[6] in inodes and row[-1].startswith("@"):
                names.add(row[-1][1:])
    return sorted(names)


def listening_addresses():
    """Return address and port of each TCP socket on which this process listens, as the kernel
    writes them.
    """
    inodes = owned_sockets("self")
    rows = [
        row.split()
        for file in ("tcp", "tcp6")
        for row in Path(f"/proc/self/net/{file}").read_text().splitlines()
    ]
    return {tuple(row[1].split(":")) for row in rows if row[3] == "0A" and row[9] in inodes}


@contextmanager
def controller(*arguments, command=(), program=("-m", CONTROLLER)):
    """Yield the lines that a controller prints at its start, the last one read."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        subprocess.Popen(
            [
                *command,
                sys.executable,
                *program,
                "controller",
                *arguments,
                str(listener.getsockname()[1]),
            ],
            cwd=ROOT,
            env=os.environ | {"A_TEST_TOKEN": "abc", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line, values = process.stdout.readline(), process.stdout.readline()
            yield line, json.loads(values)
        finally:
            process.stdin.close()
            process.wait(30)


def attack(pid):
    """Return what an attacker says who knows the sockets of the controller; another user if this
    one can become it.
    """
    user = NOBODY if os.geteuid() == 0 else os.geteuid()
    names = listening_names(pid)
    assert names
    return subprocess.run(
        [sys.executable, "-m", CONTROLLER, "attacker", str(user), *names],
        cwd=ROOT, check=True, capture_output=True, text=True, timeout=100,
    ).stdout.strip()  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize("unprivileged", [False, True])
def test_another_user_cannot_run_code_through_the_sockets_of_a_run(unprivileged):
    kind = {"command": UNPRIVILEGED, "program": ("-c", AS_A_PROGRAM)} if unprivileged else {}
    with controller("None", **kind) as (line, seen):
        assert line == "the actors have a network of their own (launch.isolate_network)\n"
        assert attack(seen["pid"]) == "refused"
    assert seen["user"] == (1234 if unprivileged else os.getuid())
    # The controller's own code has the network, its actors do not.
    assert (seen["connects"], seen["actor_connects"]) == (True, False)
    assert seen["secret"] is None


@pytest.mark.medium
def test_the_same_attack_succeeds_without_a_network_namespace():
    with controller("False") as (line, seen):
        assert line == "the actors use this machine's network: launch.isolate_network=False\n"
        assert attack(seen["pid"]) == str(os.getuid())


@pytest.fixture
def not_permitted(monkeypatch):
    monkeypatch.setattr(isolation, "is_client_started", lambda: False)
    monkeypatch.setattr(isolation, "_move_monarch", lambda: "the system does not permit it")
    monkeypatch.setattr(isolation, "_inside", None)


@pytest.mark.parametrize("users", [["alice", "bob"], []])
def test_a_run_that_others_can_reach_warns_if_there_are_other_users(
    users, not_permitted, monkeypatch, caplog
):
    monkeypatch.setattr(isolation, "_list_other_users", lambda: users)
    line = isolate(isolate_network=None)
    assert line == "the actors use this machine's network: the system does not permit it"
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == bool(users)
    assert all("can run code as you" in text and "alice, bob" in text for text in warnings)


WITHOUT_NAMESPACES = """
from pathlib import Path
from actors.config import LaunchConfig
from actors.launch.isolation import isolate
Path("/proc/sys/user/max_net_namespaces").write_text("0")
print(isolate(isolate_network=None))
"""


def test_a_run_starts_where_the_number_of_network_namespaces_is_limited_to_none():
    # The limit is that of the user namespace which `unshare` makes.
    run = subprocess.run(
        ["unshare", "--user", "--map-root-user", sys.executable, "-c", WITHOUT_NAMESPACES],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.stdout.startswith(
        "the actors use this machine's network: the system does not permit a network namespace ("
    ), run.stderr


def test_processes_of_other_users_are_found():
    user = NOBODY if os.geteuid() == 0 else None
    with subprocess.Popen(["sleep", "60"], user=user, group=user) as sleeper:
        try:
            uid = os.stat(f"/proc/{sleeper.pid}").st_uid
            name = pwd.getpwuid(uid).pw_name
            assert (name in isolation._list_other_users()) == (uid != os.getuid())
        finally:
            sleeper.kill()


def test_a_required_network_namespace_that_is_not_permitted_stops_the_start(not_permitted):
    with pytest.raises(
        ValueError, match=r"launch\.isolate_network=True: the system does not permit it"
    ):
        isolate(isolate_network=True)


def test_a_judge_in_reward_actors_keeps_the_network_and_its_key(not_permitted, monkeypatch):
    monkeypatch.setenv("MY_JUDGE_KEY", "abc")
    judge = Judge(base_url="http://127.0.0.1:1/v1", model="m", api_key_env="MY_JUDGE_KEY")
    rubric = Rubric(criteria=(Criterion(name="grade", function=judge),))
    assert (rubric.remote, rubric.key_variables) == (("grade",), {"MY_JUDGE_KEY"})
    line = isolate(isolate_network=None, needs_network="the judge")
    assert line.endswith("the judge needs it; reward.num_procs=0 keeps both")


@pytest.mark.parametrize(("options", "enters"), [([], True), (["--launch.hosts", "slurm"], False),
                                                 (["--launch.isolate_network=False"],
                                                     False)])  # fmt: skip
def test_a_program_prepares_its_namespace_before_it_has_threads(options, enters, monkeypatch):
    entered = []
    monkeypatch.setattr(cli, "enter_user_namespace", lambda: entered.append(True))
    monkeypatch.setattr(
        cli, "parse_cli", lambda *_, **__: pytest.exit("not reached") if entered else 1 / 0
    )
    with pytest.raises(BaseException) as raised:  # noqa: PT011  (what the parser raises)
        cli.main(options, default_module="m", default_config="c", prog="p")
    assert raised.errisinstance(pytest.exit.Exception if enters else ZeroDivisionError)


def write_thread(tasks, number, *, comm, state, cpu_ns):
    folder = tasks / str(number)
    folder.mkdir(exist_ok=True)
    for name, text in (
        ("comm", f"{comm}\n"),
        ("stat", f"{number} (a ) b) {state} 1 {'0 ' * 10}0 0 0"),
        ("schedstat", f"{cpu_ns} 0 1\n"),
    ):
        # At once, as the kernel writes: a reader must not find an empty file.
        written = tasks.parent / f"{tasks.name}-{name}"
        written.write_text(text)
        written.rename(folder / name)


def test_thread_that_has_not_named_itself_yet_is_waited_for(tmp_path):
    # On a busy machine a thread of Monarch stayed in the machine's network: its processes could not
    # reach the controller and waited for ever, and its sockets would have been open to others.
    write_thread(tmp_path, 1, comm="python", state="R", cpu_ns=10**9)
    write_thread(tmp_path, 2, comm="monarch-pytokio", state="S", cpu_ns=10**4)
    write_thread(tmp_path, 3, comm="python", state="R", cpu_ns=0)
    write_thread(tmp_path, 4, comm="python", state="S", cpu_ns=10**4)
    named = {"comm": "monarch-pytokio", "state": "S", "cpu_ns": 10**4}
    thread = Timer(0.05, lambda: write_thread(tmp_path, 3, **named))
    thread.start()
    assert sorted(list_monarch_threads(tmp_path)) == [2, 3]
    thread.join()


def test_thread_that_does_not_run_stops_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(compat, "NAMED_LIMIT_S", 0.05)
    write_thread(tmp_path, 3, comm="python", state="R", cpu_ns=0)
    (tmp_path / "3" / "schedstat").unlink()  # a kernel without the figure
    with pytest.raises(RunError, match="the machine is too busy to start a run"):
        list_monarch_threads(tmp_path)


def test_process_in_another_network_than_the_controller_ends():
    command = [sys.executable, "-P", "-m", "actors.launch.process_main"]
    environment = os.environ | {NETWORK: "net:[1]", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert re.search(r"is in the network net:\[\d+\], but must be in net:\[1\]", ended.stderr)


def test_actors_do_not_inherit_secrets(monkeypatch):
    secrets = {
        "A_API_KEY": "a1",
        "HF_TOKEN": "b2",
        "PGPASSWORD": "12345",
        "SMTP_PASS": "4711",
        "SSH_AUTH_SOCK": "/tmp/d4",
        "DB": "pg://u:p@h/x",
    }
    others = {
        "VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD": "1024",
        "TOKENIZERS_PARALLELISM": "false",
        "HTTPS_PROXY": "http://u:p@h:1",
        "A_PATH": "/x",
    }
    for name, value in {**secrets, **others}.items():
        monkeypatch.setenv(name, value)
    env = member.process_env(role="reward", threads=1, keep={"HF_TOKEN"})
    assert {name: env.get(name) for name in secrets} == dict.fromkeys(secrets, "") | {
        "HF_TOKEN": None
    }
    assert not others.keys() & env.keys()
    monkeypatch.setenv("A_API_KEY", env["A_API_KEY"])  # as in the actor's process
    forget_empty_secrets()
    assert "A_API_KEY" not in os.environ
    assert os.environ["HF_TOKEN"] == "b2"


def addresses_of_a_rank():
    connect(
        world=World.from_env(), device=torch.device("cpu"), comm=CommConfig(init_timeout_s=60.0)
    )
    dist.barrier()
    return listening_addresses(), World.from_env().master_port


def test_ranks_listen_on_the_master_address_only():
    (first, port), (second, _) = run_ranks(addresses_of_a_rank, 2, timeout_s=90)
    assert ("0100007F", f"{port:04X}") in first
    assert {address for address, _ in first | second} == {"0100007F"}


def test_vllm_ranks_listen_on_the_master_address_only():
    world = World(rank=0, size=2, master_port=free_port())
    with _serve_ranks_store(world):
        url = f"tcp://{world.master_addr}:{world.master_port}?own=0"
        ranks = rendezvous(url, rank=0, world_size=2, timeout=timedelta(seconds=20))
        store, *_ = next(ranks)
        store.set("a", "b")
        found = {
            address for address, port in listening_addresses() if port == f"{world.master_port:04X}"
        }
    assert found == {"0100007F"}


def test_monarchs_log_is_readable_for_its_user_only():
    suffix = uuid.uuid4().hex
    code = (
        "import rl.weights, monarch._rust_bindings as m; "
        "print(open('/proc/self/maps').read().count(m.__file__))"
    )
    try:
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            check=True,
            env=os.environ | {"MONARCH_LOG_SUFFIX": suffix},
        )
        (file,) = Path("/tmp").glob(f"*/monarch_log_{suffix}.log")
        assert oct(file.stat().st_mode & 0o777) == "0o600"
    finally:
        for file in Path("/tmp").glob(f"*/monarch_log_{suffix}.log"):
            file.unlink()


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_what_has_the_name_of_monarchs_log_is_left_alone_and_hangs_nothing(
    tmp_path, monkeypatch, kind
):
    log, mine = tmp_path / "monarch_log_s.log", tmp_path / "mine"
    mine.write_text("x")
    {"pipe": os.mkfifo, "link": lambda log: log.symlink_to(mine), "folder": os.mkdir}[kind](log)
    monkeypatch.setattr(weights, "_get_user", lambda: tmp_path)
    monkeypatch.setenv("MONARCH_FILE_LOG", "warn")
    monkeypatch.setenv("MONARCH_LOG_SUFFIX", "s")
    weights._make_log_private()
    assert (os.environ["MONARCH_FILE_LOG"], os.environ["MONARCH_LOG_SUFFIX"]) == ("warn", "s_2")
    assert oct((tmp_path / "monarch_log_s_2.log").stat().st_mode & 0o777) == "0o600"
    assert mine.stat().st_mode & 0o777 != 0o600
    assert mine.read_text() == "x"


def test_monarch_writes_only_errors_into_a_folder_where_others_may_write(tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    monkeypatch.setattr(weights, "_get_user", lambda: tmp_path)
    monkeypatch.setenv("MONARCH_FILE_LOG", "warn")
    monkeypatch.setenv("MONARCH_LOG_SUFFIX", "s")
    weights._make_log_private()
    assert (os.environ["MONARCH_FILE_LOG"], os.environ["MONARCH_LOG_SUFFIX"]) == ("warn", "s")
    names = {"s"}
    tmp_path.chmod(0o775)
    for _ in range(2):  # processes
        weights._make_log_private()
        assert os.environ.pop("MONARCH_FILE_LOG") == "error"
        names.add(os.environ["MONARCH_LOG_SUFFIX"])
    assert len(names) == 3  # nobody can put something there before
    tmp_path.chmod(0o755)
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    weights._make_log_private()
    assert os.environ["MONARCH_FILE_LOG"] == "error"
