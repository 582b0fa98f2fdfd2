"""Starting a run's actors on meshes of their own, and ending them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from actors import launch
from actors.calls import ActorGroup, Group
from actors.fleet_config import FleetConfig
from actors.placement import Placement, Processes, place, too_many_threads
from actors.pool import GeneratorPool
from actors.replaceable import Replaceable
from actors.roles import LogSettings, Roles, num_gpus
from actors.spares import Spares
from actors.starter import Starter
from actors.supervision import AddEvent, Supervisor, no_event
from actors.sync_check import SyncCheck
from actors.turns import Turns
from rl.models.spec import ModelSpec
from rl.rollouts.rubric import Rubric
from rl.weights.store import WeightStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """The actors of a run, ready to be called."""

    trainer: Group
    generators: Sequence[Group]
    """One a replica."""
    reward: Replaceable
    store: WeightStore
    check: SyncCheck
    """Of every pull."""
    recovery: Recovery | None = None
    """None where a lost generator or trainer ends the run."""

    @property
    def pool(self) -> GeneratorPool | None:
        """In which generators are replaced."""
        return None if self.recovery is None else self.recovery.pool


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """What replaces generators and trainer."""

    pool: GeneratorPool
    starter: Starter
    spares: Spares
    supervisor: Supervisor
    trainer: ActorGroup
    """That of now."""


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
    events: AddEvent = no_event,
) -> Fleet:
    """Spawn every role and set the actors up, all at the same time.

    Args:
        events: is told of actors that are lost later, and of those that take their place.

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
    starter = Starter(
        config=config,
        roles=roles,
        placement=placement,
        hf_assets_path=hf_assets_path,
        rubric=rubric,
        failure_folder=failure_folder,
    )
    # No role waits for another's set-up: the start takes as long as the slowest alone.
    trainer, reward, *generators = await asyncio.gather(
        starter.trainer(), starter.reward(), *map(starter.generator, range(len(placement.generators)))
    )
    supervisor = Supervisor(config.recovery, events=events)
    fleet = Fleet(
        trainer=trainer,
        generators=tuple(generators),
        reward=Replaceable(reward, start=starter.reward_again, supervisor=supervisor),
        store=store,
        check=check,
    )
    if config.launch.share_gpus:
        return await _set_up_in_turns(config, fleet, hf_assets_path)
    if not config.recovery.max_restarts:
        return fleet
    return _supervised(fleet, starter=starter, supervisor=supervisor, trainer=trainer, generators=generators)


def _supervised(
    fleet: Fleet,
    *,
    starter: Starter,
    supervisor: Supervisor,
    trainer: ActorGroup,
    generators: Sequence[ActorGroup],
) -> Fleet:
    """With a pool that replaces generators."""
    places = starter.placement.generators
    spares = Spares(
        number=supervisor.config.spare_generators,
        roles=starter.roles,
        config=starter.config.generator,
        like=places[0],
    )

    async def start_again(number: int) -> ActorGroup:
        await starter.end(places[number])
        try:
            return await starter.generator(number, mesh=await spares.take(places[number]))
        finally:
            spares.fill()  # not before: its imports would take the time of this start

    pool = GeneratorPool(
        generators,
        start=start_again,
        supervisor=supervisor,
        trainer=trainer,
        store=fleet.store,
        check=fleet.check,
    )
    pool.watch()
    spares.fill()
    recovery = Recovery(pool=pool, starter=starter, spares=spares, supervisor=supervisor, trainer=trainer)
    return replace(fleet, generators=pool.slots, recovery=recovery)


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
    # One that is being started again has nothing that is worth a clean end.
    generators = fleet.generators if fleet.pool is None else fleet.pool.close()
    groups = (fleet.trainer, *generators, fleet.reward)
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
    _check_spares(config)
    processes = Processes(
        trainer=config.trainer.num_procs,
        trainer_threads=config.trainer.num_threads,
        num_replicas=config.generator.num_replicas,
        tensor_parallel_degree=config.generator.tensor_parallel_degree,
        generator_threads=config.generator.num_threads,
        reward=config.reward.num_procs,
    )
    return place(config.launch, processes, num_gpus=num_gpus)


def _check_spares(config: FleetConfig) -> None:
    number, settings = config.recovery.spare_generators, config.launch
    for field, value, wanted in (
        ("hosts", settings.hosts, "this"),
        ("share_gpus", settings.share_gpus, False),
    ):
        if number and value != wanted:
            raise ValueError(
                f"recovery.spare_generators={number} with launch.{field}={value!r}: spares are made with "
                f"launch.{field}={wanted!r} only, so it must be 0"
            )


def _warn_of_threads(config: FleetConfig, placement: Placement) -> None:
    if config.launch.on_cluster:
        return
    warning = too_many_threads(placement, num_cores=len(os.sched_getaffinity(0)))
    if warning is not None:
        logger.warning("%s", warning)
