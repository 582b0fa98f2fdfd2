"""Starting a run's actors on meshes of their own, and ending them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors import launch
from actors.calls import ActorGroup, Timeouts
from actors.generator import VLLMGenerator, generator_env
from actors.reward import RewardActor
from actors.trainer import PolicyTrainer
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


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSettings:
    """Where the actors' log records go."""

    folder: Path
    console_level: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """The actors of a run, ready to be called."""

    trainer: ActorGroup
    generator: ActorGroup
    reward: ActorGroup
    store: WeightStore


async def start_fleet(
    config: FleetConfig,
    *,
    store: WeightStore,
    model_spec: ModelSpec,
    hf_assets_path: str,
    rubric: Rubric,
    failure_folder: Path,
    logs: LogSettings,
) -> Fleet:
    """Spawn every role and set the actors up, all at the same time.

    After an error, and after `close_fleet`, the processes are ended by `launch.run`.
    """
    meshes = await _spawn_meshes(config, logs)
    await store.start(meshes["trainer"])

    def group(role: str, actor: type, **arguments: Any) -> ActorGroup:
        spawned = meshes[role].spawn(role, actor, **arguments)
        processes = launch.local_processes(meshes[role])
        return ActorGroup(name=role, mesh=spawned, timeouts=config.timeouts, processes=processes)

    fleet = Fleet(
        trainer=group(
            "trainer",
            config.trainer.owner,
            config=config.trainer,
            model_spec=model_spec,
            store=store,
            failure_folder=str(failure_folder),
        ),
        generator=group(
            "generator",
            config.generator.owner,
            config=config.generator,
            model_spec=model_spec,
            store=store,
        ),
        reward=group("reward", config.reward.owner, config=config.reward, rubric=rubric),
        store=store,
    )
    await asyncio.gather(
        fleet.trainer.call("setup", hf_assets_path, limit="setup_s"),
        fleet.generator.call("setup", hf_assets_path, limit="setup_s"),
        fleet.reward.call("setup", limit="setup_s"),
    )
    return fleet


async def close_fleet(fleet: Fleet) -> None:
    """A clean end: process groups left, engine and workers ended, the stored weights freed.

    What fails here is logged: the run's results are complete.
    """
    groups = (fleet.trainer, fleet.generator, fleet.reward)
    ends = [*(group.call("close", limit="close_s") for group in groups), fleet.store.stop()]
    for problem in await asyncio.gather(*ends, return_exceptions=True):
        if isinstance(problem, Exception):
            logger.warning("not a clean end, its processes are killed: %s", problem)


async def _spawn_meshes(config: FleetConfig, logs: LogSettings) -> dict[str, Any]:
    """A process mesh for each role, with its environment and its logs settled."""
    trainer_gpus, generator_gpus = assign_gpus(
        num_available=num_gpus(),
        num_trainer=config.trainer.num_procs,
        num_generator=config.generator.tensor_parallel_degree,
    )
    trainer, generator, reward = await asyncio.gather(
        launch.spawn_role(
            "trainer",
            num_procs=config.trainer.num_procs,
            threads=config.trainer.num_threads,
            gpus=trainer_gpus,
            env=QUIET_ENVIRONMENT,
        ),
        launch.spawn_role(
            "generator",
            num_procs=config.generator.tensor_parallel_degree,
            threads=config.generator.num_threads,
            gpus=generator_gpus,
            env=QUIET_ENVIRONMENT | generator_env(config.generator),
        ),
        launch.spawn_role("reward", num_procs=config.reward.num_procs, threads=1, env=QUIET_ENVIRONMENT),
    )
    meshes = {"trainer": trainer, "generator": generator, "reward": reward}
    await asyncio.gather(
        *(
            launch.setup_logs(mesh, folder=logs.folder, console_level=logs.console_level)
            for mesh in meshes.values()
        ),
        launch.setup_process_group_env(trainer),
        launch.setup_process_group_env(generator),
    )
    return meshes


def num_gpus() -> int:
    """GPUs of this machine."""
    import torch

    return torch.cuda.device_count()


def assign_gpus(
    *, num_available: int, num_trainer: int, num_generator: int
) -> tuple[Sequence[int] | None, Sequence[int] | None]:
    """Devices of trainer and generator: the first for the trainer, the next for the generator.

    None for both on a machine without GPUs.

    Raises:
        ValueError: there are some, but fewer than the two need.
    """
    if num_available == 0:
        return None, None
    if num_available < num_trainer + num_generator:
        raise ValueError(
            f"trainer.num_procs={num_trainer} and generator.tensor_parallel_degree={num_generator} need "
            f"{num_trainer + num_generator} GPUs, this machine has {num_available}"
        )
    return range(num_trainer), range(num_trainer, num_trainer + num_generator)
