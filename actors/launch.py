"""Where the processes of a run come from, and where they end.

    mesh = await spawn_role("trainer", num_procs=2, threads=1)
    await setup_process_group_env(mesh)
    trainer = mesh.spawn("trainer", PolicyTrainer, ...)
    ...
    await stop(mesh)

An entry hands its coroutine to `run`, which stops every role that is left, whether the
coroutine returned, raised, or was ended by Ctrl-C or SIGTERM. If the controller itself is
killed, the kernel kills the actor processes (Monarch sets their parent-death signal).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import HostMesh, MeshFailure, ProcMesh, this_host

from actors import hosts
from actors.background import end_background
from actors.calls import ActorCallError, ActorTimeoutError, lost_rank
from actors.client import RUN, RUN_VARIABLE, quiet_client_start, settle_monarch
from actors.ctrl_c import asking_at_ctrl_c
from actors.diagnosis import Watched, tell_what_run_does
from actors.launch_config import LaunchConfig
from actors.members import MEMBER_NAME, Member, import_torch, process_env, process_group_envs
from actors.placement import Placement
from actors.processes import (
    ProcessId,
    carrying_environment,
    identify,
    is_alive,
    kill,
    mapped_shared_memory,
    remove_unmapped,
    until_gone,
    with_descendants,
)
from rl.observability.span_file import TimelineConfig
from rl.stop_request import StopAskedError, StopRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")

SPAWN_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
KILL_GRACE_S = 60.0
"""For the kernel to end a killed process, which first frees its memory: a large one takes its time."""
LOST_STOP_TIMEOUT_S = 5.0
"""For Monarch to take note that a role has ended whose processes were killed."""
SIGTERM_EXIT_CODE = 128 + signal.SIGTERM


@dataclass(kw_only=True, slots=True, eq=False)
class _Role:
    name: str
    mesh: ProcMesh
    members: Any
    """Actor mesh of `Member`."""
    hostnames: list[str] = field(default_factory=list)
    """Of its processes, by rank."""
    local_processes: dict[int, ProcessId] = field(default_factory=dict)
    """Those on this host, by rank."""
    watched: Watched | None = None
    """As soon as it has its logs."""


_roles: list[_Role] = []
_num_stopping = 0


async def start_hosts(launch: LaunchConfig, placement: Placement) -> dict[str, HostMesh]:
    """The hosts of a run, by the name of their group; called before any role is spawned.

    Raises:
        ActorCallError: there are none to be had; carries what the scheduler said.
    """
    settle_monarch(_on_fault)
    return await hosts.start_hosts(launch, placement)


async def spawn_role(
    role: str,
    *,
    num_procs: int,
    env: Mapping[str, str] | None = None,
    threads: int = 1,
    gpus: Sequence[int] | None = None,
    host: HostMesh | None = None,
    python: str | None = None,
    timeout_s: float = SPAWN_TIMEOUT_S,
) -> ProcMesh:
    """Start the processes of one role and wait until all of them answer.

    Args:
        role: names the mesh, and is `RELAY_ROLE` in the environment of its processes.
        num_procs: processes per host.
        env: on top of this process's environment.
        threads: compute threads of each process (`OMP_NUM_THREADS`); uncapped, two roles on one
            machine slow each other down.
        gpus: the devices of the role, visible to all its processes; a process takes the one at
            its LOCAL_RANK. None leaves visibility as it is.
        host: one or more hosts; this machine when None.
        python: path of the Python there; this process's when None.

    Raises:
        ValueError: `num_procs` or `threads` is not positive, or there are fewer `gpus` than processes.
        ActorTimeoutError: names the role and how many processes were awaited.
        ActorCallError: a process did not come up; names the role.
    """
    if num_procs < 1 or threads < 1:
        raise ValueError(f"role {role!r}: num_procs={num_procs} and threads={threads} must be at least 1")
    if gpus is not None and len(gpus) < num_procs:
        raise ValueError(f"role {role!r}: gpus={list(gpus)} are fewer than num_procs={num_procs}")
    settle_monarch(_on_fault)
    with quiet_client_start():
        host = host or this_host()
    settled = process_env(role, threads, gpus) | dict(env or {})
    command = BootstrapCommand(python or sys.executable, None, ["-m", "actors.process_main"], settled)
    mesh = host.spawn_procs(
        per_host={"procs": num_procs}, name=role, bootstrap=import_torch, bootstrap_command=command
    )
    state = _Role(name=role, mesh=mesh, members=mesh.spawn(MEMBER_NAME, Member))
    _roles.append(state)
    infos = await _within(
        timeout_s, state.members.info.call(), f"starting role {role!r} ({num_procs} processes a host)"
    )
    by_rank = sorted((info for _, info in infos.items()), key=lambda info: info.rank)
    state.hostnames = [info.hostname for info in by_rank]
    local = ((info.rank, identify(info.pid)) for info in by_rank if info.hostname == socket.gethostname())
    state.local_processes = {rank: process for rank, process in local if process is not None}
    return mesh


def role_processes(role: str) -> list[ProcessId]:
    """The processes on this host of the role with this name."""
    return [p for state in _roles if state.name == role for p in state.local_processes.values()]


def local_processes(mesh: ProcMesh) -> Mapping[int, ProcessId]:
    """The role's processes on this host, by rank."""
    return dict(_role_of(mesh).local_processes)


def watched(mesh: ProcMesh) -> Watched | None:
    """The role's processes, to be asked what they do; None before `setup_logs`."""
    return _role_of(mesh).watched


async def setup_process_group_env(mesh: ProcMesh, *, timeout_s: float = SPAWN_TIMEOUT_S) -> None:
    """Give every process of the role what `torch.distributed.init_process_group` reads.

    Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT: the loopback
    address when all are on one host, else that of rank 0's host; the port is free there.

    Raises:
        ActorTimeoutError: names the role.
        ActorCallError: a process of it is dead; names the role.
    """
    role = _role_of(mesh)
    hostnames = role.hostnames
    first = role.members.slice(**dict.fromkeys(mesh._labels, 0))
    address, port = await _within(
        timeout_s,
        first.listen_address.call_one(len(set(hostnames)) == 1),
        f"finding a free port for role {role.name!r}",
    )
    envs = process_group_envs(hostnames, address=address, port=port)
    await _within(
        timeout_s, role.members.set_env.call(envs), f"setting the process group of role {role.name!r}"
    )


async def setup_logs(
    mesh: ProcMesh, *, folder: Path, console_level: str, timeline: TimelineConfig | None = None,
    timeout_s: float = SPAWN_TIMEOUT_S,
) -> None:  # fmt: skip
    """Log records of every process of the role go to `folder/<role>-<rank>.log`, and from
    `console_level` up to the console; what it does to the folders of `actors.watching.be_watched`.

    Raises:
        ActorTimeoutError: names the role.
        ActorCallError: a process of it is dead; names the role.
    """
    role = _role_of(mesh)
    settled = role.members.set_up_logs.call(role.name, folder, console_level, timeline)
    await _within(timeout_s, settled, f"setting up the logs of role {role.name!r}")
    role.watched = Watched(role=role.name, num_ranks=len(role.hostnames), logs=folder, members=role.members)


async def import_modules(
    mesh: ProcMesh, modules: Sequence[str], *, timeout_s: float = SPAWN_TIMEOUT_S
) -> None:
    """Every process of the role imports these, before an actor is spawned that needs them.

    It is quicker than when an actor does it: see `rl.interpreter`.

    Raises:
        ActorTimeoutError: names the role.
        ActorCallError: a process of it is dead; names the role.
    """
    role = _role_of(mesh)
    imported = role.members.import_modules.call(modules)
    await _within(timeout_s, imported, f"importing {', '.join(modules)} in role {role.name!r}")


async def move(
    mesh: ProcMesh, role: str, *, gpus: Sequence[int] | None = None, timeout_s: float = SPAWN_TIMEOUT_S
) -> None:
    """Make the processes of a role, in which there are no actors yet, those of another one.

    Args:
        gpus: as of `spawn_role`; no device may be in use there yet.

    Raises:
        ActorTimeoutError: names the role.
        ActorCallError: a process of it is dead; names the role.
    """
    state = _role_of(mesh)
    env = {"RELAY_ROLE": role}
    if gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    envs = [env] * len(state.hostnames)
    await _within(timeout_s, state.members.set_env.call(envs), f"making {state.name!r} role {role!r}")
    state.name = role


async def check_answers(role: str, *, timeout_s: float) -> None:
    """Whether every process of the role lives, on whatever host.

    Raises:
        ActorTimeoutError: names the role.
        ActorCallError: a process of it is dead; names the role.
    """
    for state in [state for state in _roles if state.name == role]:
        await _within(timeout_s, state.members.info.call(), f"asking role {role!r} whether it lives")


def is_running() -> bool:
    """Whether this process has roles that were not stopped."""
    return bool(_roles)


async def stop(mesh: ProcMesh, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """End every process of the role, what they started, and their shared memory; idempotent.

    Asks first; what is left on this host after `timeout_s` is killed.

    Raises:
        RunError: a process outlived SIGKILL (stuck in the kernel); names role and pids.
    """
    for role in [role for role in _roles if role.mesh is mesh]:
        await _end(role, timeout_s=timeout_s, first="ask")


async def stop_lost(role: str) -> None:
    """As `stop`, of a role that has lost a process, by its name: kills what is left of it on this host first.

    Idempotent; also of one that did not come up.
    """
    for state in [state for state in _roles if state.name == role]:
        await _end(state, timeout_s=LOST_STOP_TIMEOUT_S, first="kill")


async def _end(role: _Role, *, timeout_s: float, first: Literal["ask", "kill"]) -> None:
    global _num_stopping
    tree = with_descendants(filter(is_alive, role.local_processes.values()))
    shm_files = mapped_shared_memory(process.pid for process in tree)
    _num_stopping += 1
    try:
        if first == "kill":
            for process in tree:
                kill(process)
            if role.watched is not None:
                role.watched.forget()
        await _ask_to_stop(role, timeout_s, level=logging.WARNING if first == "ask" else logging.DEBUG)
    finally:
        # Also when cancelled: nothing below waits for anybody but the kernel.
        for process in tree:
            kill(process)
        _num_stopping -= 1
        if role in _roles:
            _roles.remove(role)
    await until_gone(tree, of=f"role {role.name!r}", grace_s=KILL_GRACE_S)
    for file in remove_unmapped(shm_files):
        logger.debug("removed shared memory %s that role %s left", file, role.name)


async def stop_all(*, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """`stop` for every role that is left, at once, and the end of the hosts and of every process left behind.

    Those may be children of a process that had died before, or a role that never came up. First of all
    what runs in the background ends: it would start again what is stopped here.
    """
    await end_background(timeout_s=timeout_s)
    results = await asyncio.gather(
        *(stop(role.mesh, timeout_s=timeout_s) for role in list(_roles)), return_exceptions=True
    )
    await hosts.end_hosts()
    strays = carrying_environment(RUN_VARIABLE, RUN)
    for process in strays:
        kill(process)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    await until_gone(strays, of="any role", grace_s=KILL_GRACE_S)


def run(main: Coroutine[Any, Any, T], *, stop: StopRequest | None = None) -> T:
    """Run a controller's coroutine; afterwards no process of its roles is left.

    Ctrl-C and SIGTERM cancel the coroutine, so that its `finally` blocks run. Where a loop hears `stop`, the
    first of them is a request to that, and only the next one cancels.

    Raises:
        KeyboardInterrupt: after Ctrl-C. A further one ends the clean-up as well.
        SystemExit: 143 after SIGTERM.
    """
    terminated = False

    async def supervised() -> T:
        task = asyncio.current_task()
        assert task is not None

        def on_sigterm() -> None:
            nonlocal terminated
            terminated = True
            if stop is None or not stop.ask():
                task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_sigterm)
        try:
            with contextlib.nullcontext() if stop is None else asking_at_ctrl_c(stop):
                return await main
        except Exception as error:
            await tell_what_run_does(error, [role.watched for role in _roles if role.watched])
            raise
        finally:
            await stop_all()

    try:
        return asyncio.run(supervised())
    except (asyncio.CancelledError, StopAskedError) as error:
        if terminated:
            raise SystemExit(SIGTERM_EXIT_CODE) from None
        if isinstance(error, StopAskedError):
            raise KeyboardInterrupt from None
        raise


def _role_of(mesh: ProcMesh) -> _Role:
    if (role := next((role for role in _roles if role.mesh is mesh), None)) is None:
        raise ValueError(f"mesh {mesh} is not a running role of spawn_role")
    return role


async def _within(deadline_s: float, awaitable: Awaitable[T], what: str) -> T:
    async def wait() -> T:
        return await awaitable

    try:
        return await asyncio.wait_for(wait(), deadline_s)
    except TimeoutError as error:
        raise ActorTimeoutError(f"{what}: no answer within {deadline_s:g} s") from error
    except SupervisionError as error:
        raise ActorCallError(f"{what}: {lost_rank(error)}") from error


async def _ask_to_stop(role: _Role, timeout_s: float, *, level: int) -> None:
    asked = _within(timeout_s, role.mesh.stop(), f"stopping role {role.name!r}")
    # What comes of it is a value here: a role that never came up raises once more what its start
    # raised, whatever that was, and the caller kills what is left of any role.
    answers = await asyncio.gather(asked, return_exceptions=True)
    if isinstance(answers[0], BaseException):
        logger.log(level, "role %s did not stop when asked: %s", role.name, answers[0])


def _on_fault(failure: MeshFailure) -> None:
    # Each process that ends fails these as well, beside the actors that somebody asked for.
    is_helper = failure.mesh_name.startswith(("setup-", "logger-", f"{MEMBER_NAME}-"))
    # Who waits for one of them says what becomes of the run.
    level = logging.DEBUG if is_helper or _num_stopping or not _roles else logging.INFO
    logger.log(level, "actor failure: %s", failure.report())
