"""How old a token's weights may be, and what a publish of the weights moves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from actors.explain.explanation import Staleness, SyncBytes
from actors.explain.known import Known
from actors.run_config import RunConfig
from rl.loop_config import LoopConfig
from rl.models.buffers import persistent_buffers
from rl.models.qwen3.parallelize_generator import is_split
from rl.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class PublishedWeights:
    """The tensors that trainers push and generators pull: the plain model's, adapters merged into it."""

    spec: ModelSpec
    dtype: str
    """Of the generators: what parameters are sent in."""

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """Bytes of each."""
        with torch.device("meta"):
            model = self.spec.model.build()
        dtype: torch.dtype = getattr(torch, self.dtype)

        def num_bytes(tensor: Tensor, *, is_buffer: bool) -> int:
            as_is = is_buffer or not tensor.is_floating_point()
            return tensor.numel() * (tensor.dtype if as_is else dtype).itemsize

        parameters = {name: num_bytes(p, is_buffer=False) for name, p in model.named_parameters()}
        buffers = {name: num_bytes(b, is_buffer=True) for name, b in persistent_buffers(model).items()}
        return parameters | buffers

    @property
    def num_tensors(self) -> int:
        return len(self._sizes)

    @property
    def num_bytes(self) -> int:
        """Of all, once."""
        return sum(self._sizes.values())

    def on_rank(self, tensor_parallel_degree: int) -> int:
        """Bytes of what one rank of a generator holds."""
        split = sum(size for name, size in self._sizes.items() if is_split(name))
        return split // tensor_parallel_degree + self.num_bytes - split


def staleness(loop: LoopConfig) -> Staleness:
    """The bounds that docs/async.md proves, in steps and in optimizer steps."""
    steps = loop.max_policy_age
    # The last minibatch of a step trains weights that its first ones have updated since.
    updates = steps * loop.num_minibatches + loop.num_minibatches - 1
    if not steps:
        sentence = "generation and training take turns: every token is of the weights that a step begins with"
    else:
        sentence = (
            f"generation runs ahead of training by at most {steps} step{'s' * (steps > 1)}: no token is "
            "trained on that is older"
        )
    if loop.publish_every > 1:
        sentence += f"; weights are published every {loop.publish_every} steps"
    return Staleness(
        steps=steps,
        updates=updates,
        groups_ahead=(steps + 1) * loop.num_prompts,
        sentence=sentence,
    )


def sync_bytes(known: Known, *, publishes: int) -> SyncBytes:
    config = known.config
    weights = PublishedWeights(spec=known.spec, dtype=config.generator.dtype)
    generator = config.generator
    on_rank = weights.on_rank(generator.tensor_parallel_degree)
    num_ranks = generator.num_replicas * generator.tensor_parallel_degree
    return SyncBytes(
        num_tensors=weights.num_tensors,
        pushed=weights.num_bytes,
        pulled_by_rank=on_rank,
        pulled=num_ranks * on_rank,
        dtype=generator.dtype,
        way=_way(config),
        publishes=publishes,
        run_pushed=publishes * weights.num_bytes,
    )


def shared_memory_bytes(config: RunConfig, weights: PublishedWeights) -> int:
    """Of the versions that are kept, and of the one that is being written; 0 where none is used."""
    return (config.weights.keep_versions + 1) * weights.num_bytes if config.weights.transport == "auto" else 0


def _way(config: RunConfig) -> str:
    transport, hosts = config.weights.transport, config.launch.hosts
    if transport == "files":
        return f"files in {config.weights.folder or 'the folder of the run'}"
    between = (
        "RDMA where there is hardware, else torchstore's messages"
        if config.weights.rdma
        else ("torchstore's messages")
    )
    if transport == "torchstore":
        return between
    within = "shared memory within a host"
    return within if hosts in ("this", "process") else f"{within}; between hosts {between}"
