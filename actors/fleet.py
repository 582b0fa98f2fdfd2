"""Starting a run's actors on meshes of their own, and ending them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from monarch.actor import HostMesh, ProcMesh

from actors import launch
from actors.calls import ActorGroup, Group, Timeouts
from actors.generator import VLLMGenerator, generator_env
from actors.launch_config import LaunchConfig
from actors.placement import Place, Placement, Processes, place, too_many_threads
from actors.reward import RewardActor
from actors.sync_check import SyncCheck
from actors.trainer import PolicyTrainer
from actors.turns import Turns
from rl.models.spec import ModelSpec
from rl.observability.logs import QUIET_ENVIRONMENT
from rl.rollouts.rubric import Rubric
from rl.weights.store import WeightStore

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class FleetConfig:
    """What the actors of a run are made of."""

    trainer: PolicyTrainer.Config
    generator: VLLMGenerator.Config
    reward: RewardActor.Config
    timeouts: Timeouts
    launch: LaunchConfig = field(default_factory=LaunchConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSettings:
    """Where the actors' log records go."""

    folder: Path
    console_level: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """The actors of a run, ready to be called."""

    trainer: Group
    generators: Sequence[Group]
    """One a replica."""
    reward: ActorGroup
    store: WeightStore
    check: SyncCheck
    """Of every pull."""


async def start_fleet(
    config: FleetConfig,
    *,
    store: WeightStore,
    check: SyncCheck,
    model_spec: ModelSpec,
    hf_assets_path: str,
    rubric: Rubric,
    failure_folder: Path,
    logs: LogSettings,
) -> Fleet:
    """Spawn every role and set the actors up, all at the same time.

    After an error, and after `close_fleet`, the processes are ended by `launch.run`.
    """
    placement = place_fleet(config, num_gpus=num_gpus())
    _warn_of_threads(config, placement)
    start = _Start(
        config=config,
        hosts=await launch.start_hosts(config.launch, placement),
        logs=logs,
        store=store,
        model_spec=model_spec,
        # Who shares a device is set up by turns, when all processes are there.
        set_up_with=None if config.launch.share_gpus else hf_assets_path,
    )
    # No role waits for another's set-up: the start takes as long as the slowest alone.
    trainer, reward, *generators = await asyncio.gather(
        start.trainer(placement.trainer, failure_folder=failure_folder),
        start.reward(placement.reward, rubric=rubric),
        *map(start.generator, placement.generators),
    )
    fleet = Fleet(trainer=trainer, generators=tuple(generators), reward=reward, store=store, check=check)
    if config.launch.share_gpus:
        return await _set_up_in_turns(config, fleet, hf_assets_path)
    return fleet


@dataclass(kw_only=True, slots=True, eq=False)
class _Start:
    """The start of each role, from its processes to an actor that is set up. Made within the event loop."""

    config: FleetConfig
    hosts: Mapping[str, HostMesh]
    logs: LogSettings
    store: WeightStore
    model_spec: ModelSpec
    set_up_with: str | None
    """The folder that trainer and generators are set up with; None: not here."""
    store_started: asyncio.Event = field(default_factory=asyncio.Event)

    async def trainer(self, at: Place, *, failure_folder: Path) -> ActorGroup:
        mesh = await self._mesh(at, imports=("actors.trainer",))
        await launch.setup_process_group_env(mesh)
        await self.store.start(mesh)
        self.store_started.set()
        actors = mesh.spawn(
            at.role,
            self.config.trainer.owner,
            config=self.config.trainer,
            model_spec=self.model_spec,
            store=self.store,
            failure_folder=str(failure_folder),
        )
        return await self._set_up(self._group(at, mesh, actors))

    async def generator(self, at: Place) -> ActorGroup:
        config = self.config.generator
        mesh = await self._mesh(at, imports=self._engine_imports(), env=generator_env(config))
        await launch.setup_process_group_env(mesh)
        # An actor gets the store as it is when the actor is spawned. Where the trainer fails, so does
        # the whole start, and nothing waits here any more.
        await self.store_started.wait()
        actors = mesh.spawn(
            at.role, config.owner, config=config, model_spec=self.model_spec, store=self.store
        )
        return await self._set_up(self._group(at, mesh, actors))

    async def reward(self, at: Place, *, rubric: Rubric) -> ActorGroup:
        mesh = await self._mesh(at, imports=("actors.reward",))
        config = self.config.reward
        group = self._group(at, mesh, mesh.spawn(at.role, config.owner, config=config, rubric=rubric))
        await group.call("setup", limit="setup_s")
        return group

    async def _mesh(
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
            python=None if at.hosts is None else self.config.launch.python,
        )
        await launch.setup_logs(mesh, folder=self.logs.folder, console_level=self.logs.console_level)
        await launch.import_modules(mesh, imports, timeout_s=self.config.timeouts.setup_s)
        return mesh

    def _engine_imports(self) -> tuple[str, ...]:
        """What a generator's processes import at once: it takes longer than all else of a start."""
        gpu = trains_on_gpu(self.config.launch, num_gpus=num_gpus())
        if gpu and self.model_spec.batch_invariant:
            # The engine makes a setting of its own before it imports vllm.
            return ("actors.generator",)
        return ("actors.generator", "actors.vllm.core")

    def _group(self, at: Place, mesh: ProcMesh, actors: Any) -> ActorGroup:
        processes = launch.local_processes(mesh)
        return ActorGroup(name=at.role, mesh=actors, timeouts=self.config.timeouts, processes=processes)

    async def _set_up(self, group: ActorGroup) -> ActorGroup:
        if self.set_up_with is not None:
            await group.call("setup", self.set_up_with, limit="setup_s")
        return group


async def _set_up_in_turns(config: FleetConfig, fleet: Fleet, hf_assets_path: str) -> Fleet:
    """Trainer and generators that share devices, each set up while the other holds nothing."""
    trainer, generators = fleet.trainer, fleet.generators
    await trainer.call("check_sharing", config.generator.gpu_memory_utilization, limit="setup_s")
    await trainer.call("setup", hf_assets_path, limit="setup_s")
    await trainer.call("sleep", limit="setup_s")
    for call in (("setup", hf_assets_path), ("sleep",)):
        await asyncio.gather(*(generator.call(*call, limit="setup_s") for generator in generators))
    await trainer.call("wake", limit="setup_s")
    turns = Turns(trainer=trainer, generators=generators, check=fleet.check)
    return replace(fleet, trainer=turns.trainer, generators=turns.generators)


async def close_fleet(fleet: Fleet) -> None:
    """A clean end: process groups left, engine and workers ended, the stored weights freed.

    What fails here is logged: the run's results are complete.
    """
    groups = (fleet.trainer, *fleet.generators, fleet.reward)
    ends = [*(group.call("close", limit="close_s") for group in groups), fleet.store.stop()]
    for problem in await asyncio.gather(*ends, return_exceptions=True):
        if isinstance(problem, Exception):
            logger.warning("not a clean end, its processes are killed: %s", problem)


def place_fleet(config: FleetConfig, *, num_gpus: int) -> Placement:
    """Where every role of the fleet runs; `num_gpus` of this machine.

    Raises:
        ValueError: names the fields that do not fit together, what is needed and what there is.
    """
    config.launch.check()
    processes = Processes(
        trainer=config.trainer.num_procs,
        trainer_threads=config.trainer.num_threads,
        num_replicas=config.generator.num_replicas,
        tensor_parallel_degree=config.generator.tensor_parallel_degree,
        generator_threads=config.generator.num_threads,
        reward=config.reward.num_procs,
    )
    return place(config.launch, processes, num_gpus=num_gpus)


def num_gpus() -> int:
    """GPUs of this machine."""
    import torch

    return torch.cuda.device_count()


def trains_on_gpu(launch_config: LaunchConfig, *, num_gpus: int) -> bool:
    """Whether the trainer's hosts have GPUs; `num_gpus` of this machine."""
    return launch_config.gpus_per_host != 0 if launch_config.on_cluster else num_gpus > 0


def _warn_of_threads(config: FleetConfig, placement: Placement) -> None:
    if config.launch.on_cluster:
        return
    warning = too_many_threads(placement, num_cores=len(os.sched_getaffinity(0)))
    if warning is not None:
        logger.warning("%s", warning)
