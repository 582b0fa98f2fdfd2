"""What a block keeps for its backward, counted operation by operation of rl/models/qwen3/model.py.

Legend: E model width; Q = H D width of the queries (H heads of size D), K width of the keys and of
the values, F feed-forward width. A tensor-parallel rank holds T / tp of T tokens between the
projections, with their full width, and all T tokens of its part of the width inside attention and
feed-forward. Context-parallel ranks have T / cp of a micro-batch's tokens each.

Kernels differ by device. On a GPU a norm keeps its input alone and attention is packed. On a CPU a
norm keeps its input, in float32, and that divided by its root mean square, and attention copies
queries, keys and values to a padded grid: here as large as the packed tokens, which it is if all
samples are equally long.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl.distributed.mesh import Degrees
from rl.models.qwen3.model import FeedForward, Qwen3
from rl.models.qwen3_moe.model import MoE

FLOAT32 = 4
"""Bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockMemory:
    """Bytes of one block on one rank for each token of a micro-batch that a context-parallel rank has."""

    whole: float
    """Kept without activation checkpointing."""
    selected: float
    """Kept by selective checkpointing by operation: results of products and attention, and the input."""
    input: float
    """Kept by full checkpointing."""


def block_memory(model: Qwen3.Config, *, degrees: Degrees, itemsize: int, on_gpu: bool) -> BlockMemory:
    """Of a block whose forward and backward run in a dtype of `itemsize` bytes."""
    tp, cp = degrees.tp, degrees.cp
    attention = model.block.attention
    width = model.dim
    lse = attention.num_heads / tp * FLOAT32
    queries = attention.num_heads * attention.head_dim / tp
    keys = attention.num_kv_heads * attention.head_dim / tp
    kept, products = _feed_forward(model, degrees)
    norm = _kept_by_norm(itemsize, on_gpu=on_gpu)
    # The projection after a norm keeps its result, under tensor parallelism of all tokens.
    norms = 2 * (norm / tp + itemsize) * width
    projected = (queries + 2 * keys) * itemsize
    # Of the queries' norm the input is a copy, of the keys' a view of the projection where it is kept as it
    # is; both results are rotated, which makes a copy.
    view = itemsize if on_gpu or itemsize == FLOAT32 else 0
    rotated = (norm + itemsize) * queries + (norm - view + itemsize) * keys
    core = _core_attention(queries=queries, keys=keys, cp=cp, on_gpu=on_gpu) * itemsize + lse
    # Output and down projection give all tokens, of which a tensor-parallel rank then keeps its part.
    outputs = 2 * width * (1 + (1 / tp if tp > 1 else 0)) * itemsize
    block_input = width / tp * itemsize
    return BlockMemory(
        whole=norms + projected + rotated + core + kept * itemsize,
        selected=block_input + projected + queries * itemsize + lse + outputs + products * itemsize,
        input=block_input,
    )


def _feed_forward(model: Qwen3.Config, degrees: Degrees) -> tuple[float, float]:
    """Numbers for each token: all that is kept, and the results of products among them.

    Gate and up, silu(gate), their product; the down projection's result is counted with the block's.
    """
    feed_forward = model.block.feed_forward
    if not isinstance(feed_forward, MoE.Config):
        assert isinstance(feed_forward, FeedForward.Config)
        hidden = feed_forward.hidden_dim / degrees.tp
        return 4 * hidden, 2 * hidden
    # Experts that are whole see their part of the tokens, those that are split see all.
    split = degrees.etp if degrees.etp > 1 else 1
    copies = feed_forward.num_experts_per_token / (1 if degrees.etp > 1 else degrees.tp)
    hidden = feed_forward.hidden_dim / split
    # The copy of a token that an expert takes, what it makes of it, and that in the token's order.
    return copies * (4 * hidden + 3 * model.dim), copies * (2 * hidden + model.dim)


def _kept_by_norm(itemsize: int, *, on_gpu: bool) -> int:
    """Bytes for each number of its input, which is counted with it."""
    return itemsize if on_gpu else FLOAT32 + FLOAT32


def _core_attention(*, queries: float, keys: float, cp: int, on_gpu: bool) -> float:
    """Numbers for each token: what attention and the projection after it take."""
    if on_gpu:
        # Keys and values are repeated for each query head, which is another copy.
        seen = 2 * cp * (queries if queries > keys else keys)
        return seen + queries
    seen = 2 * cp * keys
    return queries + (2 * seen if cp > 1 else seen) + 2 * queries
