"""Processes of a role, and the actor in each of them that sets up its environment."""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monarch.actor import (
    Actor,
    HostMesh,
    ProcMesh,
    concurrent_endpoint,
    current_rank,
    default_bootstrap_cmd,
    endpoint,
)
from monarch.config import configure

from actors.launch.cleanup import (
    RUN,
    RUN_VARIABLE,
    find_own_address,
    free_port,
    import_path,
)
from actors.launch.isolation import forget_empty_secrets, hide_secrets
from rl.observability.logs import setup_logging
from rl.observability.spans import RECORDER, STATE_FOLDER, TimelineConfig, read_state
from rl.observability.stacks import request_stacks, write_stacks_to
from rl.utils.processes import ROLE_VARIABLE, ProcessId, disable_collections
from rl.weights import SETTINGS

logger = logging.getLogger(__name__)

MEMBER_NAME = "relay_member"
MONARCH_EXTRA_S = 30.0
"""Time by which Monarch's limits of a start exceed relay's."""
HOOK_VARIABLE = "RELAY_HOOK"
"""Environment variable that names a module whose `arm(logs)` every process of a run calls: the
chaos test's.
"""
SPIN_COUNT = 2_000
"""How often an idle thread of OpenMP's pool looks for work before it sleeps (`GOMP_SPINCOUNT`).

Where other processes compute too, a thread that spins keeps the core from the thread that it waits
for: beside two busy processes on two cores a step of `tiny` took 9 times as long as alone with
libgomp's own 300,000, and takes about 3 times (`benchmarks.busy`). With 200, small kernels took
twice as long on a calm machine; with 1,000 they did not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSettings:
    """Settings of the actors' log records and spans."""

    folder: Path
    console_level: str
    timeline: TimelineConfig = field(default_factory=TimelineConfig)


def record_process(
    logs: Path, *, role: str, rank: int, timeline: TimelineConfig | None = None
) -> None:
    """Record the spans of this process in the run's logs, and write its stacks there on request."""
    try:
        # Stacks before the state file, which tells other processes that they may request stacks.
        write_stacks_to(logs, role=role, rank=rank)
        RECORDER.start(logs, role=role, rank=rank, timeline=timeline or TimelineConfig())
    except OSError as error:  # A full disk does not end a run.
        logger.warning("%s: %s-%d is not recorded: %s", logs, role, rank, error.strerror or error)
    if HOOK_VARIABLE in os.environ:
        importlib.import_module(os.environ[HOOK_VARIABLE]).arm(logs)


class Member(Actor):
    """Per-process helper actor of launch."""

    @endpoint
    async def set_up(
        self, role: str, logs: LogSettings | None, env: Mapping[str, str]
    ) -> tuple[int, str]:
        """Return the process's pid and hostname.

        `env` holds the variables with which the process was started, or should have been.
        """
        os.environ.update(env)
        forget_empty_secrets()
        rank = current_rank().rank
        if logs is not None:
            setup_logging(role, rank=rank, folder=logs.folder, console_level=logs.console_level)
            record_process(logs.folder, role=role, rank=rank, timeline=logs.timeline)
            self._state = logs.folder / STATE_FOLDER / f"{role}-{rank}.json"
        return os.getpid(), socket.gethostname()

    @endpoint
    async def listen_address(self, one_host: bool) -> tuple[str, int]:
        """Return an address and a free port at which the role's processes reach this one."""
        return "127.0.0.1" if one_host else find_own_address(), free_port()

    @concurrent_endpoint
    async def check(self) -> None:
        """Show that the process is alive."""

    @concurrent_endpoint
    async def stacks(self) -> str:
        """Return this process's stacks to a caller on another host; there must be logs."""
        return await request_stacks(read_state(self._state), self._state.parent.parent)

    @endpoint
    async def import_modules(self, modules: Sequence[str]) -> None:
        # A failing import fails again, with its message, in the actor that needs the module.
        with disable_collections(), contextlib.suppress(Exception):
            for module in modules:
                importlib.import_module(module)

    @endpoint
    async def set_env(self, env_of_rank: Sequence[Mapping[str, str]]) -> None:
        os.environ.update(env_of_rank[current_rank().rank])


@dataclass(kw_only=True, slots=True, eq=False)
class RoleProcesses:
    """Processes of one role: Monarch's mesh, the actor in each process, and what is known of them.

    Example:
        A trainer of two ranks on this host has name="trainer", hostnames=["node7", "node7"] and
        local={0: ProcessId(...), 1: ProcessId(...)}; on other hosts `local` is empty.
    """

    name: str
    mesh: ProcMesh
    members: Any
    """Actor mesh of `Member`."""
    logs: Path | None = None
    """Folder of the logs, with the processes' states and stacks; None if the processes have none.
    """
    hostnames: list[str] = field(default_factory=list)
    """Host of each process, by rank."""
    local: dict[int, ProcessId] = field(default_factory=dict)
    """Processes on this host, by rank."""
    is_lost: bool = False
    """True if a process ended before all had answered."""

    def remove_state_files(self) -> None:
        """Remove the state files of processes that relay has killed."""
        if self.logs is None:
            return
        # The doctor reports a state file without its process as a death.
        for file in (self.logs / STATE_FOLDER).glob(f"{self.name}-*"):
            file.unlink(missing_ok=True)


def process_group_envs(
    hostnames: Sequence[str], *, address: str, port: int
) -> list[dict[str, str]]:
    """Return, for each rank, the variables of `torch.distributed.init_process_group`."""
    envs = []
    for rank, hostname in enumerate(hostnames):
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(hostnames)),
            "LOCAL_RANK": str(hostnames[:rank].count(hostname)),
            "LOCAL_WORLD_SIZE": str(hostnames.count(hostname)),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        envs.append(env)
    return envs


def import_torch() -> None:
    """Import torch before there are actors: Monarch unpickles on several threads, which would race.

    This does not belong into `process_main`: Monarch gives up on a process that does not answer
    within about 20 s, whatever `allow_start` says, and then a start waits for ever. On a busy
    machine or a network file system the import alone may take half a minute.
    """
    with disable_collections():
        import torch  # noqa: F401


def process_env(
    *, role: str, threads: int, gpus: Sequence[int] | None = None, keep: Collection[str] = ()
) -> dict[str, str]:
    """Return the variables of a role's processes on top of their host's environment.

    Of secrets the processes get only `keep`.
    """
    env = hide_secrets(keep) | {
        ROLE_VARIABLE: role,
        RUN_VARIABLE: RUN,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": import_path(),
        # glibc keeps freed memory for all threads together (`rl.utils.processes`).
        "MALLOC_ARENA_MAX": "1",
    }
    # A user who has chosen how OpenMP's threads wait keeps that.
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        env["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    # `rl.weights` has set these in this process only; other hosts lack them.
    env |= {name: os.environ[name] for name in SETTINGS}
    if gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    return env


def spawn_processes(
    host: HostMesh,
    *,
    role: str,
    env: Mapping[str, str],
    bootstrap: Callable[[], None] | None = None,
    procs_per_host: int = 1,
    python: str | None = None,
) -> RoleProcesses:
    """Have the processes of a role started; nothing is waited for.

    Args:
        env: variables on top of the hosts' environment.
        bootstrap: called in each process before there are actors; may take as long as it needs.
        python: interpreter on the hosts; None is this process's.
    """
    # The processes of a host are started by Monarch's agent there, with this command.
    command = default_bootstrap_cmd().with_env(env)
    command.program = python or sys.executable
    # `-P`: modules are found in the order of the controller, not in the current folder first.
    command.args = ["-P", "-m", "actors.launch.process_main"]
    mesh = host.spawn_procs(
        per_host={"procs": procs_per_host},
        name=role,
        bootstrap=bootstrap,
        bootstrap_command=command,
    )
    return RoleProcesses(name=role, mesh=mesh, members=mesh.spawn(MEMBER_NAME, Member))


def allow_start(timeout_s: float) -> None:
    """Let processes and actors start for this long, whatever Monarch's own limits are."""
    # Monarch's limits, 30 s each, end a start from a cold disk. Monarch waits longer than relay, as
    # its clock starts earlier and its error looks like the loss of a process.
    limit = f"{math.ceil(timeout_s + MONARCH_EXTRA_S)}s"
    configure(
        host_spawn_ready_timeout=limit, mesh_proc_spawn_max_idle=limit, actor_spawn_max_idle=limit
    )
