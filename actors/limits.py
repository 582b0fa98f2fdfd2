"""What a run's machines can do, asked of its actors before the first step."""

from __future__ import annotations

import logging
import os
from dataclasses import fields

import torch

from actors.calls import ActorCallError, Group
from actors.checks import converted_model
from actors.fleet import Fleet
from actors.roles import num_gpus
from actors.run_config import RunConfig
from rl.machine_limits import MachineLimits, Workload
from rl.models.qwen3.model import Qwen3
from rl.models.spec import ModelSpec
from rl.observability.limit_sink import RunLimits
from rl.training.model_work import model_work

logger = logging.getLogger(__name__)


async def run_limits(config: RunConfig, fleet: Fleet, *, spec: ModelSpec) -> RunLimits | None:
    """What the run's steps are compared with; None where that is switched off, or nobody can say.

    One role after the other, while nothing else runs. What fails is logged: a run needs none of it.
    """
    model = spec.model
    if not (config.limits.enable and isinstance(model, Qwen3.Config)):
        return None
    trainer, generator = config.trainer, config.generator
    converted, _ = converted_model(config.fleet, model_spec=spec, num_gpus=num_gpus())
    trained = model_work(model, converted=converted)
    sampled = model_work(model)
    itemsize = _itemsize(generator.dtype)
    cache = config.limits.cache
    try:
        of_trainer = await _ask(
            fleet.trainer,
            Workload(
                dtype=trainer.training.param_dtype,
                num_bytes=trained.parameters * itemsize // trainer.num_procs,
            ),
            cache,
        )
        of_generator = await _ask(
            # Who shares a device with the trainer would have to take it from it.
            fleet.trainer if config.launch.share_gpus else fleet.generators[0],
            Workload(
                dtype=generator.dtype,
                num_bytes=sampled.parameters * itemsize // generator.tensor_parallel_degree,
            ),
            cache,
        )
    except ActorCallError as error:
        logger.warning("what the machine can do is not known, so steps have no limit/: %s", error)
        return None
    num_running = config.loop.num_prompts * config.loop.num_samples * (1 + config.loop.max_policy_age)
    return RunLimits(
        trainer=of_trainer,
        num_trainer_ranks=_at_once(trainer.num_procs, trainer.num_threads, config.launch.on_cluster),
        generator=of_generator,
        num_generator_ranks=_at_once(
            generator.num_replicas * generator.tensor_parallel_degree,
            generator.num_threads,
            config.launch.on_cluster,
        ),
        num_replicas=generator.num_replicas,
        shares_devices=config.launch.share_gpus,
        trained=trained,
        sampled=sampled,
        itemsize=itemsize,
        num_samples=config.loop.num_samples,
        most_running=max(1, min(generator.max_num_seqs, num_running // generator.num_replicas)),
        waits_for_the_longest=config.loop.max_policy_age == 0,
    )


async def _ask(group: Group, workload: Workload, cache: str) -> MachineLimits:
    limits: MachineLimits = (await group.call("measure_machine", workload, cache, limit="setup_s"))[0]
    said = ", ".join(f"{f.name} {getattr(limits, f.name)}" for f in fields(limits))
    logger.info("%s: %s", group.name, said)
    return limits


def _at_once(num_ranks: int, num_threads: int, on_cluster: bool) -> float:
    """Ranks that compute at the same time: those of this machine, where it has no GPU, share its cores."""
    if on_cluster or num_gpus():
        return num_ranks
    return min(num_ranks, max(1.0, len(os.sched_getaffinity(0)) / num_threads))


def _itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)
