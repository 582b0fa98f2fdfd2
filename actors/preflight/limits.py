"""Limits of the machines of a run, measured by its actors before the first step."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import torch

from actors.cluster.cluster import Cluster
from actors.cluster.group import ActorGroup
from actors.launch.calls import ActorCallError
from actors.launch.placement import count_gpus, trains_on_gpu
from actors.preflight.checks import build_converted_model
from rl.models.model_cost import count_work
from rl.models.spec import ModelSpec
from rl.observability.machine import MachineLimits, RunLimits

logger = logging.getLogger(__name__)


async def measure_run_limits(
    cluster: Cluster,
    *,
    spec: ModelSpec,
    group_size: int,
    groups_per_batch: int,
    max_off_policy_steps: int,
) -> RunLimits | None:
    """Let the actors measure the machines of each role in turn.

    Return None if that fails; the failure is logged, since a run does not need the limits.
    """
    trainer, generator = cluster.config.trainer, cluster.config.generator
    launch = cluster.config.launch
    on_gpu = trains_on_gpu(launch, num_gpus=count_gpus())
    converted, _ = build_converted_model(trainer, spec=spec, on_gpu=on_gpu)
    trained, sampled = count_work(spec.model, converted=converted), count_work(spec.model)
    itemsize = int(getattr(torch, generator.dtype).itemsize)
    tp = generator.tensor_parallel_degree

    # On shared devices the trainer measures for both.
    group = cluster.trainer if launch.share_gpus else cluster.pool.members[0]
    questions = [
        (cluster.trainer, trainer.training.param_dtype, trained.parameters // trainer.num_procs),
        (group, generator.dtype, sampled.parameters // tp),
    ]
    # Then one answer holds for both roles: the cores of this machine are the same.
    shares_cores = not on_gpu and launch.hosts == "this"
    if shares_cores or launch.share_gpus:
        of_trainer, of_generator = questions[0][1:], questions[1][1:]
        if of_trainer == of_generator and trainer.num_threads == generator.num_threads:
            questions.pop()
    answers = await _ask(questions, itemsize=itemsize)
    if answers is None:
        return None

    # With a bound of k steps, k more batches may be under way beside the one that is awaited.
    num_running = groups_per_batch * group_size * (1 + max_off_policy_steps)
    on_cluster = launch.on_cluster
    return RunLimits(
        trainer=answers[0],
        num_trainer_ranks=_count_at_once(trainer.num_procs, trainer.num_threads, on_cluster),
        generator=answers[-1],
        num_generator_ranks=_count_at_once(
            generator.num_replicas * tp, generator.num_threads, on_cluster
        ),
        num_replicas=generator.num_replicas,
        shares_devices=bool(launch.share_gpus),
        trained=trained,
        sampled=sampled,
        itemsize=itemsize,
        num_samples=group_size,
        most_running=max(1, min(generator.max_num_seqs, num_running // generator.num_replicas)),
        waits_for_the_longest=max_off_policy_steps == 0,
    )


async def _ask(
    questions: Sequence[tuple[ActorGroup, str, int]], *, itemsize: int
) -> list[MachineLimits] | None:
    """Return the limits that each group measures for a dtype and a number of weights."""
    answers: list[MachineLimits] = []
    try:
        # One role after another: on one machine they would measure each other's load.
        for group, dtype, number in questions:
            limits, *_ = await group.call(
                "measure_machine", dtype, number * itemsize, timeout="setup_s"
            )
            logger.info("%s: %s", group.name, limits)
            answers.append(limits)
    except ActorCallError as error:
        logger.warning("the machine was not measured, so steps have no limit/ metrics: %s", error)
        return None
    return answers


def _count_at_once(num_ranks: int, num_threads: int, on_cluster: bool) -> float:
    """Return the number of ranks that compute at the same time.

    Without GPUs, the ranks of one machine share its cores.
    """
    if on_cluster or count_gpus():
        return num_ranks
    return min(num_ranks, max(1.0, len(os.sched_getaffinity(0)) / num_threads))
