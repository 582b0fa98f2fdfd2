"""Starting a run's actors on meshes of their own, and ending them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from actors import launch
from actors.calls import ActorGroup, Group, Timeouts
from actors.generator import VLLMGenerator
from actors.launch_config import LaunchConfig
from actors.placement import Place, Placement, Processes, place, too_many_threads
from actors.reward import RewardActor
from actors.roles import LogSettings, Roles, num_gpus
from actors.sync_check import SyncCheck
from actors.trainer import PolicyTrainer
from actors.turns import Turns
from rl.models.spec import ModelSpec
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
    roles = Roles(
        launch=config.launch,
        timeouts=config.timeouts,
        hosts=await launch.start_hosts(config.launch, placement),
        logs=logs,
        store=store,
        model_spec=model_spec,
    )
    start = _Start(
        config=config,
        roles=roles,
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Start:
    """The start of each role, from its processes to an actor that is set up."""

    config: FleetConfig
    roles: Roles
    set_up_with: str | None
    """The folder that trainer and generators are set up with; None: not here."""

    async def trainer(self, at: Place, *, failure_folder: Path) -> ActorGroup:
        config = self.config.trainer
        group = await self.roles.trainer(
            at,
            config.owner,
            imports=("actors.trainer",),
            config=config,
            model_spec=self.roles.model_spec,
            failure_folder=str(failure_folder),
        )
        return await self._set_up(group)

    async def generator(self, at: Place) -> ActorGroup:
        return await self._set_up(await self.roles.generator(at, self.config.generator))

    async def reward(self, at: Place, *, rubric: Rubric) -> ActorGroup:
        mesh = await self.roles.mesh(at, imports=("actors.reward",))
        config = self.config.reward
        group = self.roles.group(at, mesh, mesh.spawn(at.role, config.owner, config=config, rubric=rubric))
        await group.call("setup", limit="setup_s")
        return group

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


def _warn_of_threads(config: FleetConfig, placement: Placement) -> None:
    if config.launch.on_cluster:
        return
    warning = too_many_threads(placement, num_cores=len(os.sched_getaffinity(0)))
    if warning is not None:
        logger.warning("%s", warning)
