"""What each process of a run needs, in bytes: the estimates that a run itself is checked with."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from actors.explain.explanation import ControllerMemory, GeneratorMemory, Memory, TrainerMemory, Unknown
from actors.explain.known import Known
from actors.explain.machine import Machine
from actors.explain.weights import PublishedWeights, shared_memory_bytes, staleness
from actors.vllm.memory import GIB, cpu_cache_tokens
from rl.distributed.mesh import Degrees

TOKEN_BYTES = 12
"""Of a rollout: its id, its logprob and its policy version."""


def memory(known: Known, *, degrees: Degrees | Unknown, machine: Machine, on_gpu: bool) -> Memory:
    weights = PublishedWeights(spec=known.spec, dtype=known.config.generator.dtype)
    return Memory(
        trainer=degrees
        if isinstance(degrees, Unknown)
        else _trainer(known, degrees=degrees, machine=machine, on_gpu=on_gpu),
        generator=_generator(known, weights, machine=machine, on_gpu=on_gpu),
        controller=_controller(known, weights),
    )


def _trainer(known: Known, *, degrees: Degrees, machine: Machine, on_gpu: bool) -> TrainerMemory | Unknown:
    trainer = known.config.trainer
    try:
        estimate = trainer.estimate_memory(known.spec, degrees=degrees, on_gpu=on_gpu)
    except ValueError as error:  # A converter cannot change this model.
        return Unknown(why=str(error))
    available, of_all = _available(machine, on_gpu=on_gpu), 1 if on_gpu else trainer.num_procs
    return TrainerMemory(
        num_ranks=trainer.num_procs,
        parts={f.name: getattr(estimate, f.name) for f in fields(estimate)},
        held=estimate.held,
        total=estimate.total,
        available=available,
        fits=of_all * estimate.total <= available,
    )


def _generator(
    known: Known, weights: PublishedWeights, *, machine: Machine, on_gpu: bool
) -> GeneratorMemory | Unknown:
    generator, model = known.config.generator, known.spec.model
    degree = generator.tensor_parallel_degree
    num_ranks = generator.num_replicas * degree
    on_rank = weights.on_rank(degree)
    available = _available(machine, on_gpu=on_gpu)
    if on_gpu:
        share = int(generator.gpu_memory_utilization * available)
        cache = max(0, share - on_rank)
        tokens = cache // _token_bytes(model, dtype=generator.dtype, degree=degree)
        fits = tokens >= generator.max_model_len  # or the engine does not start
    else:
        cache = int(generator.cpu_kv_cache_gib * GIB)
        tokens = cpu_cache_tokens(
            model,
            cache_gib=generator.cpu_kv_cache_gib,
            dtype=generator.dtype,
            tensor_parallel_degree=degree,
            block_size=generator.block_size,
        )
        fits = num_ranks * (on_rank + cache) <= available
    return GeneratorMemory(
        num_ranks=num_ranks,
        weights=on_rank,
        cache=cache,
        cache_tokens=tokens,
        longest_requests=tokens // generator.max_model_len,
        available=available,
        fits=fits,
    )


def _controller(known: Known, weights: PublishedWeights) -> ControllerMemory:
    loop = known.config.loop
    rollouts = staleness(loop).groups_ahead * loop.num_samples
    return ControllerMemory(
        rollouts=rollouts * known.rollout_limit * TOKEN_BYTES,
        shared_weights=shared_memory_bytes(known.config, weights),
    )


def _token_bytes(model: Any, *, dtype: str, degree: int) -> int:
    """Keys and values of one token on one rank of a GPU."""
    import torch

    attention = model.block.attention
    heads = attention.num_kv_heads // degree
    itemsize: int = getattr(torch, dtype).itemsize
    return max(1, 2 * model.num_layers * heads * attention.head_dim * itemsize)


def _available(machine: Machine, *, on_gpu: bool) -> int:
    """Of a GPU, or of the machine."""
    if not on_gpu:
        return machine.memory_bytes
    assert machine.gpu_bytes is not None, "a machine that has GPUs knows their size"
    return machine.gpu_bytes
