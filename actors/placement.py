"""Which hosts, how many processes on each and which devices every role of a run gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.launch_config import LaunchConfig

TRAINER, REWARD = "trainer", "reward"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where one role runs."""

    role: str
    num_procs: int
    hosts: str | None
    """Name of its group of hosts; None is the controller's machine."""
    num_hosts: int
    threads: int
    """Of each process."""
    gpus: tuple[int, ...] | None
    """Devices that its processes see, on each of its hosts; None: whatever is there."""

    @property
    def procs_per_host(self) -> int:
        return self.num_procs // self.num_hosts

    def describe(self) -> str:
        where = "where the controller runs" if self.hosts is None else f"hosts {self.hosts!r}"
        devices = "no device of its own" if self.gpus is None else f"GPUs {', '.join(map(str, self.gpus))}"
        return (
            f"{self.role}: {where}, {self.num_hosts} x {self.procs_per_host} processes of {self.threads} "
            f"threads, {devices}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Processes:
    """How many each role has; `placement` needs no more of the actors' settings."""

    trainer: int
    trainer_threads: int
    num_replicas: int
    tensor_parallel_degree: int
    generator_threads: int
    reward: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    trainer: Place
    generators: tuple[Place, ...]
    reward: Place

    @property
    def all(self) -> tuple[Place, ...]:
        return (self.trainer, *self.generators, self.reward)

    def host_groups(self) -> dict[str, int]:
        """Hosts of each group that has to be provided."""
        return {place.hosts: place.num_hosts for place in self.all if place.hosts is not None}

    def gpus_of(self, group: str) -> int:
        """Devices that each host of a group needs for its roles."""
        devices = [gpu for place in self.all if place.hosts == group for gpu in place.gpus or ()]
        return max(devices, default=-1) + 1


def generator_roles(num_replicas: int) -> tuple[str, ...]:
    """The roles' names: of a single generator the plain one."""
    return ("generator",) if num_replicas == 1 else tuple(f"generator_{i}" for i in range(num_replicas))


def place(launch: LaunchConfig, processes: Processes, *, num_gpus: int) -> Placement:
    """Decide for every role.

    Args:
        num_gpus: devices of this machine; of slurm's and kubernetes' hosts `launch` says them.

    Raises:
        ValueError: names the fields that do not fit together, what is needed and what there is.
    """
    _check_divisible(launch, processes)
    if launch.on_cluster:
        trainer_gpus, generator_gpus = _cluster_gpus(launch, processes)
    else:
        trainer_gpus, generator_gpus = _local_gpus(launch, processes, num_gpus=num_gpus)
    here = launch.hosts == "this"
    roles = generator_roles(processes.num_replicas)
    return Placement(
        trainer=Place(
            role=TRAINER,
            num_procs=processes.trainer,
            hosts=None if here else TRAINER,
            num_hosts=launch.trainer_hosts,
            threads=processes.trainer_threads,
            gpus=trainer_gpus,
        ),
        generators=tuple(
            Place(
                role=role,
                num_procs=processes.tensor_parallel_degree,
                hosts=None if here else f"generator{i // launch.replicas_per_host}",
                num_hosts=launch.generator_hosts,
                threads=processes.generator_threads,
                gpus=gpus,
            )
            for i, (role, gpus) in enumerate(zip(roles, generator_gpus, strict=True))
        ),
        reward=Place(
            role=REWARD,
            num_procs=processes.reward,
            hosts=REWARD if launch.reward_hosts else None,
            num_hosts=max(1, launch.reward_hosts),
            threads=1,
            gpus=None,
        ),
    )


Devices = tuple[int, ...] | None


def _check_divisible(launch: LaunchConfig, processes: Processes) -> None:
    for name, of_name, num_procs in (
        ("trainer_hosts", "trainer.num_procs", processes.trainer),
        ("generator_hosts", "generator.tensor_parallel_degree", processes.tensor_parallel_degree),
        ("reward_hosts", "reward.num_procs", processes.reward),
    ):
        num_hosts: int = getattr(launch, name)
        if num_hosts and num_procs % num_hosts:
            raise ValueError(f"launch.{name}={num_hosts} does not divide {of_name}={num_procs}")
    if launch.replicas_per_host > processes.num_replicas:
        raise ValueError(
            f"launch.replicas_per_host={launch.replicas_per_host} is more than "
            f"generator.num_replicas={processes.num_replicas}"
        )


def _local_gpus(
    launch: LaunchConfig, processes: Processes, *, num_gpus: int
) -> tuple[Devices, tuple[Devices, ...]]:
    """Devices of this machine, also where processes simulate several hosts on it."""
    degree, replicas = processes.tensor_parallel_degree, processes.num_replicas
    if num_gpus == 0:
        for name in ("trainer_gpus", "generator_gpus"):
            if (devices := getattr(launch, name)) is not None:
                raise ValueError(f"launch.{name}={devices}: this machine has no GPU")
        return None, (None,) * replicas
    shared = launch.share_gpus
    needed = max(processes.trainer, degree * replicas) if shared else processes.trainer + degree * replicas
    if needed > num_gpus:
        raise ValueError(
            f"trainer.num_procs={processes.trainer} and generator.num_replicas={replicas} of "
            f"generator.tensor_parallel_degree={degree} need {needed} GPUs"
            f"{' that they share' if shared else ''}, this machine has {num_gpus}"
        )
    trainer = launch.trainer_gpus or _first(processes.trainer, num_gpus, taken=launch.generator_gpus or ())
    _check_number("trainer_gpus", trainer, processes.trainer, "trainer.num_procs")
    if shared:
        free = sorted(set(range(num_gpus)) - set(trainer))
        generators = (*trainer, *free)[: degree * replicas]
    else:
        generators = launch.generator_gpus or _first(degree * replicas, num_gpus, taken=trainer)
        both = sorted(set(trainer) & set(generators))
        if both:
            raise ValueError(
                f"launch.trainer_gpus={trainer} and launch.generator_gpus={generators} both have "
                f"{', '.join(map(str, both))}: share_gpus=True is for that"
            )
    what = "generator.num_replicas x generator.tensor_parallel_degree"
    _check_number("generator_gpus", generators, degree * replicas, what)
    for name, devices in (("trainer_gpus", trainer), ("generator_gpus", generators)):
        _check_there(name, devices, num_gpus, "this machine")
    return trainer, tuple(generators[i * degree : (i + 1) * degree] for i in range(replicas))


def _cluster_gpus(launch: LaunchConfig, processes: Processes) -> tuple[Devices, tuple[Devices, ...]]:
    """Devices on each host; hosts belong to one role, generator replicas may share theirs."""
    replicas, per_host = processes.num_replicas, launch.replicas_per_host
    on_trainer = processes.trainer // launch.trainer_hosts
    of_replica = processes.tensor_parallel_degree // launch.generator_hosts
    if launch.gpus_per_host == 0:
        for name in ("trainer_gpus", "generator_gpus"):
            if (devices := getattr(launch, name)) is not None:
                raise ValueError(f"launch.{name}={devices}: launch.gpus_per_host=0")
        return None, (None,) * replicas
    num_gpus = launch.gpus_per_host
    for field, needed in (
        ("trainer.num_procs / launch.trainer_hosts", on_trainer),
        ("generator.tensor_parallel_degree / launch.generator_hosts x launch.replicas_per_host",
         of_replica * per_host),
    ):  # fmt: skip
        if num_gpus is not None and needed > num_gpus:
            raise ValueError(
                f"launch.gpus_per_host={num_gpus}: a host needs {needed} of them ({field}): use more hosts"
            )
    trainer = launch.trainer_gpus or tuple(range(on_trainer))
    generators = launch.generator_gpus or tuple(range(of_replica * per_host))
    _check_number("trainer_gpus", trainer, on_trainer, "the trainer's processes on a host")
    _check_number("generator_gpus", generators, of_replica * per_host, "the generators' processes on a host")
    if num_gpus is not None:
        for name, devices in (("trainer_gpus", trainer), ("generator_gpus", generators)):
            _check_there(name, devices, num_gpus, "a host")
    slots = [generators[i * of_replica : (i + 1) * of_replica] for i in range(per_host)]
    return trainer, tuple(slots[i % per_host] for i in range(replicas))


def _first(num: int, num_gpus: int, *, taken: Sequence[int]) -> tuple[int, ...]:
    free = [gpu for gpu in range(num_gpus) if gpu not in taken]
    return tuple(free[:num])


def _check_number(name: str, devices: Sequence[int], wanted: int, what: str) -> None:
    if len(devices) != wanted:
        raise ValueError(f"launch.{name}={tuple(devices)}: must be {wanted} devices, one for each of {what}")


def _check_there(name: str, devices: Sequence[int], num_gpus: int, where: str) -> None:
    if max(devices) >= num_gpus:
        raise ValueError(
            f"launch.{name}={tuple(devices)}: {where} has {num_gpus} GPUs, numbered 0 to {num_gpus - 1}"
        )


def too_many_threads(placement: Placement, *, num_cores: int) -> str | None:
    """What to warn of where a role's own threads are more than the cores of its machine; None if nothing.

    Roles are not added up: in a synchronous run they compute one after another.
    """
    generators = sum(place.num_procs * place.threads for place in placement.generators)
    trainer = placement.trainer.num_procs * placement.trainer.threads
    for name, threads in (("trainer", trainer), ("generator", generators)):
        if threads > num_cores:
            return (
                f"the {name}'s processes have {threads} threads in all on {num_cores} cores: fewer "
                f"{name}.num_threads would not be slower"
            )
    return None
