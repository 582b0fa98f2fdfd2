"""Attention of segments that are padded to grids, as a few large products instead of many small
ones.

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
    """Return the grids of a layout's segments. All layers of a batch ask for the same.

    Args:
        shared_rows: `SequenceLayout.key_rows`.
    """
    grids: list[Grid] = []
    # Only the last keys of a segment are within the window of one of its queries.
    widths = [
        n if window is None else min(n, m + window - 1)
        for m, n in zip(num_queries, num_keys, strict=True)
    ]
    queries, keys = (torch.tensor([0, *sizes]).cumsum(0) for sizes in (num_queries, num_keys))
    heads_KG1 = torch.arange(num_kv_heads * group_size).view(num_kv_heads, group_size, 1)
    all_query_rows, all_key_rows, is_real = [], [], []
    for members in _group_similar(num_queries, widths):
        lengths_B1, widths_B1 = (
            torch.tensor([sizes[s] for s in members])[:, None] for sizes in (num_queries, widths)
        )
        rows_L, rows_N = (torch.arange(int(sizes.max())) for sizes in (lengths_B1, widths_B1))
        query_rows_BL = queries[members][:, None] + rows_L.minimum(lengths_B1 - 1)
        key_rows_BN = keys[1:][members][:, None] - widths_B1 + rows_N.minimum(widths_B1 - 1)
        if shared_rows is not None:
            key_rows_BN = shared_rows.cpu()[key_rows_BN]
        query_rows = query_rows_BL[:, None, None] * heads_KG1.numel() + heads_KG1
        all_query_rows.append(query_rows.flatten())
        all_key_rows.append(
            (key_rows_BN[:, None] * num_kv_heads + heads_KG1[:, 0] // group_size).flatten()
        )
        is_real.append((rows_L < lengths_B1)[:, None, None].expand_as(query_rows).flatten())
        bias = _build_bias(lengths_B1, widths_B1, window=window, group_size=group_size)
        bias = None if bias is None else bias.to(device, dtype)
        grids.append(Grid(len(members), len(rows_L), len(rows_N), bias))
    query_rows, is_real_Q = torch.cat(all_query_rows), torch.cat(is_real)
    places = torch.empty(int(queries[-1]) * heads_KG1.numel(), dtype=torch.int64)
    places[query_rows[is_real_Q]] = is_real_Q.nonzero().squeeze(1)
    return Grids(
        members=tuple(grids),
        query_rows=query_rows.to(device),
        fillers=None if is_real_Q.all() else (~is_real_Q).nonzero().squeeze(1).to(device),
        key_rows=torch.cat(all_key_rows).to(device),
        places=places.to(device),
    )


def _group_similar(num_queries: Sequence[int], num_keys: Sequence[int]) -> list[list[int]]:
    """Divide the segments into groups with little padding."""
    groups: list[list[int]] = []
    longest = scores = 0
    for s in sorted(range(len(num_keys)), key=lambda s: (num_keys[s], num_queries[s])):
        own = num_queries[s] * num_keys[s]
        longest, scores = max(longest, num_queries[s]), scores + own
        padded = (len(groups[-1]) + 1) * longest * num_keys[s] if groups else 0
        if not groups or padded > min(MAX_SCORES, MAX_PADDING * scores + FREE_SCORES):
            groups.append([])
            longest, scores = num_queries[s], own
        groups[-1].append(s)
    return groups


def _build_bias(
    lengths_B1: Tensor, widths_B1: Tensor, *, window: int | None, group_size: int
) -> Tensor | None:
    """Return `Grid.bias`. The last query of a segment sees its last key, the one before all but
    that.
    """
    if bool((lengths_B1 == lengths_B1[0]).all() and (widths_B1 == widths_B1[0]).all()):
        lengths_B1, widths_B1 = lengths_B1[:1], widths_B1[:1]
    num_queries, num_keys = int(lengths_B1.max()), int(widths_B1.max())
    is_triangle = (
        len(lengths_B1) == 1 and num_queries == num_keys and (window is None or window >= num_keys)
    )
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
    k_RD, v_RD = (_Repeated.apply(x.reshape(-1, head_dim), grids.key_rows) for x in (k_nKD, v_nKD))
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
    for grid, *rows in parts:
        q, k, v = (x.view(grid.num_segments, num_kv_heads, -1, head_dim) for x in rows)
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
    """Rows in another order; the gradient of a row is the one in row `back` of the result, 0 for a
    filler.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, back: Tensor, fillers: Tensor | None) -> Tensor:
        ctx.back, ctx.fillers = back, fillers
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0].index_select(0, ctx.back)
        return (
            grad if ctx.fillers is None else grad.index_fill_(0, ctx.fillers, 0.0),
            None,
            None,
            None,
        )


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
    """PyTorch's attention [B, K, M, D] with a backward of batched products, which keeps no
    scores.
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
        with torch.enable_grad():
            p = scores.softmax(-1)
        (grad_scores,) = torch.autograd.grad(p, scores, grad @ v.mT)
        p = p.detach()
        grad_q = (grad_scores @ k).mul_(q.size(-1) ** -0.5)
        return grad_q, grad_scores.mT @ q, p.mT @ grad, None
