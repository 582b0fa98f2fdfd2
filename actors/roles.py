"""Starting roles: their processes, what these import, and the actors in them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monarch.actor import Actor, HostMesh, ProcMesh

from actors import launch
from actors.calls import ActorGroup, Timeouts
from actors.generator import VLLMGenerator, generator_env
from actors.launch_config import LaunchConfig
from actors.placement import Place
from rl.models.spec import ModelSpec
from rl.observability.logs import QUIET_ENVIRONMENT
from rl.observability.span_file import TimelineConfig
from rl.weights.store import WeightStore


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSettings:
    """Where the actors' log records go, and what is kept of what they do."""

    folder: Path
    console_level: str
    timeline: TimelineConfig = field(default_factory=TimelineConfig)

    async def set_up(self, mesh: ProcMesh) -> None:
        """In every process of a role."""
        await launch.setup_logs(
            mesh, folder=self.folder, console_level=self.console_level, timeline=self.timeline
        )


@dataclass(kw_only=True, slots=True, eq=False)
class Roles:
    """From processes to actors, which are not set up yet. Made within the event loop."""

    launch: LaunchConfig
    timeouts: Timeouts
    hosts: dict[str, HostMesh]
    """By the name of their group."""
    logs: LogSettings
    store: WeightStore
    model_spec: ModelSpec
    store_started: asyncio.Event = field(default_factory=asyncio.Event)

    async def trainer(
        self, at: Place, actor: type[Actor], *, imports: Sequence[str], **arguments: Any
    ) -> ActorGroup:
        """The store starts in its processes; the actor gets it, and `arguments`."""
        mesh = await self.mesh(at, imports=imports)
        await launch.setup_process_group_env(mesh)
        await self.store.start(mesh)
        self.store_started.set()
        return self.group(at, mesh, mesh.spawn(at.role, actor, store=self.store, **arguments))

    async def generator(
        self, at: Place, config: VLLMGenerator.Config, *, mesh: ProcMesh | None = None
    ) -> ActorGroup:
        """After the trainer's processes; in `mesh`, which `spare` made and `move` moved, if given."""
        if mesh is None:
            mesh = await self.mesh(at, imports=self._engine_imports(), env=generator_env(config))
        await launch.setup_process_group_env(mesh)
        # An actor gets the store as it is when the actor is spawned. Where the trainer fails, so does
        # the whole start, and nothing waits here any more.
        await self.store_started.wait()
        actors = mesh.spawn(
            at.role, config.owner, config=config, model_spec=self.model_spec, store=self.store
        )
        return self.group(at, mesh, actors)

    async def spare(self, at: Place, config: VLLMGenerator.Config) -> ProcMesh:
        """Processes for a generator that is not there yet, and has the devices of no place."""
        return await self.mesh(at, imports=self._engine_imports(), env=generator_env(config))

    async def move(self, mesh: ProcMesh, at: Place) -> None:
        """Let what `spare` has made be the processes of this place."""
        await launch.move(mesh, at.role, gpus=at.gpus)
        await self.logs.set_up(mesh)

    async def mesh(
        self, at: Place, *, imports: Sequence[str], env: Mapping[str, str] | None = None
    ) -> ProcMesh:
        """The processes of one role, with their environment and their logs settled."""
        mesh = await launch.spawn_role(
            at.role,
            num_procs=at.procs_per_host,
            threads=at.threads,
            gpus=at.gpus,
            env=QUIET_ENVIRONMENT | dict(env or {}),
            host=None if at.hosts is None else self.hosts[at.hosts],
            python=None if at.hosts is None else self.launch.python,
        )
        await self.logs.set_up(mesh)
        await launch.import_modules(mesh, imports, timeout_s=self.timeouts.setup_s)
        return mesh

    def group(self, at: Place, mesh: ProcMesh, actors: Any) -> ActorGroup:
        """Whoever is in these processes."""
        return ActorGroup(
            name=at.role,
            mesh=actors,
            timeouts=self.timeouts,
            processes=launch.local_processes(mesh),
            watched=launch.watched(mesh),
        )

    def _engine_imports(self) -> tuple[str, ...]:
        """What a generator's processes import at once: it takes longer than all else of a start."""
        gpu = trains_on_gpu(self.launch, num_gpus=num_gpus())
        if gpu and self.model_spec.batch_invariant:
            # The engine makes a setting of its own before it imports vllm.
            return ("actors.generator",)
        return ("actors.generator", "actors.vllm.core")


def num_gpus() -> int:
    """GPUs of this machine."""
    import torch

    return torch.cuda.device_count()


def trains_on_gpu(launch_config: LaunchConfig, *, num_gpus: int) -> bool:
    """Whether the trainer's hosts have GPUs; `num_gpus` of this machine."""
    return launch_config.gpus_per_host != 0 if launch_config.on_cluster else num_gpus > 0
