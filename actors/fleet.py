"""Starting a run's actors on meshes of their own, and ending them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from monarch.actor import ProcMesh

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
    meshes = await _spawn_meshes(config, placement, logs)
    await store.start(meshes[placement.trainer.role])

    def group(role: str, actor: type, **arguments: Any) -> ActorGroup:
        spawned = meshes[role].spawn(role, actor, **arguments)
        processes = launch.local_processes(meshes[role])
        return ActorGroup(name=role, mesh=spawned, timeouts=config.timeouts, processes=processes)

    fleet = Fleet(
        trainer=group(
            placement.trainer.role,
            config.trainer.owner,
            config=config.trainer,
            model_spec=model_spec,
            store=store,
            failure_folder=str(failure_folder),
        ),
        generators=tuple(
            group(
                replica.role,
                config.generator.owner,
                config=config.generator,
                model_spec=model_spec,
                store=store,
            )
            for replica in placement.generators
        ),
        reward=group(placement.reward.role, config.reward.owner, config=config.reward, rubric=rubric),
        store=store,
        check=check,
    )
    if config.launch.share_gpus:
        return await _set_up_in_turns(config, fleet, hf_assets_path)
    groups = (fleet.trainer, *fleet.generators)
    await asyncio.gather(
        fleet.reward.call("setup", limit="setup_s"),
        *(group.call("setup", hf_assets_path, limit="setup_s") for group in groups),
    )
    return fleet


async def _set_up_in_turns(config: FleetConfig, fleet: Fleet, hf_assets_path: str) -> Fleet:
    """Trainer and generators that share devices, each set up while the other holds nothing."""
    trainer, generators = fleet.trainer, fleet.generators
    await fleet.reward.call("setup", limit="setup_s")
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


async def _spawn_meshes(config: FleetConfig, placement: Placement, logs: LogSettings) -> dict[str, ProcMesh]:
    """A process mesh for each role, by its name, with its environment and its logs settled."""
    hosts = await launch.start_hosts(config.launch, placement)

    async def spawn(at: Place, env: dict[str, str]) -> ProcMesh:
        mesh = await launch.spawn_role(
            at.role,
            num_procs=at.procs_per_host,
            threads=at.threads,
            gpus=at.gpus,
            env=QUIET_ENVIRONMENT | env,
            host=None if at.hosts is None else hosts[at.hosts],
            python=None if at.hosts is None else config.launch.python,
        )
        await launch.setup_logs(mesh, folder=logs.folder, console_level=logs.console_level)
        if at is not placement.reward:
            await launch.setup_process_group_env(mesh)
        return mesh

    of_generator = generator_env(config.generator)
    meshes = await asyncio.gather(
        *(spawn(at, of_generator if at in placement.generators else {}) for at in placement.all)
    )
    return {at.role: mesh for at, mesh in zip(placement.all, meshes, strict=True)}


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
