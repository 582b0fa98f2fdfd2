"""Numbers of a run before its start: batch arithmetic, layout, memory, staleness and bytes of a publish.

Every function returns a section of the explanation as plain data. Sizes are in bytes, under names that end in
`_bytes`; a text that starts with "not known" stands for a number that cannot be known. Micro-batches come from the
packing itself, memory from the estimates that a run is checked with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

import torch

from actors.checks import Machine
from actors.config import ClusterConfig, RunConfig
from actors.placement import place_actors
from rl.distributed.mesh import Degrees
from rl.loop.config import LoopConfig
from rl.models.decoder import persistent_buffers
from rl.models.model_cost import model_work
from rl.models.parallelize_generator import is_split
from rl.models.spec import ModelSpec
from rl.rollouts.packing import plan_micro_batches
from rl.tasks.task import Task
from rl.training.policy import shares_prompts

TOKEN_BYTES = 12
"""Bytes of a token of a rollout: id, logprob and policy version."""


def or_unknown(find: Callable[[], dict[str, Any]]) -> dict[str, Any] | str:
    """Return what `find` returns, or the reason of its ValueError."""
    try:
        return find()
    except ValueError as error:
        return f"not known: {error}"


def degrees_of(fleet: ClusterConfig) -> Degrees:
    """Return the trainer's layout; raise ValueError if it is refused."""
    return fleet.trainer.parallelism.degrees(fleet.trainer.num_procs)


def rollout_limit(config: RunConfig) -> int:
    """Return the most tokens of a rollout, which may be too long to be trained on."""
    limit = config.generator.max_model_len
    return min(limit, config.loop.episode.max_tokens or limit)


def reply_tokens(config: RunConfig, *, single_turn: bool) -> int:
    """Return the most tokens that the model generates in one rollout."""
    loop = config.loop
    if single_turn:
        return loop.sampling.max_tokens
    return min(rollout_limit(config) - 1, loop.episode.max_turns * loop.sampling.max_tokens)


def step_arithmetic(config: RunConfig, *, spec: ModelSpec, single_turn: bool) -> dict[str, Any]:
    """Return the numbers of one step, as bounds for any prompts; raise ValueError for a refused layout."""
    loop, degrees = config.loop, degrees_of(config)
    samples, limit = loop.groups_per_batch * loop.group_size, rollout_limit(config)
    longest = min(limit, loop.max_sample_tokens or limit)
    return {
        "groups": loop.groups_per_batch,
        "group_size": loop.group_size,
        "samples": samples,
        "optimizer_steps": loop.num_minibatches,
        "samples_of_optimizer_step": samples // loop.num_minibatches,
        "data_ranks": degrees.dp,
        "sample_tokens_most": longest,
        "reply_tokens_most": samples * reply_tokens(config, single_turn=single_turn),
        # A sample has one input fewer than tokens.
        "trained_tokens_most": samples * (longest - 1),
        "micro_batches_of_rank_fewest": _num_micro_batches(config, 1, spec=spec, degrees=degrees),
        "micro_batches_of_rank_most": _num_micro_batches(config, longest - 1, spec=spec, degrees=degrees),
    }


def _num_micro_batches(config: RunConfig, num_inputs: int, *, spec: ModelSpec, degrees: Degrees) -> int:
    """Return each rank's micro-batches of a step whose samples have this many inputs each."""
    trainer, loop = config.trainer, config.loop
    num_samples = loop.groups_per_batch * loop.group_size // loop.num_minibatches
    shares = shares_prompts(
        trainer.training,
        compile=trainer.compile,
        has_context=degrees.cp > 1,
        has_experts=spec.model.has_experts,
    )
    size = loop.group_size
    plan = plan_micro_batches(
        [num_inputs] * num_samples,
        families=[range(i, i + size) for i in range(0, num_samples, size)] if shares else None,
        max_tokens=trainer.training.max_tokens_per_microbatch,
        num_ranks=degrees.dp,
        max_sequences=trainer.training.max_sequences_per_microbatch,
    )
    return len(plan[0]) * loop.num_minibatches


def run_arithmetic(
    config: RunConfig, *, task: Task | None, done_steps: int, single_turn: bool
) -> dict[str, Any]:
    """Return the numbers of all steps, those of an earlier run included."""
    loop, checkpoint = config.loop, config.trainer.checkpoint
    steps = range(1, loop.num_steps + 1)
    samples = loop.num_steps * loop.groups_per_batch * loop.group_size
    warmup = config.warmup if config.hf_assets_path is None else None
    evaluations = [step for step in (0, *steps) if loop.evaluates(step)]
    eval_sets = {} if task is None or not evaluations else task.eval_sets()
    return {
        "num_steps": loop.num_steps,
        "done_steps": done_steps,
        "optimizer_steps": loop.num_steps * loop.num_minibatches,
        "samples": samples,
        "reply_tokens_most": samples * reply_tokens(config, single_turn=single_turn),
        "publishes": 1 + sum(map(loop.publishes, steps)),
        "evaluations_after": evaluations,
        "eval_problems": {name: len(problems) for name, problems in eval_sets.items()},
        "eval_replies_of_problem": 1 + loop.evaluation.num_samples,
        "checkpoints_after": [
            step for step in (0, *steps) if checkpoint.due(step, last=step == loop.num_steps > 0)
        ],
        "warmup_steps": 0 if warmup is None else warmup.num_steps,
        "warmup_demonstrations_of_step": 0 if warmup is None else warmup.num_demonstrations,
    }


def layout(fleet: ClusterConfig, *, num_gpus: int) -> dict[str, Any]:
    """Return hosts, processes, devices and mesh of each role; raise ValueError for a refused layout.

    `num_gpus` are those of the controller's machine.
    """
    places = place_actors(fleet, num_gpus=num_gpus)
    axes = {place.role: {"tp": fleet.generator.tensor_parallel_degree} for place in places.generators}
    axes[places.trainer.role] = asdict(degrees_of(fleet))
    return {
        place.role: asdict(place)
        | {"mesh": {axis: size for axis, size in axes.get(place.role, {}).items() if size > 1}}
        for place in places.all
    }


def tensor_bytes(spec: ModelSpec, *, dtype: str) -> dict[str, int]:
    """Return the bytes of each tensor that trainers push and generators pull: the plain model's, adapters merged."""
    with torch.device("meta"):
        model = spec.model.build()
    sent: torch.dtype = getattr(torch, dtype)
    parameters = {
        name: p.numel() * (sent if p.is_floating_point() else p.dtype).itemsize
        for name, p in model.named_parameters()
    }
    return parameters | {name: b.nbytes for name, b in persistent_buffers(model).items()}


def bytes_on_rank(sizes: dict[str, int], *, tensor_parallel_degree: int) -> int:
    """Return the bytes that one rank of a generator holds."""
    split = sum(size for name, size in sizes.items() if is_split(name))
    return split // tensor_parallel_degree + sum(sizes.values()) - split


def memory(config: RunConfig, *, spec: ModelSpec, machine: Machine, on_gpu: bool) -> dict[str, Any]:
    """Estimate the memory of trainer ranks, generator ranks and controller."""
    sizes = tensor_bytes(spec, dtype=config.generator.dtype)
    available = machine.memory_bytes
    if on_gpu:
        assert machine.gpu_bytes is not None, "a machine with GPUs knows their size"
        available = machine.gpu_bytes
    versions = config.weights.keep_versions + 1 if config.weights.transport == "auto" else 0
    rollouts = staleness(config.loop)["groups_ahead"] * config.loop.group_size
    return {
        "available_bytes": available,
        "trainer": or_unknown(lambda: _trainer_memory(config, spec=spec, available=available, on_gpu=on_gpu)),
        "generator": _generator_memory(config, sizes, spec=spec, available=available, on_gpu=on_gpu),
        "controller": {
            "rollouts_bytes": rollouts * rollout_limit(config) * TOKEN_BYTES,
            "shared_weights_bytes": versions * sum(sizes.values()),
        },
    }


def _trainer_memory(fleet: ClusterConfig, *, spec: ModelSpec, available: int, on_gpu: bool) -> dict[str, Any]:
    trainer = fleet.trainer
    estimate = trainer.estimate_memory(spec, degrees=degrees_of(fleet), on_gpu=on_gpu)
    ranks_that_share = 1 if on_gpu else trainer.num_procs
    return {
        "num_ranks": trainer.num_procs,
        **{f"{f.name}_bytes": size for f in fields(estimate) if (size := getattr(estimate, f.name))},
        "held_between_steps_bytes": estimate.held,
        "peak_bytes": estimate.total,
        "fits": ranks_that_share * estimate.total <= available,
    }


def _generator_memory(
    fleet: ClusterConfig, sizes: dict[str, int], *, spec: ModelSpec, available: int, on_gpu: bool
) -> dict[str, Any]:
    generator = fleet.generator
    degree = generator.tensor_parallel_degree
    num_ranks = generator.num_replicas * degree
    on_rank = bytes_on_rank(sizes, tensor_parallel_degree=degree)
    if on_gpu:  # vLLM also takes its activations off this share, so the cache is an upper bound.
        itemsize: int = getattr(torch, generator.dtype).itemsize
        cache = max(0, int(generator.gpu_memory_utilization * available) - on_rank)
        tokens = cache * degree // (model_work(spec.model).cached * itemsize)
        fits = tokens >= generator.max_model_len  # otherwise the engine does not start
    else:
        cache, tokens = generator.cpu_cache_bytes, generator.cpu_cache_tokens(spec.model)
        fits = num_ranks * (on_rank + cache) <= available
    return {
        "num_ranks": num_ranks,
        "weights_bytes": on_rank,
        "cache_bytes": cache,
        "cache_tokens": tokens,
        "longest_requests_at_once": tokens // generator.max_model_len,
        "fits": fits,
    }


def staleness(loop: LoopConfig) -> dict[str, Any]:
    """Return the bounds that docs/async.md proves, in steps and in optimizer steps."""
    steps = loop.max_off_policy_steps
    return {
        "steps_most": steps,
        # The last minibatch of a step trains weights that the step's first minibatches have updated.
        "policy_versions_most": steps * loop.num_minibatches + loop.num_minibatches - 1,
        "groups_ahead": (steps + 1) * loop.groups_per_batch,
        "publish_every": loop.publish_every,
        "generation": "takes turns with training" if not steps else "runs ahead of training",
    }


def publish_bytes(config: RunConfig, *, spec: ModelSpec, publishes: int) -> dict[str, Any]:
    """Return the bytes of one publish, and of all."""
    generator = config.generator
    sizes = tensor_bytes(spec, dtype=generator.dtype)
    degree, pushed = generator.tensor_parallel_degree, sum(sizes.values())
    on_rank = bytes_on_rank(sizes, tensor_parallel_degree=degree)
    return {
        "num_tensors": len(sizes),
        "dtype": generator.dtype,
        "transport": config.weights.transport,
        "pushed_bytes": pushed,
        "pulled_by_rank_bytes": on_rank,
        "pulled_bytes": generator.num_replicas * degree * on_rank,
        "pushed_in_run_bytes": publishes * pushed,
    }
