"""The actors of the Tinker backend: what is checked of them before they start, their start and their end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from actors import launch
from actors.calls import ActorGroup, Timeouts
from actors.generator import VLLMGenerator
from actors.launch_config import LaunchConfig
from actors.layout_checks import check_divisible, named_as_options
from actors.placement import Placement, Processes, place
from actors.roles import LogSettings, Roles, num_gpus, trains_on_gpu
from actors.tinker_trainer import TinkerTrainer
from rl.config.tree import check_fields
from rl.tinker.local.base import Base
from rl.training import layout
from rl.weights.store import WeightStore

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class TinkerFleetConfig:
    """What the actors are made of."""

    trainer: TinkerTrainer.Config = field(default_factory=TinkerTrainer.Config)
    generator: VLLMGenerator.Config = field(default_factory=VLLMGenerator.Config)
    timeouts: Timeouts = field(default_factory=Timeouts)
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def check(self) -> Placement:
        """Where everything runs.

        Raises:
            ValueError: names the field that cannot be, by itself or beside the others.
        """
        check_fields(self)  # One may have been edited since.
        self.launch.check()
        if self.launch.share_gpus:
            raise ValueError(
                "launch.share_gpus=True: must be False, as models train while others are sampled from; give "
                "trainer and generators devices of their own"
            )
        for name in ("initial_weights", "can_sleep"):
            if getattr(self.generator, name) not in ("store", False):
                raise ValueError(
                    f"generator.{name}={getattr(self.generator, name)!r}: must be as it is by default, the "
                    "weights come from the store"
                )
        if self.trainer.training.cpu_offload:
            raise ValueError(
                "trainer.training.cpu_offload=True: must be False, models share their base's memory"
            )
        processes = Processes(
            trainer=self.trainer.num_procs,
            trainer_threads=self.trainer.num_threads,
            num_replicas=self.generator.num_replicas,
            tensor_parallel_degree=self.generator.tensor_parallel_degree,
            generator_threads=self.generator.num_threads,
            reward=0,
        )
        return place(self.launch, processes, num_gpus=num_gpus())

    def check_base(self, base: Base) -> None:
        """Raise ValueError naming the field that does not go with this base model."""
        trainer, spec = self.trainer, base.spec
        with named_as_options(trainer):
            check_divisible(trainer.parallelism.tensor_parallel_degree, model_spec=spec)
            spec.check_layout(spec.model, trainer.parallelism)
            layout.check_layout(
                parallelism=trainer.parallelism,
                activation_checkpoint=trainer.activation_checkpoint,
                compile=trainer.compile,
                world_size=trainer.num_procs,
                device_type="cuda" if trains_on_gpu(self.launch, num_gpus=num_gpus()) else "cpu",
            )
            trainer.engine().check_model(spec)
        self.generator.check_model(spec.model)


@dataclass(frozen=True, kw_only=True, slots=True)
class TinkerFleet:
    trainer: ActorGroup
    generators: Sequence[ActorGroup]
    """One a replica."""


async def start_tinker_fleet(
    config: TinkerFleetConfig, *, base: Base, store: WeightStore, logs: LogSettings
) -> TinkerFleet:
    """Spawn every role and set the actors up, all at the same time; `end_tinker_fleet` ends what there is."""
    placement = config.check()
    roles = Roles(
        launch=config.launch,
        timeouts=config.timeouts,
        hosts=await launch.start_hosts(config.launch, placement),
        logs=logs,
        store=store,
        model_spec=base.spec,
    )

    async def trainer() -> ActorGroup:
        group = await roles.trainer(
            placement.trainer,
            config.trainer.owner,
            imports=("actors.tinker_trainer",),
            config=config.trainer,
            base=replace(base.config, folder=str(base.folder)),
            context=base.context,
        )
        await group.call("setup", limit="setup_s")
        return group

    async def generator(number: int) -> ActorGroup:
        group = await roles.generator(placement.generators[number], config.generator)
        await group.call("setup", str(base.folder), limit="setup_s")
        return group

    started = await asyncio.gather(trainer(), *map(generator, range(config.generator.num_replicas)))
    return TinkerFleet(trainer=started[0], generators=tuple(started[1:]))


async def end_tinker_fleet(fleet: TinkerFleet | None, *, store: WeightStore) -> None:
    """Ask all to end, and then end their processes; none is left, whatever they answered."""
    try:
        if fleet is not None:
            groups = (fleet.trainer, *fleet.generators)
            ends = [*(group.call("close", limit="close_s") for group in groups), store.stop()]
            for problem in await asyncio.gather(*ends, return_exceptions=True):
                if isinstance(problem, Exception):
                    logger.info("not a clean end, its processes are killed: %s", problem)
    finally:
        await launch.stop_all()
        store.discard()
