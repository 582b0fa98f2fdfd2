"""Placement of every role of a run: its hosts, the processes on each, and their devices.

A config may leave values to the devices at hand: `fit_to_devices` fills them in, and a run's
config.json and `--explain` show the result. Functions take the number of GPUs instead of counting
them, so that `--explain` can ask about a machine that is not there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from actors.config import ClusterConfig, LaunchConfig, RunConfig
from rl.config.rules import find_faults, select_rules
from rl.config.tree import replace_values
from rl.run_rules import RULES

TRAINER, REWARD, AGENTS = "trainer", "reward", "agents"


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Processes of one role, their hosts and their devices.

    Example:
        A generator with tensor parallelism on two devices of this machine:
        Placement(role="generator_1", num_procs=2, gpus=(4, 5)).
    """

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
        devices = "no device of its own"
        if self.gpus is not None:
            devices = f"GPUs {', '.join(map(str, self.gpus))}"
        return (
            f"{self.role}: {where}, {self.num_hosts} x {self.procs_per_host} processes of "
            f"{self.threads} threads, {devices}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Placements:
    """Placement of every role of a run."""

    trainer: Placement
    generators: tuple[Placement, ...]
    reward: Placement | None
    """None in a run without reward processes."""
    agents: Placement | None = None
    """Process of the agents' endpoint; None in a run without agents."""

    @property
    def all(self) -> tuple[Placement, ...]:
        others = [at for at in (self.reward, self.agents) if at is not None]
        return (self.trainer, *self.generators, *others)

    def count_hosts(self) -> dict[str, int]:
        """Return the number of hosts of each group that has to be provided."""
        num_hosts = {}
        for at in self.all:
            if at.hosts is not None:
                num_hosts[at.hosts] = at.num_hosts
        return num_hosts

    def count_gpus_of(self, group: str) -> int:
        """Return the number of devices that each host of a group needs."""
        num_gpus = 0
        for at in self.all:
            if at.hosts == group and at.gpus:
                # Devices are numbered from 0, and a host provides all up to the last.
                num_gpus = max(num_gpus, max(at.gpus) + 1)
        return num_gpus


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """Numbers of processes of the roles."""

    trainer: int
    num_replicas: int
    replica: int
    """Processes of one generator replica."""
    reward: int


def place_actors(config: ClusterConfig, *, num_gpus: int) -> Placements:
    """Return the placement of every role; `num_gpus` are on this machine.

    Raises:
        ValueError: names the fields that do not fit together, what is needed and what there is.
    """
    launch = config.launch
    sizes = _Sizes(
        trainer=config.trainer.num_procs,
        num_replicas=config.generator.num_replicas,
        replica=config.generator.tensor_parallel_degree,
        reward=config.reward.num_procs,
    )
    _check_divisible(launch, sizes)
    trainer_gpus, generator_gpus = _assign_devices(launch, sizes, num_gpus=num_gpus)

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
    reward = None
    if config.reward.num_procs:
        reward = Placement(
            role=REWARD,
            num_procs=config.reward.num_procs,
            hosts=REWARD if launch.reward_hosts else None,
            num_hosts=max(1, launch.reward_hosts),
        )
    agents = None if config.agents is None else Placement(role=AGENTS, num_procs=1)
    return Placements(trainer=trainer, generators=generators, reward=reward, agents=agents)


def _check_divisible(launch: LaunchConfig, sizes: _Sizes) -> None:
    for name, of_name, num_procs in (
        ("trainer_hosts", "trainer.num_procs", sizes.trainer),
        ("generator_hosts", "generator.tensor_parallel_degree", sizes.replica),
        ("reward_hosts", "reward.num_procs", sizes.reward),
    ):
        num_hosts: int = getattr(launch, name)
        if num_hosts and num_procs % num_hosts:
            raise ValueError(f"launch.{name}={num_hosts} does not divide {of_name}={num_procs}")
    if launch.replicas_per_host > sizes.num_replicas:
        raise ValueError(
            f"launch.replicas_per_host={launch.replicas_per_host} is more than "
            f"generator.num_replicas={sizes.num_replicas}"
        )


Devices = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Demand:
    """Numbers of devices on one host, which is this machine or any host of a cluster."""

    where: str
    """Name of the host in messages."""
    num_available: int
    num_trainers: int
    num_replicas: int
    replica_size: int
    is_divided: bool
    """True if trainer and generators have devices of their own."""

    @property
    def num_generators(self) -> int:
        return self.num_replicas * self.replica_size

    @property
    def num_needed(self) -> int:
        if self.is_divided:
            return self.num_trainers + self.num_generators
        return max(self.num_trainers, self.num_generators)


def _count_devices(launch: LaunchConfig, sizes: _Sizes, *, num_gpus: int) -> _Demand:
    if not launch.on_cluster:
        # On this machine, whose hosts may be simulated, the roles divide the devices.
        return _Demand(
            where="this machine",
            num_available=num_gpus,
            num_trainers=sizes.trainer,
            num_replicas=sizes.num_replicas,
            replica_size=sizes.replica,
            is_divided=not launch.share_gpus,
        )

    # On a cluster a host has one role, but generator replicas may share hosts.
    demand = _Demand(
        where="a host (launch.gpus_per_host)",
        num_available=launch.gpus_per_host or 0,
        num_trainers=sizes.trainer // launch.trainer_hosts,
        num_replicas=launch.replicas_per_host,
        replica_size=sizes.replica // launch.generator_hosts,
        is_divided=False,
    )
    if launch.gpus_per_host is None:
        # Nobody has said how many devices a host has: as many as the roles and the choice need.
        last_chosen = max(
            (*(launch.trainer_gpus or ()), *(launch.generator_gpus or ())), default=-1
        )
        demand = replace(demand, num_available=max(demand.num_needed, last_chosen + 1))
    return demand


def _assign_devices(
    launch: LaunchConfig, sizes: _Sizes, *, num_gpus: int
) -> tuple[Devices | None, list[Devices] | None]:
    """Return the trainer's devices and those of each generator, on each host; None without devices.

    Raises:
        ValueError: there are too few devices, or the chosen ones do not fit.
    """
    demand = _count_devices(launch, sizes, num_gpus=num_gpus)
    if demand.num_available == 0:
        if launch.trainer_gpus or launch.generator_gpus:
            raise ValueError(
                "launch.trainer_gpus and launch.generator_gpus must be None: "
                f"{demand.where} has no GPU"
            )
        return None, None
    if demand.num_needed > demand.num_available:
        raise ValueError(
            f"trainer.num_procs={sizes.trainer} and generator.num_replicas="
            f"{sizes.num_replicas} of generator.tensor_parallel_degree={sizes.replica} need "
            f"{demand.num_needed} GPUs on {demand.where}"
            f"{' that they share' if launch.share_gpus else ''}, which has {demand.num_available}"
        )

    # The trainer takes the first devices that are not chosen for generators.
    every = range(demand.num_available)
    reserved = launch.generator_gpus or () if demand.is_divided else ()
    trainer = launch.trainer_gpus
    if not trainer:
        trainer = tuple([gpu for gpu in every if gpu not in reserved][: demand.num_trainers])

    # Generators take the rest; where they take turns with the trainer, its devices first.
    order = list(every)
    others = [gpu for gpu in every if gpu not in trainer]
    if launch.share_gpus:
        order = [*trainer, *others]
    elif demand.is_divided:
        order = others
    generators = launch.generator_gpus or tuple(order[: demand.num_generators])
    _check_devices(launch, demand, trainer=trainer, generators=generators)

    # Replicas beyond those of one host start again with the first devices, on the next host.
    size = demand.replica_size
    slots = [generators[i * size : (i + 1) * size] for i in range(demand.num_replicas)]
    of_replicas = [slots[i % demand.num_replicas] for i in range(sizes.num_replicas)]
    return trainer, of_replicas


def _check_devices(
    launch: LaunchConfig, demand: _Demand, *, trainer: Devices, generators: Devices
) -> None:
    for name, devices, number in (
        ("trainer_gpus", trainer, demand.num_trainers),
        ("generator_gpus", generators, demand.num_generators),
    ):
        if len(devices) != number or max(devices) >= demand.num_available:
            raise ValueError(
                f"launch.{name}={devices}: must be {number} devices, one for each process, and "
                f"{demand.where} has {demand.num_available} GPUs, numbered 0 to "
                f"{demand.num_available - 1}"
            )
    if demand.is_divided and set(trainer) & set(generators):
        raise ValueError(
            f"launch.trainer_gpus={trainer} and launch.generator_gpus={generators} have devices in "
            "common: share_gpus=True is for that"
        )


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
