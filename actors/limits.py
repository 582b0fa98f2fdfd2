"""Limits of a run's machines, measured by its actors before the first step."""

from __future__ import annotations

import logging
import os

import torch

from actors.calls import ActorCallError, CallGroup
from actors.checks import converted_model
from actors.cluster import Cluster, num_gpus
from actors.config import RunConfig
from rl.models.model_cost import model_work
from rl.models.spec import ModelSpec
from rl.observability.machine import MachineLimits, RunLimits

logger = logging.getLogger(__name__)


async def run_limits(config: RunConfig, cluster: Cluster, *, spec: ModelSpec) -> RunLimits | None:
    """Measure the machines of each role in turn; return None if that is disabled or fails.

    A failure is logged, since a run does not need the limits.
    """
    if not config.limits.enable:
        return None
    trainer, generator, loop = config.trainer, config.generator, config.loop
    converted, _ = converted_model(config, model_spec=spec, num_gpus=num_gpus())
    trained, sampled = model_work(spec.model, converted=converted), model_work(spec.model)
    itemsize = int(getattr(torch, generator.dtype).itemsize)
    # On shared devices the trainer measures for both.
    of_generator = cluster.trainer if config.launch.share_gpus else cluster.pool.members[0]
    tp = generator.tensor_parallel_degree
    asked = (
        (cluster.trainer, trainer.training.param_dtype, trained.parameters // trainer.num_procs),
        (of_generator, generator.dtype, sampled.parameters // tp),
    )
    try:
        found = [
            await _ask(group, dtype=dtype, num_bytes=number * itemsize) for group, dtype, number in asked
        ]
    except ActorCallError as error:
        logger.warning("the machine was not measured, so steps have no limit/ metrics: %s", error)
        return None
    num_running = loop.groups_per_batch * loop.group_size * (1 + loop.max_off_policy_steps)
    on_cluster = config.launch.on_cluster
    return RunLimits(
        trainer=found[0],
        num_trainer_ranks=_at_once(trainer.num_procs, trainer.num_threads, on_cluster),
        generator=found[1],
        num_generator_ranks=_at_once(generator.num_replicas * tp, generator.num_threads, on_cluster),
        num_replicas=generator.num_replicas,
        shares_devices=config.launch.share_gpus,
        trained=trained,
        sampled=sampled,
        itemsize=itemsize,
        num_samples=loop.group_size,
        most_running=max(1, min(generator.max_num_seqs, num_running // generator.num_replicas)),
        waits_for_the_longest=loop.max_off_policy_steps == 0,
    )


async def _ask(group: CallGroup, *, dtype: str, num_bytes: int) -> MachineLimits:
    limits: MachineLimits
    limits, *_ = await group.call("measure_machine", dtype, num_bytes)
    logger.info("%s: %s", group.name, limits)
    return limits


def _at_once(num_ranks: int, num_threads: int, on_cluster: bool) -> float:
    """Return how many ranks compute at the same time; without GPUs, ranks of one machine share its cores."""
    if on_cluster or num_gpus():
        return num_ranks
    return min(num_ranks, max(1.0, len(os.sched_getaffinity(0)) / num_threads))
