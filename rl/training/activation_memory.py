"""What a block keeps for its backward, counted operation by operation of rl/models/qwen3/model.py.

Legend: E model width; Q = H D width of the queries (H heads of size D), K width of the keys and of
the values, F feed-forward width. A tensor-parallel rank holds T / tp of T tokens between the
projections, with their full width, and all T tokens of its part of the width inside attention and
feed-forward. Context-parallel ranks have T / cp of a micro-batch's tokens each.

Kernels differ by device. On a GPU a norm keeps its input alone and attention is packed. On a CPU a
norm keeps its input, in float32, and, for the gradient of its weight, that divided by its root mean
square; attention copies queries, keys and values to a padded grid: here as large as the packed
tokens, which it is if all samples are equally long.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from rl.distributed.mesh import Degrees
from rl.models.converters.low_rank import LowRank, adapter_name
from rl.models.qwen3.model import FeedForward, Qwen3, TransformerBlock
from rl.models.qwen3_moe.model import MoE

FLOAT32 = 4
"""Bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockMemory:
    """Bytes of one block on one rank, of a micro-batch."""

    whole: int
    """Kept without activation checkpointing."""
    selected: int
    """Kept by selective checkpointing by operation: results of products and attention, and the input."""
    recomputed: int
    """Computed again where those are kept."""
    input: int
    """Kept by full checkpointing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Linear:
    """What there is to keep of a linear layer beside the results that others need."""

    keeps_input: bool
    """For the gradient of its weight, or of its adapter."""
    low: int = 0
    """Numbers for each token between an adapter's two products."""
    added: int = 0
    """Numbers for each token, of all ranks, that the adapter adds to its result."""
    rows: int = 0
    """Numbers of the adapter's B spread over the columns of several A, of all ranks."""

    @classmethod
    def of(cls, parent: nn.Module, name: str) -> _Linear:
        linear, adapter = getattr(parent, name), getattr(parent, adapter_name(name), None)
        if not isinstance(adapter, LowRank):
            return cls(keeps_input=linear.weight.requires_grad)
        low, (added, rank) = adapter.lora_a.size(0), adapter.lora_b.shape
        return cls(keeps_input=True, low=low, added=added, rows=added * low if low > rank else 0)


def block_memory(
    model: Qwen3.Config,
    block: TransformerBlock,
    *,
    num_tokens: int,
    degrees: Degrees,
    itemsize: int,
    on_gpu: bool,
) -> BlockMemory:
    """Of a block whose forward and backward run in a dtype of `itemsize` bytes.

    Args:
        block: one of the model's, as converters left it: what is frozen keeps no input, what has an
            adapter does.
        num_tokens: of a micro-batch, those that a context-parallel rank has.
    """
    tp, cp = degrees.tp, degrees.cp
    attention = model.block.attention
    width = model.dim
    by_rows = [_Linear.of(block.attention, "qkv_proj")]
    by_columns = [_Linear.of(block.attention, "o_proj")]
    if isinstance(block.feed_forward, FeedForward):
        by_rows.append(_Linear.of(block.feed_forward, "gate_up_proj"))
        by_columns.append(_Linear.of(block.feed_forward, "down_proj"))
    lse = attention.num_heads / tp * FLOAT32
    queries = attention.num_heads * attention.head_dim / tp
    keys = attention.num_kv_heads * attention.head_dim / tp
    kept, products = _feed_forward(model, degrees, keeps_product=by_columns[-1].keeps_input)
    norm = _kept_by_norm(itemsize, trained=block.attention_norm.weight.requires_grad, on_gpu=on_gpu)
    # The projection after a norm keeps its result, under tensor parallelism of all tokens.
    num_results = sum(linear.keeps_input for linear in by_rows)
    if isinstance(block.feed_forward, MoE):
        num_results += block.feed_forward.router.weight.requires_grad
    norms = 2 * norm / tp * width + num_results * itemsize * width
    projected = (queries + 2 * keys) * itemsize
    # Of the queries' norm the input is a copy, of the keys' a view of the projection where it is kept as it
    # is; both results are rotated, which makes a copy.
    view = itemsize if on_gpu or itemsize == FLOAT32 else 0
    rotated = (norm + itemsize) * queries + (norm - view + itemsize) * keys
    core = _core_attention(queries=queries, keys=keys, cp=cp, on_gpu=on_gpu) * itemsize + lse
    if not on_gpu and not by_columns[0].keeps_input:
        core -= queries * itemsize
    # Output and down projection give all tokens, of which a tensor-parallel rank then keeps its part.
    outputs = 2 * width * (1 + (1 / tp if tp > 1 else 0)) * itemsize
    block_input = width / tp * itemsize
    adapters = by_rows + by_columns
    low = sum(linear.low for linear in adapters) * itemsize
    spread = sum(linear.rows for linear in by_rows) / tp + sum(linear.rows for linear in by_columns)
    added = sum(linear.added for linear in by_rows) / tp + sum(linear.added for linear in by_columns)
    whole = norms + projected + rotated + core + kept * itemsize + low
    # Results of all products are kept, needed or not.
    selected = block_input + projected + queries * itemsize + lse + outputs + products * itemsize + low
    return BlockMemory(
        whole=int(num_tokens * whole + spread * itemsize),
        selected=int(num_tokens * (selected + added * itemsize)),
        recomputed=int(num_tokens * max(0, whole - selected) + spread * itemsize),
        input=int(num_tokens * block_input),
    )


def _feed_forward(model: Qwen3.Config, degrees: Degrees, *, keeps_product: bool) -> tuple[float, float]:
    """Numbers for each token: all that is kept, and the results of products among them.

    Gate and up, silu(gate), their product; the down projection's result is counted with the block's.
    """
    feed_forward = model.block.feed_forward
    if not isinstance(feed_forward, MoE.Config):
        assert isinstance(feed_forward, FeedForward.Config)
        hidden = feed_forward.hidden_dim / degrees.tp
        return (4 if keeps_product else 3) * hidden, 2 * hidden
    # Experts that are whole see their part of the tokens, those that are split see all.
    split = degrees.etp if degrees.etp > 1 else 1
    copies = feed_forward.num_experts_per_token / (1 if degrees.etp > 1 else degrees.tp)
    hidden = feed_forward.hidden_dim / split
    # The copy of a token that an expert takes, what it makes of it, and that in the token's order.
    # Selective checkpointing keeps what expert-parallel ranks exchange: rows that arrived, and came back.
    exchanged = 2 * model.dim if degrees.ep > 1 else 0
    return copies * (4 * hidden + 3 * model.dim), copies * (2 * hidden + model.dim + exchanged)


def _kept_by_norm(itemsize: int, *, trained: bool, on_gpu: bool) -> int:
    """Bytes for each number of its input, which is counted with it."""
    if on_gpu:
        return itemsize
    return 2 * FLOAT32 if trained else FLOAT32


def _core_attention(*, queries: float, keys: float, cp: int, on_gpu: bool) -> float:
    """Numbers for each token: what attention and the projection after it take."""
    if on_gpu:
        # Keys and values are repeated for each query head, which is another copy.
        seen = 2 * cp * (queries if queries > keys else keys)
        return seen + queries
    seen = 2 * cp * keys
    return queries + (2 * seen if cp > 1 else seen) + 2 * queries
