"""Numbers of a run before its start: batch arithmetic, layout, memory, staleness and bytes of a publish.

Every function returns a section of the explanation as plain data. Sizes are in bytes, under names that end in
`_bytes`; a text that starts with "not known" stands for a number that cannot be known.

Micro-batches come from the packing itself (`rl.rollouts.packing.plan_micro_batches`), for replies of one token
(fewest) and for the longest replies (most). They are exact where the prompts of step 1 are known, else bounds for any
prompts. Memory comes from the estimates that a run is checked with.

Shape legend: P prompts of an optimizer step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import fields
from itertools import chain
from typing import Any

import torch

from actors.checks import Machine
from actors.config import ClusterConfig
from actors.explain.known import Known
from actors.placement import place_actors
from rl.distributed.mesh import Degrees
from rl.loop.config import LoopConfig
from rl.models.decoder import persistent_buffers
from rl.models.parallelize_generator import is_split
from rl.models.spec import ModelSpec
from rl.rollouts.packing import plan_micro_batches
from rl.training.policy import shares_prompts

TOKEN_BYTES = 12
"""Bytes of a token of a rollout: id, logprob and policy version."""


def step_arithmetic(known: Known, *, degrees: Degrees) -> dict[str, Any]:
    """Return the numbers of one step; raise ValueError if a sample fits no micro-batch."""
    loop = known.config.loop
    samples, longest = loop.groups_per_batch * loop.group_size, loop.sampling.max_tokens
    prompts = known.prompts(loop.groups_per_batch)
    shortest_inputs, longest_inputs = (
        [1] * loop.groups_per_batch,
        [known.sample_limit - 1] * loop.groups_per_batch,
    )
    if prompts is not None:
        shortest_inputs, longest_inputs = (
            [min(len(prompt) + reply, known.sample_limit) - 1 for prompt in prompts] for reply in (1, longest)
        )
    keys = range(loop.groups_per_batch) if prompts is None else [prompt.tobytes() for prompt in prompts]
    width = loop.groups_per_batch // loop.num_minibatches

    def micro_batches(lengths_P: Sequence[int]) -> int:
        return sum(
            _num_micro_batches(known, lengths_P[i : i + width], keys_P=keys[i : i + width], degrees=degrees)
            for i in range(0, loop.groups_per_batch, width)
        )

    return {
        "groups": loop.groups_per_batch,
        "group_size": loop.group_size,
        "samples": samples,
        "optimizer_steps": loop.num_minibatches,
        "samples_of_optimizer_step": width * loop.group_size,
        "data_ranks": degrees.dp,
        "sample_tokens_most": known.sample_limit,
        "reply_tokens_most": samples * _reply_tokens(known),
        "prompt_tokens": "not known here"
        if prompts is None
        else sorted({min(map(len, prompts)), max(map(len, prompts))}),
        # A sample has one input fewer than tokens.
        "trained_tokens_fewest": loop.group_size * sum(shortest_inputs),
        "trained_tokens_most": loop.group_size * sum(longest_inputs),
        "micro_batches_of_rank_fewest": micro_batches(shortest_inputs),
        "micro_batches_of_rank_most": micro_batches(longest_inputs),
        "for": "bounds for any prompts" if prompts is None else "prompts of step 1",
    }


def _num_micro_batches(
    known: Known, lengths_P: Sequence[int], *, keys_P: Sequence[Hashable], degrees: Degrees
) -> int:
    """Return each rank's micro-batches of an optimizer step; samples of equal keys share their prompt."""
    trainer, group_size = known.config.trainer, known.config.loop.group_size
    shares = shares_prompts(
        trainer.training,
        compile=trainer.compile,
        has_context=degrees.cp > 1,
        has_experts=known.spec.model.has_experts,
    )
    families: dict[Hashable, list[int]] = defaultdict(list)
    for place, key in enumerate(keys_P):
        families[key] += range(place * group_size, (place + 1) * group_size)
    plan = plan_micro_batches(
        [length for length in lengths_P for _ in range(group_size)],
        families=list(families.values()) if shares else None,
        max_tokens=trainer.training.max_tokens_per_microbatch,
        num_ranks=degrees.dp,
        max_sequences=trainer.training.max_sequences_per_microbatch,
    )
    return len(plan[0])


def _reply_tokens(known: Known) -> int:
    """Return the most tokens that the model generates in one rollout."""
    loop = known.config.loop
    if known.single_turn:
        return loop.sampling.max_tokens
    return min(known.rollout_limit - 1, loop.episode.max_turns * loop.sampling.max_tokens)


def run_arithmetic(known: Known) -> dict[str, Any]:
    """Return the numbers of all steps, those of an earlier run included."""
    config, loop, checkpoint = known.config, known.config.loop, known.config.trainer.checkpoint
    steps = range(1, loop.num_steps + 1)
    samples = loop.num_steps * loop.groups_per_batch * loop.group_size
    warmup = config.warmup if config.hf_assets_path is None else None
    eval_problems: Any = "none"
    if loop.eval_every:
        sets = None if known.task is None else known.task.eval_sets()
        eval_problems = "not known here" if sets is None else {name: len(s) for name, s in sets.items()}
    return {
        "num_steps": loop.num_steps,
        "done_steps": known.done_steps,
        "optimizer_steps": loop.num_steps * loop.num_minibatches,
        "samples": samples,
        "reply_tokens_most": samples * _reply_tokens(known),
        "publishes": 1 + sum(map(loop.publishes, steps)),
        "evaluations_after": [*chain([0] if loop.eval_every else [], filter(loop.evaluates, steps))],
        "eval_problems": eval_problems,
        "eval_replies_of_problem": 1 + loop.evaluation.num_samples,
        "checkpoints_after": [
            step for step in (0, *steps) if checkpoint.due(step, last=step == loop.num_steps > 0)
        ],
        "warmup_steps": 0 if warmup is None else warmup.num_steps,
        "warmup_demonstrations_of_step": 0 if warmup is None else warmup.num_demonstrations,
    }


def layout(fleet: ClusterConfig, *, degrees: Degrees, num_gpus: int) -> dict[str, Any]:
    """Return hosts, processes and devices of each role; `num_gpus` are the controller's machine's.

    Raises:
        ValueError: `place_actors` refuses the layout.
    """
    trainer_shape = (
        ("replicas", degrees.dp_replicate),
        ("shards", degrees.dp_shard),
        ("context parallel", degrees.cp),
        ("tensor parallel", degrees.tp),
        ("experts over groups of", degrees.ep),
        ("each expert over", degrees.etp),
    )
    generator_shape = (("tensor parallel", fleet.generator.tensor_parallel_degree),)
    shapes = {"trainer": trainer_shape, "reward": ()}
    return {
        place.role: {
            "hosts": place.hosts or "this machine",
            "num_hosts": place.num_hosts,
            "processes_of_host": place.procs_per_host,
            "threads": place.threads,
            "gpus_of_host": "none" if place.gpus is None else list(place.gpus),
            "shape": ", ".join(
                f"{n} {size}" for n, size in shapes.get(place.role, generator_shape) if size > 1
            )
            or "whole",
        }
        for place in place_actors(fleet, num_gpus=num_gpus).all
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


def bytes_on_rank(sizes: dict[str, int], *, spec: ModelSpec, tensor_parallel_degree: int) -> int:
    """Return the bytes that one rank of a generator holds."""
    split = sum(size for name, size in sizes.items() if is_split(name))
    return split // tensor_parallel_degree + sum(sizes.values()) - split


def memory(known: Known, *, degrees: Degrees | None, machine: Machine, on_gpu: bool) -> dict[str, Any]:
    """Estimate the memory of trainer ranks, generator ranks and controller."""
    config = known.config
    sizes = tensor_bytes(known.spec, dtype=config.generator.dtype)
    available = machine.memory_bytes
    if on_gpu:
        assert machine.gpu_bytes is not None, "a machine with GPUs knows their size"
        available = machine.gpu_bytes
    keeps_shared = config.weights.transport == "auto"
    rollouts = staleness(config.loop)["groups_ahead"] * config.loop.group_size
    return {
        "available_bytes": available,
        "trainer": _trainer_memory(known, degrees=degrees, available=available, on_gpu=on_gpu),
        "generator": _generator_memory(known, sizes, available=available, on_gpu=on_gpu),
        "controller": {
            "rollouts_bytes": rollouts * known.rollout_limit * TOKEN_BYTES,
            "shared_weights_bytes": (config.weights.keep_versions + 1) * sum(sizes.values()) * keeps_shared,
        },
    }


def _trainer_memory(known: Known, *, degrees: Degrees | None, available: int, on_gpu: bool) -> Any:
    trainer = known.config.trainer
    if degrees is None:
        return "not known: the layout is refused"
    try:
        estimate = trainer.estimate_memory(known.spec, degrees=degrees, on_gpu=on_gpu)
    except ValueError as error:  # A converter cannot change this model.
        return f"not known: {error}"
    ranks_that_share = 1 if on_gpu else trainer.num_procs
    return {
        "num_ranks": trainer.num_procs,
        **{f"{f.name}_bytes": size for f in fields(estimate) if (size := getattr(estimate, f.name))},
        "held_between_steps_bytes": estimate.held,
        "peak_bytes": estimate.total,
        "fits": ranks_that_share * estimate.total <= available,
    }


def _generator_memory(known: Known, sizes: dict[str, int], *, available: int, on_gpu: bool) -> dict[str, Any]:
    generator, model = known.config.generator, known.spec.model
    degree = generator.tensor_parallel_degree
    num_ranks = generator.num_replicas * degree
    on_rank = bytes_on_rank(sizes, spec=known.spec, tensor_parallel_degree=degree)
    if on_gpu:  # vLLM also takes its activations off this share, so the cache is an upper bound.
        attention = model.block.attention
        itemsize: int = getattr(torch, generator.dtype).itemsize
        heads = attention.num_kv_heads // degree
        token_bytes = 2 * model.num_layers * heads * attention.head_dim * itemsize
        cache = max(0, int(generator.gpu_memory_utilization * available) - on_rank)
        tokens = cache // max(1, token_bytes)
        fits = tokens >= generator.max_model_len  # otherwise the engine does not start
    else:
        cache, tokens = generator.cpu_cache_bytes, generator.cpu_cache_tokens(model)
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


def publish_bytes(known: Known, *, publishes: int) -> dict[str, Any]:
    """Return the bytes of one publish, and of all."""
    generator, weights = known.config.generator, known.config.weights
    sizes = tensor_bytes(known.spec, dtype=generator.dtype)
    degree, pushed = generator.tensor_parallel_degree, sum(sizes.values())
    on_rank = bytes_on_rank(sizes, spec=known.spec, tensor_parallel_degree=degree)
    return {
        "num_tensors": len(sizes),
        "dtype": generator.dtype,
        "transport": weights.transport,
        "pushed_bytes": pushed,
        "pulled_by_rank_bytes": on_rank,
        "pulled_bytes": generator.num_replicas * degree * on_rank,
        "pushed_in_run_bytes": publishes * pushed,
    }
