"""Settings of the generator's engine, and their checks, without vllm."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from rl.config.configurable import Configurable, unless
from rl.config.tree import check_bounds
from rl.models.parallelize import check_tensor_parallel

CPU_BLOCK = 32
"""Tokens of a cache block on a CPU. vLLM's default of 128 is longer than most prompts, which would
then share nothing."""
SMALLEST_CPU_HEAD_DIM = 32
"""Smaller heads take as much cache as heads of this size."""


@dataclass(kw_only=True, slots=True)
class GeneratorConfig(Configurable.Config):
    """Settings of a `GeneratorEngine`, where they are called `GeneratorEngine.Config`."""

    tensor_parallel_degree: int = 1
    """Processes that share one copy of the model; must divide the key-value heads and the
    vocabulary.
    """
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Dtype of weights, activations and cache; the trainer's weights are cast to it."""
    max_model_len: int = 4096
    """Most tokens of a prompt and its completion together."""
    max_num_seqs: int = 256
    """Most requests in one step; further requests wait."""
    max_num_batched_tokens: int = 8192
    """Most tokens in one step, prompts included; a longer prompt is read in parts."""
    gpu_memory_utilization: float = 0.85
    """Share of a GPU's memory for weights, activations and cache. Not used on a CPU."""
    cpu_kv_cache_gib: float = 1.0
    """Largest number of GiB of each rank's key-value cache on a CPU: it is smaller if that holds
    twice `max_num_seqs` sequences of `max_model_len` tokens. Not used on a GPU."""
    enable_prefix_caching: bool = True
    """Let the samples of a prompt share its cache blocks."""
    enforce_eager: bool = False
    """Run without CUDA graphs. Not used on a CPU."""
    on_update: Literal["drain", "keep", "recompute"] = "drain"
    """Treatment of running requests when weights are updated.

    "drain": running requests finish first, and new ones wait meanwhile. A completion is of one
    version, and so are its logprobs. Costs the wait for the longest completion, while the batch
    empties. "keep": running requests go on under the new weights with the keys and values they
    have. Costs nothing. A completion may be of several versions; a token's logprob is of the
    distribution it was drawn from, which after an update belongs to no single version: new weights
    attend to old keys and values. "recompute": like "keep", but keys and values are computed again
    under the new weights. Costs one prefill of all running prompts and completions. A token's
    logprob is what its version gives for the whole sequence before it."""
    max_lora_rank: int = 64
    """Largest rank of the adapters that are served beside the weights."""
    adapter_memory_gib: float = 1.0
    """Largest number of GiB of each rank's adapters. Those that no request uses make room for
    others, the one that was not used for longest first."""
    can_sleep: bool = False
    """Allow `sleep`. On a GPU, vLLM's allocator then owns weights and cache."""
    seed: int = 0
    """Seed of calls to this engine alone whose sampling settings have none. Without effect in a
    run, where the router gives such calls a seed derived from the run's."""
    num_threads: int = 1
    """CPU threads of each rank."""
    follow_load: bool = field(default=True, metadata=unless("num_threads", 1))
    """Compute with one thread while other processes take the cores of a CPU. In the batch-invariant
    mode only after a test that results are the same; without it never with tensor parallelism."""
    rank_timeout_s: float = field(default=300.0, metadata=unless("tensor_parallel_degree", 1))
    """Longest wait in seconds of a tensor-parallel rank for the others, in a step or an update."""

    def __post_init__(self) -> None:
        check_bounds(self, "seed", at_least=0, below=2**32)
        check_bounds(self, "tensor_parallel_degree", "max_num_seqs", "num_threads", at_least=1)
        check_bounds(self, "cpu_kv_cache_gib", "rank_timeout_s", "adapter_memory_gib", above=0)
        check_bounds(self, "max_lora_rank", at_least=1)
        check_bounds(self, "max_model_len", at_least=2)
        check_bounds(self, "gpu_memory_utilization", above=0, at_most=1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"generator.max_num_batched_tokens={self.max_num_batched_tokens}: must be at least "
                f"max_num_seqs={self.max_num_seqs}, as each running request takes a token a step"
            )

    def check_model(self, model: Any, *, on_gpu: bool | None = None) -> None:
        """Raise ValueError, naming the fields, unless an engine of this config can run the model.

        `on_gpu` None: True if this machine has a GPU.
        """
        check_tensor_parallel(model, self.tensor_parallel_degree)
        if self.max_model_len > model.rope.max_positions:
            raise ValueError(
                f"generator.max_model_len={self.max_model_len} is more than the model's "
                f"max_positions={model.rope.max_positions}"
            )

        # The cache of a GPU is what its memory leaves, which only the started engine can tell.
        if torch.cuda.is_available() if on_gpu is None else on_gpu:
            if model.has_experts and self.dtype != "bfloat16" and not self.enforce_eager:
                raise ValueError(
                    f"generator.enforce_eager=False with generator.dtype={self.dtype}: must be "
                    "True for a mixture of experts, whose products wait for the host in any dtype "
                    "but bfloat16"
                )
            return

        num_tokens = self.count_cpu_cache_tokens(model)
        if self.max_model_len > num_tokens:
            raise ValueError(
                f"generator.cpu_kv_cache_gib={self.cpu_kv_cache_gib:g} holds the keys and values "
                f"of {num_tokens} tokens, fewer than generator.max_model_len={self.max_model_len}"
            )

    def check_adapters(self, *, on_gpu: bool) -> None:
        """Raise ValueError unless an engine of this config can serve adapters beside weights."""
        if on_gpu and not self.enforce_eager:
            raise ValueError(
                "generator.enforce_eager=False with LoRA: must be True on a GPU, where the "
                "products of adapters are in no CUDA graph"
            )

    def count_cpu_cache_tokens(self, model: Any) -> int:
        """Return the tokens that fit into one rank's cache on a CPU, in whole blocks."""
        # vLLM keeps one block empty and points unused entries at it.
        num_blocks = self.count_cpu_cache_bytes(model) // self._count_block_bytes(model) - 1
        return max(0, num_blocks) * CPU_BLOCK

    def count_cpu_cache_bytes(self, model: Any) -> int:
        """Return the bytes of one rank's cache on a CPU, which vLLM zeroes as it starts."""
        # Twice what can run at once: the rest keeps prompts that later requests begin with.
        num_blocks = 2 * self.max_num_seqs * -(-self.max_model_len // CPU_BLOCK) + 1
        largest = int(self.cpu_kv_cache_gib * 2**30)
        return min(largest, num_blocks * self._count_block_bytes(model))

    def _count_block_bytes(self, model: Any) -> int:
        attention = model.block.attention
        num_rows = 2 * model.num_layers * attention.num_kv_heads // self.tensor_parallel_degree
        itemsize: int = getattr(torch, self.dtype).itemsize
        return CPU_BLOCK * num_rows * max(attention.head_dim, SMALLEST_CPU_HEAD_DIM) * itemsize
