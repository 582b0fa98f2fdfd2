"""The engine's memory: what the key-value cache holds on a CPU, and giving memory back for a while."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl.distributed.shards import local_tensor

if TYPE_CHECKING:
    from actors.vllm.engine_config import GeneratorConfig

GIB = 2**30
CPU_BLOCK = 32
"""Tokens of a cache block. vLLM's default of 128 is longer than most prompts here, which then
share nothing."""
SMALLEST_CPU_HEAD_DIM = 32
"""Smaller heads take as much."""


def cpu_cache_tokens(
    model: Any, *, cache_gib: float, dtype: str, tensor_parallel_degree: int, block_size: int | None
) -> int:
    """Tokens whose keys and values fit into one rank's cache, in whole blocks."""
    attention = model.block.attention
    num_rows = 2 * model.num_layers * attention.num_kv_heads // tensor_parallel_degree
    token_bytes = num_rows * max(attention.head_dim, SMALLEST_CPU_HEAD_DIM) * getattr(torch, dtype).itemsize
    block_size = block_size or CPU_BLOCK
    # One block stays empty: vLLM points unused places at it.
    num_blocks = int(cache_gib * GIB) // (token_bytes * block_size) - 1
    return max(0, num_blocks) * block_size


def check_cpu_cache(config: GeneratorConfig, model: Any) -> None:
    """Raises ValueError, naming the fields, if the cache's blocks or its size do not fit the model."""
    if config.block_size is not None and config.block_size % CPU_BLOCK:
        raise ValueError(
            f"generator.block_size={config.block_size}: must be a multiple of {CPU_BLOCK} on a CPU"
        )
    num_tokens = cpu_cache_tokens(
        model,
        cache_gib=config.cpu_kv_cache_gib,
        dtype=config.dtype,
        tensor_parallel_degree=config.tensor_parallel_degree,
        block_size=config.block_size,
    )
    if config.max_model_len > num_tokens:
        raise ValueError(
            f"generator.cpu_kv_cache_gib={config.cpu_kv_cache_gib:g} holds the keys and values of "
            f"{num_tokens} tokens, fewer than generator.max_model_len={config.max_model_len}"
        )


class LentMemory:
    """Memory behind tensors that can be given back while the tensors, and views of them, stay."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = [local_tensor(tensor) for tensor in tensors]
        self._sizes = [tensor.untyped_storage().nbytes() for tensor in self._tensors]

    def give_back(self) -> None:
        """What the tensors held is lost; they must not be touched until `take`."""
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)

    def take(self) -> None:
        """The tensors are zero."""
        for tensor, size in zip(self._tensors, self._sizes, strict=True):
            tensor.untyped_storage().resize_(size)
            tensor.zero_()
