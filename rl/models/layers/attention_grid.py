"""Attention of segments that are padded to grids: few large products instead of many small ones.

Shape legend: t packed tokens of this rank, B segments of one grid, L its queries and N its keys of
a segment, H query heads, K key-value heads, G = H / K, M = G L queries of a key-value head, D head
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_PADDING = 1.3
"""Largest ratio of a grid's scores to those of its segments."""
FREE_SCORES = 64 * 64
"""Scores that cost less than another call."""
MAX_SCORES = 1 << 19
"""Largest number of scores per head of a grid of several segments."""
MAX_KEYS_OF_PRODUCTS = 512
"""Keys up to which the backward on a CPU computes all scores at once: two to five times faster than
PyTorch's kernel in bfloat16 up to 256 keys, slower from 1,024 (2 cores with AMX)."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Segments of similar size. Padding repeats rows that the segment has."""

    num_segments: int
    num_queries: int
    """Queries of each segment, L."""
    num_keys: int
    """Keys of each segment, N."""
    bias: Tensor | None
    """[B or 1, 1, M, N], 0 where the query sees the key, else -inf; None for the lower triangle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grids:
    """Grids of all segments of a layout, whose rows are joined. A row is one head of one token."""

    members: tuple[Grid, ...]
    query_rows: Tensor
    """[B K M of all grids] int64, row of each query."""
    fillers: Tensor | None
    """Places of the padding in `query_rows`; None if there is none."""
    key_rows: Tensor
    """[B K N of all grids] int64, row of each key."""
    places: Tensor
    """[t * H] int64, place of each query in `query_rows`."""


@lru_cache(maxsize=4)
def build_grids(
    num_queries: tuple[int, ...],
    num_keys: tuple[int, ...],
    shared_rows: Tensor | None,
    *,
    window: int | None,
    num_kv_heads: int,
    group_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Grids:
    """Return the grids of a layout's segments, from a cache: all layers of a batch need the same.

    Args:
        shared_rows: `SequenceLayout.key_rows`.
    """
    widths = _count_seen_keys(num_queries, num_keys, window=window)
    grids: list[Grid] = []
    query_offsets = torch.tensor([0, *num_queries]).cumsum(0)
    key_offsets = torch.tensor([0, *num_keys]).cumsum(0)
    heads_KG1 = torch.arange(num_kv_heads * group_size).view(num_kv_heads, group_size, 1)
    all_query_rows, all_key_rows, is_real = [], [], []
    for members in _group_similar(num_queries, widths):
        lengths_B1 = torch.tensor([num_queries[s] for s in members])[:, None]
        widths_B1 = torch.tensor([widths[s] for s in members])[:, None]
        rows_L = torch.arange(int(lengths_B1.max()))
        rows_N = torch.arange(int(widths_B1.max()))

        # Padding repeats the last row. Any row that exists would do: results of padding queries are
        # dropped, and padding keys are masked.
        query_rows_BL = query_offsets[members][:, None] + rows_L.minimum(lengths_B1 - 1)
        key_ends_B1 = key_offsets[1:][members][:, None]
        key_rows_BN = key_ends_B1 - widths_B1 + rows_N.minimum(widths_B1 - 1)
        if shared_rows is not None:
            key_rows_BN = shared_rows.cpu()[key_rows_BN]

        # From tokens to heads of tokens, in the order [B, K, G, L] and [B, K, N].
        query_rows = query_rows_BL[:, None, None] * heads_KG1.numel() + heads_KG1
        key_rows = key_rows_BN[:, None] * num_kv_heads + heads_KG1[:, 0] // group_size
        all_query_rows.append(query_rows.flatten())
        all_key_rows.append(key_rows.flatten())
        is_real.append((rows_L < lengths_B1)[:, None, None].expand_as(query_rows).flatten())

        bias = _build_bias(lengths_B1, widths_B1, window=window, group_size=group_size)
        bias = None if bias is None else bias.to(device, dtype)
        grids.append(Grid(len(members), len(rows_L), len(rows_N), bias))

    query_rows, is_real_Q = torch.cat(all_query_rows), torch.cat(is_real)
    places = torch.empty(int(query_offsets[-1]) * heads_KG1.numel(), dtype=torch.int64)
    places[query_rows[is_real_Q]] = is_real_Q.nonzero().squeeze(1)
    return Grids(
        members=tuple(grids),
        query_rows=query_rows.to(device),
        fillers=None if is_real_Q.all() else (~is_real_Q).nonzero().squeeze(1).to(device),
        key_rows=torch.cat(all_key_rows).to(device),
        places=places.to(device),
    )


def _count_seen_keys(
    num_queries: Sequence[int], num_keys: Sequence[int], *, window: int | None
) -> list[int]:
    """Return how many of each segment's last keys are in the window of one of its queries."""
    if window is None:
        return list(num_keys)
    return [min(n, m + window - 1) for m, n in zip(num_queries, num_keys, strict=True)]


def _group_similar(num_queries: Sequence[int], num_keys: Sequence[int]) -> list[list[int]]:
    """Divide the segments into groups with little padding."""
    groups: list[list[int]] = []
    max_queries = scores = 0
    # In the order of their keys, so that the last segment of a group has the most keys.
    for s in sorted(range(len(num_keys)), key=lambda s: (num_keys[s], num_queries[s])):
        scores_of_segment = num_queries[s] * num_keys[s]
        max_queries = max(max_queries, num_queries[s])
        scores += scores_of_segment
        padded = (len(groups[-1]) + 1) * max_queries * num_keys[s] if groups else 0
        if not groups or padded > min(MAX_SCORES, MAX_PADDING * scores + FREE_SCORES):
            groups.append([])
            max_queries, scores = num_queries[s], scores_of_segment
        groups[-1].append(s)
    return groups


def _build_bias(
    lengths_B1: Tensor, widths_B1: Tensor, *, window: int | None, group_size: int
) -> Tensor | None:
    """Return `Grid.bias`: a segment's last query sees all keys, the query before all but one."""
    # Segments of equal size share one bias.
    if bool((lengths_B1 == lengths_B1[0]).all() and (widths_B1 == widths_B1[0]).all()):
        lengths_B1, widths_B1 = lengths_B1[:1], widths_B1[:1]
    num_queries, num_keys = int(lengths_B1.max()), int(widths_B1.max())
    is_triangle = (
        len(lengths_B1) == 1 and num_queries == num_keys and (window is None or window >= num_keys)
    )
    # PyTorch's kernel skips the upper half of a triangle only if no bias describes it.
    if is_triangle and num_keys > MAX_KEYS_OF_PRODUCTS:
        return None

    rows_L, columns_N = torch.arange(num_queries), torch.arange(num_keys)
    # The latest key that each query sees. A padding query sees what the last one sees.
    latest_BL1 = (widths_B1 - lengths_B1 + rows_L).minimum(widths_B1 - 1)[:, :, None]
    is_seen_BLN = columns_N <= latest_BL1
    if window is not None:
        is_seen_BLN &= columns_N > latest_BL1 - window
    bias_BLN = torch.zeros(is_seen_BLN.shape).masked_fill_(~is_seen_BLN, -torch.inf)
    return bias_BLN.repeat(1, group_size, 1).unsqueeze(1)


def attend(q_tHD: Tensor, k_nKD: Tensor, v_nKD: Tensor, grids: Grids) -> Tensor:
    """Return the attention of each query to the keys of its segment, [t, H, D]."""
    num_heads, num_kv_heads, head_dim = q_tHD.size(1), k_nKD.size(1), q_tHD.size(2)
    # One row for each head of a token, so that a single copy brings the heads into the order of the
    # products.
    q_QD = _Rearranged.apply(q_tHD.reshape(-1, head_dim), grids.query_rows, grids.places, None)
    k_RD = _Repeated.apply(k_nKD.reshape(-1, head_dim), grids.key_rows)
    v_RD = _Repeated.apply(v_nKD.reshape(-1, head_dim), grids.key_rows)

    num_queries = [num_heads * grid.num_segments * grid.num_queries for grid in grids.members]
    num_keys = [num_kv_heads * grid.num_segments * grid.num_keys for grid in grids.members]
    parts = zip(
        grids.members,
        q_QD.split(num_queries),
        k_RD.split(num_keys),
        v_RD.split(num_keys),
        strict=True,
    )
    outs = []
    for grid, q_rows, k_rows, v_rows in parts:
        shape = (grid.num_segments, num_kv_heads, -1, head_dim)
        q, k, v = q_rows.view(shape), k_rows.view(shape), v_rows.view(shape)
        if grid.bias is None:
            q = q.unflatten(2, (-1, grid.num_queries)).flatten(1, 2)
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=num_heads > num_kv_heads
            )
        else:
            # The heads that share keys are the queries of one head, so that keys are not repeated.
            by_products = not q.is_cuda and k.size(2) <= MAX_KEYS_OF_PRODUCTS
            function = _Attention.apply if by_products else F.scaled_dot_product_attention
            out = function(q, k, v, grid.bias)
        outs.append(out.reshape(-1, head_dim))
    out_QD = torch.cat(outs)
    return _Rearranged.apply(out_QD, grids.places, grids.query_rows, grids.fillers).view_as(q_tHD)


class _Rearranged(torch.autograd.Function):
    """Rows in another order; a row's gradient is that of row `back` of the result.

    The gradient of a filler is 0.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, back: Tensor, fillers: Tensor | None) -> Tensor:
        ctx.back, ctx.fillers = back, fillers
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # A selection, where the gradient of `index_select` would add rows up one by one.
        grad = grads[0].index_select(0, ctx.back)
        if ctx.fillers is not None:
            grad = grad.index_fill_(0, ctx.fillers, 0.0)
        return grad, None, None, None


class _Repeated(torch.autograd.Function):
    """Rows, some of them several times, whose gradients are summed in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.rows, ctx.num_rows = rows, len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros(ctx.num_rows, grad.size(1), dtype=wide)
        total.scatter_add_(0, ctx.rows[:, None].expand_as(grad), grad.to(wide))
        return total.to(grad.dtype), None


class _Attention(torch.autograd.Function):
    """PyTorch's attention [B, K, M, D] with a backward of batched products.

    The scores are computed again in the backward rather than kept.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v, bias)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, bias), (grad,) = ctx.saved_tensors, grads
        q = q * q.size(-1) ** -0.5
        scores = (q @ k.mT).add_(bias).requires_grad_()
        # PyTorch's own gradient of the softmax is one fused pass.
        with torch.enable_grad():
            p = scores.softmax(-1)
        (grad_scores,) = torch.autograd.grad(p, scores, grad @ v.mT)
        p = p.detach()
        grad_q = (grad_scores @ k).mul_(q.size(-1) ** -0.5)
        return grad_q, grad_scores.mT @ q, p.mT @ grad, None
