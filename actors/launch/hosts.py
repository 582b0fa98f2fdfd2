"""Hosts of a run, from Monarch's jobs: simulated, by SLURM or by Kubernetes.

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

from actors.config import LaunchConfig
from actors.launch.calls import ActorCallError
from actors.launch.cleanup import RUN, RUN_VARIABLE, Guard, free_port, import_path
from actors.launch.compat import (
    hide_client_start,
    hide_job_logs,
    list_simulated_hosts,
    prepare_client_gateway,
)
from actors.launch.isolation import hide_secrets, run_inside
from actors.launch.placement import Placements
from rl.utils.extras import describe_install
from rl.utils.processes import ProcessId, identify, is_alive, kill
from rl.utils.threads import run_in_thread

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

_numbers = count(2)


@dataclass(kw_only=True, slots=True, eq=False)
class _Job:
    """Job of Monarch, and the guard that ends it should this process be killed."""

    name: str
    job: Any
    guard: Guard | None = None

    async def end(self) -> None:
        """End the job, or leave it to the guard, which tries again after this process."""
        try:
            await run_in_thread(self.job.kill, name="hosts", limit_s=END_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001  # A scheduler's client may raise anything.
            logger.warning("could not end %s: %s: %s", self.name, type(error).__name__, error)
        else:
            if self.guard is not None:
                self.guard.stop()


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
        self._replacing = asyncio.Lock()

    async def start(self) -> None:
        """Ask for the hosts and wait for them; `end` gives them back.

        Raises:
            ValueError: other hosts cannot reach this one.
            ActorCallError: no hosts are available; carries the scheduler's message.
        """
        groups = self._placements.count_hosts()
        if groups:
            check_reachable(self.launch, hostname=socket.gethostname())
            configure(**DEATH_NOTICE)
            await self._ask_for(groups, self.launch)

    def mark_failed(self, group: str) -> None:
        """Count the hosts of a group as lost, because a role did not start on them."""
        self._failed.add(group)

    async def replace_lost(self, group: str) -> None:
        """Replace the hosts of a group, if they are lost, by those of a new job."""
        # Another role on the same hosts may be lost as well, and must not replace the new hosts.
        async with self._replacing:
            processes = self.processes.get(group, ())
            if group not in self._failed and all(map(is_alive, processes)):
                return
            for process in processes:
                kill(process)

            # The old job ends with the last of its groups: other roles may run on its hosts.
            old_job = self._job_of_group.pop(group)
            if old_job not in self._job_of_group.values():
                await old_job.end()

            # The old job may still hold its name.
            name = f"{self.launch.job_name[:MAX_NAME]}x{next(_numbers)}"
            launch = replace(self.launch, job_name=name)
            await self._ask_for({group: self._placements.count_hosts()[group]}, launch)

    async def end(self) -> None:
        jobs = set(self._job_of_group.values())
        self._job_of_group.clear()
        for job in jobs:
            await job.end()

    async def _ask_for(self, groups: Mapping[str, int], launch: LaunchConfig) -> None:
        job = make_job(launch, self._placements, groups)
        logs = f" (logs in {launch.slurm.log_folder})" if launch.hosts == "slurm" else ""
        described = _Job(name=f"{launch.hosts} job {launch.job_name!r}{logs}", job=job)
        # Known before it exists, so that `end` ends it whatever happens from here on.
        self._job_of_group |= dict.fromkeys(groups, described)
        self._failed |= set(groups)
        logger.info("asking for %d hosts: %s", sum(groups.values()), described.name)
        try:
            async with asyncio.timeout(launch.start_timeout_s):
                await _apply(job)
                if launch.hosts == "process":
                    self._note_simulated(job, groups)
                described.guard = Guard(job.kill, name="hosts")
                # In a thread: a queue may take hours, and Ctrl-C must work meanwhile.
                prepare = partial(prepare_client_gateway, job)
                await run_in_thread(partial(run_inside, prepare), name="hosts")

            # Monarch's client starts below, and takes the address at which hosts answer it.
            if launch.on_cluster and launch.controller_address is not None:
                configure(default_transport=f"tcp://{launch.controller_address}:{free_port()}")
            with hide_client_start():
                state = run_inside(partial(job.state, cached_path=None))
        except TimeoutError as error:
            raise ActorCallError(
                f"no hosts from {described.name} within "
                f"launch.start_timeout_s={launch.start_timeout_s:g}"
                + (f": {error}" if str(error) else "")
            ) from error
        except Exception as error:  # A scheduler's client may raise anything.
            raise ActorCallError(
                f"no hosts from {described.name}: {type(error).__name__}: {error}"
            ) from error

        self._failed -= set(groups)
        for group in groups:
            name = group
            if launch.hosts == "kubernetes":
                name = _load_kubernetes().name_mesh(group, job_name=launch.job_name)
            self.meshes[group] = getattr(state, name)

    def _note_simulated(self, job: Any, groups: Mapping[str, int]) -> None:
        """Keep the processes that simulate hosts: their death shows at once, by their pids."""
        for group, num_hosts in groups.items():
            processes = map(identify, list_simulated_hosts(job, group, num_hosts))
            self.processes[group] = [process for process in processes if process is not None]


async def _apply(job: Any) -> None:
    """Create the job, in a thread; wait for the end of that even if cancelled."""
    applying = asyncio.ensure_future(run_in_thread(partial(run_inside, job.apply), name="hosts"))
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
    # The jobs are imported here: Monarch's come with a web server, which takes 0.25 s, and most
    # runs have no hosts of their own.
    if launch.hosts == "process":
        from monarch.job import ProcessJob

        hide_job_logs()
        env = hide_secrets(launch.keep_env) | {RUN_VARIABLE: RUN, "PYTHONPATH": import_path()}
        return ProcessJob(dict(groups), env=env)

    # Of all groups, so that a job that replaces a group asks for nodes like those of the first job.
    gpus_of = {}
    for group in placements.count_hosts():
        num_gpus = placements.count_gpus_of(group)
        # The option says what a host has; a role without devices takes none of them.
        if launch.gpus_per_host is not None and num_gpus:
            num_gpus = launch.gpus_per_host
        gpus_of[group] = num_gpus
    if launch.hosts == "kubernetes":
        return _load_kubernetes().make_job(
            launch.kubernetes,
            groups,
            gpus_of=gpus_of,
            job_name=launch.job_name,
            timeout_s=launch.start_timeout_s,
        )
    from actors.launch import slurm

    hide_job_logs()
    return slurm.make_job(
        launch.slurm,
        groups,
        gpus_of=gpus_of,
        job_name=launch.job_name,
        python=launch.python,
        timeout_s=launch.start_timeout_s,
    )


def _load_kubernetes() -> ModuleType:
    """Return `actors.launch.kubernetes`, whose package may be missing."""
    try:
        return importlib.import_module("actors.launch.kubernetes")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"launch.hosts='kubernetes' needs the package {error.name}: "
            f"{describe_install('kubernetes')}"
        ) from error


def check_reachable(launch: LaunchConfig, *, hostname: str) -> None:
    """Raise ValueError, naming the field, unless a cluster's hosts can reach this host."""
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
