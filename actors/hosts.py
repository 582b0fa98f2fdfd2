"""The hosts of a run: taken from Monarch's jobs, handed to roles by the name of their group, and ended.

hosts = await start_hosts(launch, placement)
mesh = await spawn_role("trainer", ..., host=hosts["trainer"])
...
await end_hosts()
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from types import ModuleType
from typing import Any

from monarch.actor import HostMesh
from monarch.config import configure, configured
from monarch.job import ProcessJob

from actors.calls import ActorCallError
from actors.client import RUN, RUN_VARIABLE, quiet_client_start, quiet_jobs
from actors.guard import Guard
from actors.launch_config import LaunchConfig
from actors.members import free_port, import_path
from actors.placement import Placement
from actors.processes import ProcessId, identify, is_alive, kill
from rl.worker_thread import run_aside

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True, eq=False)
class _Job:
    what: str
    job: Any
    groups: Mapping[str, int]
    """Its hosts, by the name of their group."""
    guard: Guard | None = None
    processes: dict[str, list[ProcessId | None]] = field(default_factory=dict)
    """Of hosts that are simulated here, by their group; None has ended at once."""
    replaced: set[str] = field(default_factory=set)
    """Groups that a later job has."""


DEATH_NOTICE = {
    "supervision_watchdog_timeout": "30s",
    "get_proc_state_max_idle": "15s",
    "get_actor_state_max_idle": "15s",
}
"""How long Monarch waits for a host that says nothing, before what runs there counts as dead. With its own
2 min, 1 min and 30 s, a process that exited on a simulated host was reported after 224 s in two of three
runs, with these after 1 to 2 s in six of six (2026-11-21, 2 cores of an AMD EPYC)."""

END_TIMEOUT_S = 60.0
"""For a scheduler to end a job; what takes longer is left to the guard."""

MAX_NAME = 26
"""Letters of a job's name that a later job's keeps, before its number."""

quiet_jobs()
_jobs: list[_Job] = []
_numbers = count(2)


async def start_hosts(launch: LaunchConfig, placement: Placement) -> dict[str, HostMesh]:
    """Ask for the hosts and wait until they are there; by the name of their group.

    Empty where all roles run on this machine. `end_hosts` gives them back.

    Raises:
        ValueError: no other host reaches this one.
        ActorCallError: there are none to be had; carries what the scheduler said.
    """
    groups = placement.host_groups()
    if not groups:
        return {}
    hostname = socket.gethostname()
    check_reachable(launch, hostname=hostname, address=_resolve(hostname))
    configure(**DEATH_NOTICE)
    return await _ask_for(launch, groups, make_job(launch, placement, groups))


def are_lost(group: str) -> bool:
    """Whether a host of the group is dead; of hosts that are simulated on this machine."""
    processes = _job_of(group).processes.get(group)
    # There are none of a job that did not come up.
    return not processes or any(process is None or not is_alive(process) for process in processes)


def processes_of(group: str) -> list[ProcessId]:
    """Those that simulate the group's hosts on this machine."""
    return [process for process in _job_of(group).processes.get(group, ()) if process is not None]


async def renew_hosts(launch: LaunchConfig, placement: Placement, group: str) -> HostMesh:
    """Other hosts for this group, from a job of their own; those before end with their job, if not now.

    Raises:
        ActorCallError: there are none to be had; carries what the scheduler said.
    """
    before = _job_of(group)
    for process in processes_of(group):
        kill(process)
    before.replaced.add(group)
    if before.replaced == before.groups.keys():
        _jobs.remove(before)
        await _end(before)
    # A name of its own: of the job before there may be something left.
    named = replace(launch, job_name=f"{launch.job_name[:MAX_NAME]}x{next(_numbers)}")
    groups = {group: placement.host_groups()[group]}
    (renewed,) = (await _ask_for(named, groups, make_job(named, placement, groups))).values()
    return renewed


def _job_of(group: str) -> _Job:
    return next(state for state in _jobs if group in state.groups and group not in state.replaced)


async def _ask_for(launch: LaunchConfig, groups: Mapping[str, int], job: Any) -> dict[str, HostMesh]:
    state = _Job(what=f"{launch.hosts} job {launch.job_name!r}", job=job, groups=groups)
    _jobs.append(state)
    logger.info("asking for %d hosts: %s", sum(groups.values()), state.what)
    try:
        async with asyncio.timeout(launch.start_timeout_s):
            await _applied(state.job)
            if isinstance(job, ProcessJob):
                hosts_of = {group: [f"{group}_{i}" for i in range(num)] for group, num in groups.items()}
                state.processes = {
                    group: [identify(job._host_to_pid[host].pid) for host in names]
                    for group, names in hosts_of.items()
                }
            state.guard = Guard(job=state.job, run=RUN, run_variable=RUN_VARIABLE, import_path=import_path())
            # In a thread: a queue may take hours, in which Ctrl-C has to be heard.
            await run_aside(state.job._prepare_client_gateway, name="hosts")
        if launch.on_cluster and launch.controller_address is not None:
            configure(default_transport=f"tcp://{launch.controller_address}:{free_port()}")
        with quiet_client_start():
            found = state.job.state(cached_path=None)
    except TimeoutError as error:
        raise ActorCallError(
            f"no hosts from {state.what} within launch.start_timeout_s={launch.start_timeout_s:g}"
            + (f": {error}" if str(error) else "")
        ) from error
    except Exception as error:  # a scheduler's client raises whatever it likes
        raise ActorCallError(f"no hosts from {state.what}: {type(error).__name__}: {error}") from error
    return {group: getattr(found, name) for group, name in _mesh_names(launch, groups).items()}


async def end_hosts() -> None:
    """End every job of this process; idempotent.

    What fails is logged, and left to the guard, which tries once more when this process ends.
    """
    while _jobs:
        await _end(_jobs.pop())


async def _end(state: _Job) -> None:
    try:
        await run_aside(state.job.kill, name="hosts", limit_s=END_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001  # a scheduler's client raises whatever it likes
        logger.warning("could not end %s: %s: %s", state.what, type(error).__name__, error)
        return
    if state.guard is not None:
        state.guard.dismiss()


async def _applied(job: Any) -> None:
    applying = asyncio.ensure_future(run_aside(job.apply, name="hosts"))
    try:
        await asyncio.shield(applying)
    except asyncio.CancelledError:
        # Only what is there can be ended.
        await asyncio.wait({applying}, timeout=END_TIMEOUT_S)
        raise


def make_job(launch: LaunchConfig, placement: Placement, groups: Mapping[str, int] | None = None) -> Any:
    """Monarch's job for these groups of hosts, for all when None; not yet applied."""
    groups = placement.host_groups() if groups is None else groups
    if launch.hosts == "process":
        return ProcessJob(dict(groups), env={RUN_VARIABLE: RUN, "PYTHONPATH": import_path()})
    gpus_of = gpus_of_groups(launch, placement)
    if launch.hosts == "slurm":
        from actors.jobs import slurm

        return slurm.make_job(launch, groups, gpus_per_host=max(gpus_of.values()))
    return _kubernetes().make_job(launch, groups, gpus_of=gpus_of)


def describe(launch: LaunchConfig, placement: Placement) -> str:
    """Which process goes where, as comments, and what would be submitted."""
    lines = [f"# {place.describe()}" for place in placement.all]
    groups, gpus_of = placement.host_groups(), gpus_of_groups(launch, placement)
    with configured():  # to make a job changes the process's transport
        if launch.hosts == "slurm":
            from actors.jobs import slurm

            lines = ["#!/bin/bash", *lines]
            script = slurm.script(launch, groups, gpus_per_host=max(gpus_of.values()))
            lines.append(script.removeprefix("#!/bin/bash\n"))
        elif launch.hosts == "kubernetes":
            lines.append(_kubernetes().manifests(launch, groups, gpus_of=gpus_of))
    return "\n".join(lines)


def gpus_of_groups(launch: LaunchConfig, placement: Placement) -> dict[str, int]:
    """Devices to ask for on each host of a group."""
    needed = {group: placement.gpus_of(group) for group in placement.host_groups()}
    if launch.gpus_per_host is None:
        return needed
    return {group: launch.gpus_per_host if num else 0 for group, num in needed.items()}


def check_reachable(launch: LaunchConfig, *, hostname: str, address: str | None) -> None:
    """Of a cluster's hosts: whether they reach this one, whose name resolves to `address`.

    Raises:
        ValueError: names the field.
    """
    if not launch.on_cluster or launch.controller_address is not None:
        return
    if address is None or address.startswith("127."):
        raise ValueError(
            f"launch.controller_address=None: this host's name {hostname!r} resolves to "
            f"{address or 'nothing'}, where hosts of {launch.hosts} cannot reach it: give the address at "
            "which they can"
        )


def _resolve(hostname: str) -> str | None:
    try:
        return socket.gethostbyname(hostname)
    except OSError:
        return None


def _mesh_names(launch: LaunchConfig, groups: Mapping[str, int]) -> dict[str, str]:
    """What Monarch calls each group."""
    if launch.hosts != "kubernetes":
        return {group: group for group in groups}
    return {group: _kubernetes().mesh_name(launch, group) for group in groups}


def _kubernetes() -> ModuleType:
    try:
        from actors.jobs import kubernetes
    except ModuleNotFoundError as error:
        raise ValueError(
            f"launch.hosts='kubernetes' needs the package {error.name}: pip install 'relay-rl[kubernetes]'"
        ) from error
    return kubernetes
