"""Numbers of a run before it starts: of a step, of its staleness, its layout and its memory.

Sizes are in GB of 10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, fields
from typing import Any

import torch

from actors.config import RunConfig
from actors.generator import VLLMGenerator
from actors.launch.placement import place_actors
from actors.preflight.checks import Machine
from actors.trainer import PolicyTrainer
from rl.distributed.mesh import Degrees
from rl.loop.config import LoopConfig
from rl.models.model_cost import count_work
from rl.models.spec import ModelSpec
from rl.training.memory import check_memory, estimate_memory


def try_to_find(find: Callable[[], Any]) -> Any:
    """Return what `find` returns, or the reason of its ValueError: the layout is refused."""
    try:
        return find()
    except ValueError as error:
        return f"not known: {error}"


def compute_step_arithmetic(loop: LoopConfig, *, max_model_len: int) -> dict[str, Any]:
    """Return the numbers of one step, and of the run; lengths are bounds for any prompts."""
    samples = loop.groups_per_batch * loop.group_size
    longest = min(
        max_model_len,
        loop.episode.max_tokens or max_model_len,
        loop.max_sample_tokens or max_model_len,
    )
    return {
        "groups": loop.groups_per_batch,
        "group_size": loop.group_size,
        "samples": samples,
        "optimizer_steps": loop.num_minibatches,
        "samples_of_optimizer_step": samples // loop.num_minibatches,
        # A sample has one input fewer than tokens.
        "trained_tokens_most": samples * (longest - 1),
        "samples_of_run": loop.num_steps * samples,
    }


def bound_staleness(loop: LoopConfig) -> dict[str, int]:
    """Return the bounds that docs/generation.md proves, in steps and in optimizer steps."""
    steps = loop.max_off_policy_steps
    return {
        "steps_most": steps,
        # The last minibatch of a step trains weights that the step's first minibatches have
        # updated.
        "policy_versions_most": steps * loop.num_minibatches + loop.num_minibatches - 1,
    }


def describe_layout(config: RunConfig, *, num_gpus: int) -> dict[str, Any]:
    places = place_actors(config, num_gpus=num_gpus)
    layout: dict[str, Any] = {place.role: asdict(place) for place in places.all}
    # Every layout has all axes; those of one rank say nothing.
    mesh = layout["trainer_mesh"] = {}
    for axis, size in asdict(resolve_degrees(config.trainer)).items():
        if size > 1:
            mesh[axis] = size
    return layout


def resolve_degrees(trainer: PolicyTrainer.Config) -> Degrees:
    return trainer.parallelism.resolve_degrees(trainer.num_procs)


def check_fits(
    trainer: PolicyTrainer.Config, *, spec: ModelSpec, available: int, on_gpu: bool
) -> bool:
    """Return whether the trainer's ranks fit into `available` bytes, which they share on CPUs."""
    # A ValueError is that of a layout that is refused anyway.
    with suppress(ValueError):
        rank = estimate_memory(trainer, spec=spec, degrees=resolve_degrees(trainer), on_gpu=on_gpu)
        return (1 if on_gpu else trainer.num_procs) * rank.total <= available
    return True


def describe_memory(
    trainer: PolicyTrainer.Config,
    generator: VLLMGenerator.Config,
    *,
    spec: ModelSpec,
    machine: Machine,
    on_gpu: bool,
) -> dict[str, Any]:
    """Estimate the memory of trainer and generator ranks, and the weights that a publish sends."""
    available = machine.gpu_bytes if on_gpu and machine.gpu_bytes else machine.memory_bytes
    degree, itemsize = generator.tensor_parallel_degree, getattr(torch, generator.dtype).itemsize
    work = count_work(spec.model)
    on_rank = work.parameters * itemsize // degree
    if on_gpu:
        # vLLM also takes its activations off this share, so the cache is an upper bound.
        cache = max(0, int(generator.gpu_memory_utilization * available) - on_rank)
        tokens = cache * degree // (work.cached * itemsize)
        # The engine does not start without room for one request of the full length.
        fits = tokens >= generator.max_model_len
    else:
        cache = generator.count_cpu_cache_bytes(spec.model)
        tokens = generator.count_cpu_cache_tokens(spec.model)
        fits = generator.num_replicas * degree * (on_rank + cache) <= available

    def of_trainer() -> dict[str, Any]:
        rank = estimate_memory(trainer, spec=spec, degrees=resolve_degrees(trainer), on_gpu=on_gpu)
        parts = {f"{part.name}_gb": _to_gb(getattr(rank, part.name)) for part in fields(rank)}
        fits = check_fits(trainer, spec=spec, available=available, on_gpu=on_gpu)
        return parts | {"peak_gb": _to_gb(rank.total), "fits": fits}

    return {
        "available_gb": _to_gb(available),
        "trainer_rank": try_to_find(of_trainer),
        "generator_rank": {
            "weights_gb": _to_gb(on_rank),
            "cache_gb": _to_gb(cache),
            "cache_tokens": tokens,
            "fits": fits,
        },
        "publish": {
            "pushed_gb": _to_gb(work.parameters * itemsize),
            "pulled_by_rank_gb": _to_gb(on_rank),
        },
    }


def _to_gb(num_bytes: int) -> float:
    """Return GB, with three digits."""
    return float(f"{num_bytes / 1e9:.3g}")


def check_gpu_memory(trainer: PolicyTrainer.Config, *, spec: ModelSpec, gpu_bytes: int) -> None:
    """Raise ValueError if a rank of the trainer certainly needs more than a GPU of this machine."""
    degrees = resolve_degrees(trainer)
    rank = estimate_memory(trainer, spec=spec, degrees=degrees, on_gpu=True)
    check_memory(
        rank,
        message=f"{spec.name} {spec.flavor} needs {rank.total / 1e9:.0f} GB on each rank of the "
        f"trainer, {rank.describe()}; a GPU of this machine has {gpu_bytes / 1e9:.0f} GB",
        rank_bytes=gpu_bytes,
        compiled=trainer.compile.enable,
    )
