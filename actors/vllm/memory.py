"""What the key-value cache holds on a CPU, reckoned before an engine exists."""

from __future__ import annotations

from typing import Any

import torch

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
