"""Placement of every role of a run: its hosts, the processes on each, and their devices.

A config may leave values to the devices at hand: `fit_to_devices` fills them in, and a run's
config.json and `--explain` show the result. Functions take the number of GPUs instead of counting
them, so that `--explain` can ask about a machine that is not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from actors.config import ClusterConfig, LaunchConfig, RunConfig
from rl.config.rules import find_faults, select_rules
from rl.config.tree import replace_values
from rl.run_rules import RULES

TRAINER, REWARD = "trainer", "reward"


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    role: str
    """Name of the mesh, and `RELAY_ROLE` in the environment of the processes."""
    num_procs: int
    hosts: str | None = None
    """Name of the role's group of hosts; None is the controller's machine."""
    num_hosts: int = 1
    threads: int = 1
    """Compute threads of each process (`OMP_NUM_THREADS`); uncapped, two roles on one machine slow
    each other down."""
    gpus: tuple[int, ...] | None = None
    """Devices visible to the role's processes on each of its hosts, of which a process takes the
    one at its LOCAL_RANK; None: all devices."""

    @property
    def procs_per_host(self) -> int:
        return self.num_procs // self.num_hosts

    def describe(self) -> str:
        where = "where the controller runs" if self.hosts is None else f"hosts {self.hosts!r}"
        devices = (
            "no device of its own"
            if self.gpus is None
            else f"GPUs {', '.join(map(str, self.gpus))}"
        )
        return (
            f"{self.role}: {where}, {self.num_hosts} x {self.procs_per_host} processes of "
            f"{self.threads} threads, {devices}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Placements:
    trainer: Placement
    generators: tuple[Placement, ...]
    reward: Placement | None
    """None in a run without reward processes."""

    @property
    def all(self) -> tuple[Placement, ...]:
        return (self.trainer, *self.generators, *(() if self.reward is None else (self.reward,)))

    def host_groups(self) -> dict[str, int]:
        """Return the number of hosts of each group that has to be provided."""
        return {at.hosts: at.num_hosts for at in self.all if at.hosts is not None}

    def gpus_of(self, group: str) -> int:
        """Return the number of devices that each host of a group needs."""
        devices = [gpu for at in self.all if at.hosts == group for gpu in at.gpus or ()]
        return max(devices, default=-1) + 1


def place_actors(config: ClusterConfig, *, num_gpus: int) -> Placements:
    """Return the placement of every role; `num_gpus` are on this machine.

    Raises:
        ValueError: names the fields that do not fit together, what is needed and what there is.
    """
    launch = config.launch
    _check_divisible(config)
    trainer_gpus, generator_gpus = _devices(config, num_gpus=num_gpus)
    here = launch.hosts == "this"
    generators = tuple(
        Placement(
            role=f"generator_{i}" if config.generator.num_replicas > 1 else "generator",
            num_procs=config.generator.tensor_parallel_degree,
            hosts=None if here else f"generator{i // launch.replicas_per_host}",
            num_hosts=launch.generator_hosts,
            threads=config.generator.num_threads,
            gpus=None if generator_gpus is None else generator_gpus[i],
        )
        for i in range(config.generator.num_replicas)
    )
    trainer = Placement(
        role=TRAINER,
        num_procs=config.trainer.num_procs,
        hosts=None if here else TRAINER,
        num_hosts=launch.trainer_hosts,
        threads=config.trainer.num_threads,
        gpus=trainer_gpus,
    )
    if config.reward.num_procs == 0:
        return Placements(trainer=trainer, generators=generators, reward=None)
    reward = Placement(
        role=REWARD,
        num_procs=config.reward.num_procs,
        hosts=REWARD if launch.reward_hosts else None,
        num_hosts=max(1, launch.reward_hosts),
    )
    return Placements(trainer=trainer, generators=generators, reward=reward)


def _check_divisible(config: ClusterConfig) -> None:
    launch = config.launch
    for name, of_name, num_procs in (
        ("trainer_hosts", "trainer.num_procs", config.trainer.num_procs),
        (
            "generator_hosts",
            "generator.tensor_parallel_degree",
            config.generator.tensor_parallel_degree,
        ),
        ("reward_hosts", "reward.num_procs", config.reward.num_procs),
    ):
        num_hosts: int = getattr(launch, name)
        if num_hosts and num_procs % num_hosts:
            raise ValueError(f"launch.{name}={num_hosts} does not divide {of_name}={num_procs}")
    if launch.replicas_per_host > config.generator.num_replicas:
        raise ValueError(
            f"launch.replicas_per_host={launch.replicas_per_host} is more than "
            f"generator.num_replicas={config.generator.num_replicas}"
        )


Devices = tuple[int, ...]


def _devices(
    config: ClusterConfig, *, num_gpus: int
) -> tuple[Devices | None, list[Devices] | None]:
    """Return the trainer's devices and those of each generator, on each host; None without devices.

    On this machine, whose hosts may be simulated, the roles divide the devices. On a cluster a host
    has one role, but generator replicas may share hosts.
    """
    launch, where, available = config.launch, "this machine", num_gpus
    num_trainers, replicas = config.trainer.num_procs, config.generator.num_replicas
    replica_size, divided = config.generator.tensor_parallel_degree, not launch.share_gpus
    chosen = (*(launch.trainer_gpus or ()), *(launch.generator_gpus or ()))
    if launch.on_cluster:
        where, divided, replicas = "a host (launch.gpus_per_host)", False, launch.replicas_per_host
        num_trainers //= launch.trainer_hosts
        replica_size //= launch.generator_hosts
    num_generators = replicas * replica_size
    needed = num_trainers + num_generators if divided else max(num_trainers, num_generators)
    if launch.on_cluster:
        asked = launch.gpus_per_host
        available = max(needed, *(1 + gpu for gpu in chosen), 0) if asked is None else asked
    if available == 0:
        if chosen:
            raise ValueError(
                f"launch.trainer_gpus and launch.generator_gpus must be None: {where} has no GPU"
            )
        return None, None
    if needed > available:
        raise ValueError(
            f"trainer.num_procs={config.trainer.num_procs} and generator.num_replicas="
            f"{config.generator.num_replicas} of generator.tensor_parallel_degree="
            f"{config.generator.tensor_parallel_degree} need {needed} GPUs on {where}"
            f"{' that they share' if launch.share_gpus else ''}, which has {available}"
        )
    every = range(available)
    taken = launch.generator_gpus or () if divided else ()
    trainer = launch.trainer_gpus or tuple(
        [gpu for gpu in every if gpu not in taken][:num_trainers]
    )
    others = [gpu for gpu in every if gpu not in trainer]
    order = [*trainer, *others] if launch.share_gpus else others if divided else every
    generators = launch.generator_gpus or tuple(order[:num_generators])
    for name, devices, number in (
        ("trainer_gpus", trainer, num_trainers),
        ("generator_gpus", generators, num_generators),
    ):
        if len(devices) != number or max(devices) >= available:
            raise ValueError(
                f"launch.{name}={devices}: must be {number} devices, one for each process, and "
                f"{where} has {available} GPUs, numbered 0 to {available - 1}"
            )
    if divided and set(trainer) & set(generators):
        raise ValueError(
            f"launch.trainer_gpus={trainer} and launch.generator_gpus={generators} have devices in "
            "common: share_gpus=True is for that"
        )
    slots = [generators[i * replica_size : (i + 1) * replica_size] for i in range(replicas)]
    return trainer, [slots[i % replicas] for i in range(config.generator.num_replicas)]


# Devices at hand


def count_gpus() -> int:
    """Return the number of GPUs that this process sees."""
    return torch.cuda.device_count()


def trains_on_gpu(launch: LaunchConfig, *, num_gpus: int) -> bool:
    """Return whether the trainer's hosts have GPUs; `num_gpus` are on this machine."""
    return launch.gpus_per_host != 0 if launch.on_cluster else num_gpus > 0


def fit_to_devices(config: RunConfig, *, num_gpus: int) -> RunConfig:
    """Return the config with the values that it leaves open set to those that fit `num_gpus`.

    The batch-invariant mode is on where both sides have the same kernels: on CPUs. Trainer and
    generators share GPUs that are too few for both, if they may take turns.
    """
    changes: dict[str, Any] = {}
    if config.batch_invariant is None:
        changes["batch_invariant"] = not trains_on_gpu(config.launch, num_gpus=num_gpus)
    shares = config.launch.share_gpus
    if shares is None:
        # Off policy, generators work while the trainer trains: there are no turns to take.
        takes_turns = config.loop.max_off_policy_steps == 0 and num_gpus > 0
        shares = (
            takes_turns
            and not _has_room(config, num_gpus=num_gpus)
            and fits_shared(config, num_gpus=num_gpus)
        )
        changes["launch.share_gpus"] = shares
    if shares:
        changes["generator.can_sleep"] = True
    return replace_values(config, changes)


def fits_shared(config: ClusterConfig, *, num_gpus: int) -> bool:
    """Return whether trainer and generators fit on this machine's GPUs if they take turns."""
    shared = replace_values(config, {"launch.share_gpus": True})
    if any(find_faults(shared, select_rules(RULES, "launch"))):  # other hosts, or chosen devices
        return False
    return _has_room(shared, num_gpus=num_gpus)


def _has_room(config: ClusterConfig, *, num_gpus: int) -> bool:
    try:
        place_actors(config, num_gpus=num_gpus)
    except ValueError:
        return False
    return True
