"""The machine that a run is explained on, and the GPUs that are assumed where it has too few."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from actors.fleet_config import FleetConfig
from actors.roles import num_gpus, trains_on_gpu
from rl.models.spec import ModelSpec

ASSUMED_GPU_BYTES = 80 * 10**9
"""What the shipped configs are made for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    num_gpus: int
    gpu_bytes: int | None
    """Of the smallest; None without any."""
    num_cores: int
    """That this process may use."""
    memory_bytes: int

    @classmethod
    def here(cls) -> Machine:
        import torch

        sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(num_gpus())]
        return cls(
            num_gpus=len(sizes),
            gpu_bytes=min(sizes, default=None),
            num_cores=len(os.sched_getaffinity(0)),
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        )


def explained_on(fleet: FleetConfig, *, spec: ModelSpec, here: Machine) -> tuple[Machine, str]:
    """The machine, and why it is not `here`; an empty reason where it is.

    GPUs are assumed where the config names some, or has hosts that bring them, or could not be held by a
    machine without.
    """
    launch = fleet.launch
    if launch.on_cluster:
        if not trains_on_gpu(launch, num_gpus=here.num_gpus):
            return here, ""
        size = here.gpu_bytes or ASSUMED_GPU_BYTES
        return replace(here, gpu_bytes=size), f"GPUs of {size / 1e9:.0f} GB on the hosts of {launch.hosts}"
    needed = gpus_needed(fleet)
    if here.num_gpus:
        if needed <= here.num_gpus:
            return here, ""
        why = f"{needed} GPUs of this machine's kind, which has {here.num_gpus}"
        return replace(here, num_gpus=needed), why
    why = _why_not_on_cpus(fleet, spec=spec, here=here)
    if not why:
        return here, ""
    assumed = replace(here, num_gpus=needed, gpu_bytes=ASSUMED_GPU_BYTES)
    return assumed, f"{needed} GPU{'s' * (needed > 1)} of {ASSUMED_GPU_BYTES / 1e9:.0f} GB, as {why}"


def gpus_needed(fleet: FleetConfig) -> int:
    """On one machine."""
    trainer = fleet.trainer.num_procs
    generators = fleet.generator.num_replicas * fleet.generator.tensor_parallel_degree
    together = max(trainer, generators) if fleet.launch.share_gpus else trainer + generators
    named = (*(fleet.launch.trainer_gpus or ()), *(fleet.launch.generator_gpus or ()))
    return max(together, max(named, default=-1) + 1)


def _why_not_on_cpus(fleet: FleetConfig, *, spec: ModelSpec, here: Machine) -> str:
    for name in ("trainer_gpus", "generator_gpus"):
        if getattr(fleet.launch, name) is not None:
            return f"launch.{name} names some and this machine has none"
    trainer = fleet.trainer
    try:
        degrees = trainer.parallelism.degrees(trainer.num_procs)
    except ValueError:  # Refused on any machine.
        return ""
    needed = trainer.num_procs * trainer.estimate_memory(spec, degrees=degrees, on_gpu=False).total
    if needed <= here.memory_bytes:
        return ""
    return (
        f"this machine has none, and {here.memory_bytes / 1e9:.0f} GB of memory for the "
        f"{needed / 1e9:.0f} GB that the trainer would need on CPUs"
    )
