"""Hosts of a run, taken from Monarch's jobs: simulated ones, `actors.slurm_job` or
`actors.kubernetes_job`.

hosts = Hosts(launch, placements)
await hosts.start()
processes = hosts.meshes["trainer"].spawn_procs(...)
...
await hosts.end()
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from types import ModuleType
from typing import Any

from monarch.actor import HostMesh
from monarch.config import configure
from monarch.job import ProcessJob

from actors import slurm_job
from actors.calls import ActorCallError
from actors.compat import (
    prepare_client_gateway,
    quiet_client_start,
    quiet_jobs,
    simulated_host_pids,
)
from actors.config import LaunchConfig
from actors.guard import Guard
from actors.isolation import inside
from actors.placement import Placements
from actors.processes import RUN, RUN_VARIABLE, free_port, import_path
from actors.secrets import without_secrets
from rl.utils.processes import ProcessId, identify, is_alive, kill
from rl.utils.threads import run_aside

logger = logging.getLogger(__name__)

DEATH_NOTICE = {
    "supervision_watchdog_timeout": "30s",
    "get_proc_state_max_idle": "15s",
    "get_actor_state_max_idle": "15s",
}
"""Silence after which Monarch takes a host's processes for dead. With Monarch's own 2 min, 1 min
and 30 s, the exit of a process on a simulated host was mostly reported after 224 s, with these
after 1 to 2 s."""
END_TIMEOUT_S = 60.0
"""Time for a scheduler to end a job; afterwards the job is left to the guard."""
MAX_NAME = 26
"""Characters of a job's name that a replacement job keeps before its number."""

quiet_jobs()
_numbers = count(2)


@dataclass(kw_only=True, slots=True, eq=False)
class _Job:
    name: str
    job: Any
    guard: Guard | None = None

    async def end(self) -> None:
        """End the job; one that cannot be ended is left to the guard, which tries again after this
        process.
        """
        try:
            await run_aside(self.job.kill, name="hosts", limit_s=END_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001  # a scheduler's client may raise anything
            logger.warning("could not end %s: %s: %s", self.name, type(error).__name__, error)
        else:
            if self.guard is not None:
                self.guard.dismiss()


class Hosts:
    """The hosts of a run in groups, each of which belongs to a job."""

    def __init__(self, launch: LaunchConfig, placements: Placements) -> None:
        self.launch = launch
        self._placements = placements
        self.meshes: dict[str, HostMesh] = {}
        """Hosts by the name of their group; empty if all roles run on this machine."""
        self.processes: dict[str, list[ProcessId]] = {}
        """Processes that simulate the hosts of a group on this machine."""
        self._job_of_group: dict[str, _Job] = {}
        self._failed: set[str] = set()
        """Groups on which a start has failed: on other machines nothing else shows their death."""
        self._renewing = asyncio.Lock()

    async def start(self) -> None:
        """Ask for the hosts and wait for them; `end` gives them back.

        Raises:
            ValueError: other hosts cannot reach this one.
            ActorCallError: no hosts are available; carries the scheduler's message.
        """
        if groups := self._placements.host_groups():
            check_reachable(self.launch, hostname=socket.gethostname())
            configure(**DEATH_NOTICE)
            await self._ask_for(groups, self.launch)

    def start_failed(self, group: str) -> None:
        self._failed.add(group)

    async def renew_lost(self, group: str) -> None:
        """Replace the hosts of a group by those of a new job if they are lost; the old hosts end
        with their job.
        """
        async with self._renewing:  # another role on the same hosts may be lost as well
            processes = self.processes.get(group, ())
            if group not in self._failed and all(map(is_alive, processes)):
                return
            for process in processes:
                kill(process)
            before = self._job_of_group.pop(group)
            if before not in self._job_of_group.values():
                await before.end()
            # The old job may still hold its name.
            named = replace(
                self.launch, job_name=f"{self.launch.job_name[:MAX_NAME]}x{next(_numbers)}"
            )
            await self._ask_for({group: self._placements.host_groups()[group]}, named)

    async def end(self) -> None:
        jobs = set(self._job_of_group.values())
        self._job_of_group.clear()
        for job in jobs:
            await job.end()

    async def _ask_for(self, groups: Mapping[str, int], launch: LaunchConfig) -> None:
        job = make_job(launch, self._placements, groups)
        logs = f" (logs in {launch.slurm.log_folder})" if launch.hosts == "slurm" else ""
        asked = _Job(name=f"{launch.hosts} job {launch.job_name!r}{logs}", job=job)
        self._job_of_group |= dict.fromkeys(groups, asked)
        self._failed |= set(groups)
        logger.info("asking for %d hosts: %s", sum(groups.values()), asked.name)
        try:
            async with asyncio.timeout(launch.start_timeout_s):
                await _applied(job)
                if isinstance(job, ProcessJob):
                    for group, num_hosts in groups.items():
                        pids = simulated_host_pids(job, group, num_hosts)
                        self.processes[group] = [
                            found for pid in pids if (found := identify(pid)) is not None
                        ]
                asked.guard = Guard(job.kill, name="hosts")
                # In a thread: a queue may take hours, and Ctrl-C must work meanwhile.
                await run_aside(partial(inside, partial(prepare_client_gateway, job)), name="hosts")
            if launch.on_cluster and launch.controller_address is not None:
                configure(default_transport=f"tcp://{launch.controller_address}:{free_port()}")
            with quiet_client_start():
                found_hosts = inside(partial(job.state, cached_path=None))
        except TimeoutError as error:
            raise ActorCallError(
                f"no hosts from {asked.name} within "
                f"launch.start_timeout_s={launch.start_timeout_s:g}"
                + (f": {error}" if str(error) else "")
            ) from error
        except Exception as error:  # a scheduler's client may raise anything
            raise ActorCallError(
                f"no hosts from {asked.name}: {type(error).__name__}: {error}"
            ) from error
        self._failed -= set(groups)
        for group in groups:
            name = _kubernetes().mesh_name(launch, group) if launch.hosts == "kubernetes" else group
            self.meshes[group] = getattr(found_hosts, name)


async def _applied(job: Any) -> None:
    applying = asyncio.ensure_future(run_aside(partial(inside, job.apply), name="hosts"))
    try:
        await asyncio.shield(applying)
    except asyncio.CancelledError:
        # Only a job that exists can be ended.
        await asyncio.wait({applying}, timeout=END_TIMEOUT_S)
        raise


def make_job(launch: LaunchConfig, placements: Placements, groups: Mapping[str, int]) -> Any:
    """Return Monarch's job for these groups of hosts; it is not yet applied.

    A job of a cluster changes how this process talks to actors (TCP), so make it before anything
    else of Monarch.
    """
    if launch.hosts == "process":
        env = without_secrets(launch.keep_env) | {RUN_VARIABLE: RUN, "PYTHONPATH": import_path()}
        return ProcessJob(dict(groups), env=env)
    gpus_of = {group: placements.gpus_of(group) for group in placements.host_groups()}
    if launch.gpus_per_host is not None:
        gpus_of = {group: launch.gpus_per_host if num else 0 for group, num in gpus_of.items()}
    if launch.hosts == "kubernetes":
        return _kubernetes().make_job(launch, groups, gpus_of=gpus_of)
    return slurm_job.make_job(launch, groups, gpus_of=gpus_of)


def _kubernetes() -> ModuleType:
    """Return `actors.kubernetes_job`, whose package may be missing."""
    try:
        return importlib.import_module("actors.kubernetes_job")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"launch.hosts='kubernetes' needs the package {error.name}: pip install "
            "'relay-rl[kubernetes]'"
        ) from error


def check_reachable(launch: LaunchConfig, *, hostname: str) -> None:
    """Raise ValueError, naming the field, unless a cluster's hosts can reach this one by its
    name.
    """
    if not launch.on_cluster or launch.controller_address is not None:
        return
    try:
        address = socket.gethostbyname(hostname)
    except OSError:
        address = "nothing"
    if address == "nothing" or address.startswith("127."):
        raise ValueError(
            f"launch.controller_address=None: this host's name {hostname!r} resolves to {address}, "
            f"where hosts of {launch.hosts} cannot reach it: give the address at which they can"
        )
