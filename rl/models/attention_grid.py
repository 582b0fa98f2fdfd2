"""Attention of segments that are padded to grids, as a few large products instead of many small ones.

Shape legend: t packed tokens of this rank, B segments of one grid, L its queries and N its keys of a segment, H query
heads, K key-value heads, G = H / K, M = G L queries of a key-value head, D head size.
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
"""Keys up to which the backward on a CPU computes all scores at once: two to five times faster than PyTorch's
kernel in bfloat16 up to 256 keys, slower from 1,024 (2 cores with AMX)."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Segments of similar size. Padding repeats rows that the segment has."""

    query_rows: Tensor
    """[B * L] int64, row of each query."""
    key_rows: Tensor
    """[B * N] int64, row of each key."""
    num_segments: int
    bias: Tensor | None
    """[B or 1, 1, M, N], 0 where the query sees the key, else -inf; None for the lower triangle."""


@lru_cache(maxsize=8)
def grids_of(
    num_queries: tuple[int, ...],
    num_keys: tuple[int, ...],
    *,
    window: int | None,
    group_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[tuple[Grid, ...], Tensor]:
    """Return the grids of a layout's segments, and each token's row in their joined results, [t] int64.

    All layers of a batch ask for the same grids.
    """
    grids: list[Grid] = []
    # Only the last keys of a segment are within the window of one of its queries.
    widths = [
        n if window is None else min(n, m + window - 1) for m, n in zip(num_queries, num_keys, strict=True)
    ]
    queries, keys = (torch.tensor([0, *sizes]).cumsum(0) for sizes in (num_queries, num_keys))
    places_t = torch.empty(int(queries[-1]), dtype=torch.int64)
    num_rows = 0
    for members in _similar(num_queries, widths):
        lengths_B1, widths_B1 = (
            torch.tensor([sizes[s] for s in members])[:, None] for sizes in (num_queries, widths)
        )
        rows_L, rows_N = (torch.arange(int(sizes.max())) for sizes in (lengths_B1, widths_B1))
        query_rows = queries[members][:, None] + rows_L.minimum(lengths_B1 - 1)
        key_rows = keys[1:][members][:, None] - widths_B1 + rows_N.minimum(widths_B1 - 1)
        is_real_BL = rows_L < lengths_B1
        places_t[query_rows[is_real_BL]] = num_rows + is_real_BL.flatten().nonzero().squeeze(1)
        num_rows += query_rows.numel()
        bias = _bias(lengths_B1, widths_B1, window=window, group_size=group_size)
        grids.append(
            Grid(
                query_rows=query_rows.flatten().to(device),
                key_rows=key_rows.flatten().to(device),
                num_segments=len(members),
                bias=None if bias is None else bias.to(device, dtype),
            )
        )
    return tuple(grids), places_t.to(device)


def _similar(num_queries: Sequence[int], num_keys: Sequence[int]) -> list[list[int]]:
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


def _bias(lengths_B1: Tensor, widths_B1: Tensor, *, window: int | None, group_size: int) -> Tensor | None:
    """Return `Grid.bias`. The last query of a segment sees its last key, the one before all but that."""
    if bool((lengths_B1 == lengths_B1[0]).all() and (widths_B1 == widths_B1[0]).all()):
        lengths_B1, widths_B1 = lengths_B1[:1], widths_B1[:1]
    num_queries, num_keys = int(lengths_B1.max()), int(widths_B1.max())
    is_triangle = len(lengths_B1) == 1 and num_queries == num_keys and (window is None or window >= num_keys)
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


def attend(q_tHD: Tensor, k_nKD: Tensor, v_nKD: Tensor, grids: Sequence[Grid], places_t: Tensor) -> Tensor:
    """Return the attention of each query to the keys of its segment, [t, H, D]."""
    num_kv_heads, group_size = k_nKD.size(1), q_tHD.size(1) // k_nKD.size(1)
    outs = []
    for grid in grids:
        q = q_tHD.index_select(0, grid.query_rows).unflatten(1, (num_kv_heads, group_size))
        q = q.unflatten(0, (grid.num_segments, -1)).permute(0, 2, 3, 1, 4)
        k, v = (
            x.index_select(0, grid.key_rows).unflatten(0, (grid.num_segments, -1)).transpose(1, 2)
            for x in (k_nKD, v_nKD)
        )
        if grid.bias is None:
            q = q.flatten(1, 2)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group_size > 1)
            out = out.unflatten(1, (num_kv_heads, group_size))
        else:
            # The heads that share keys are the queries of one head, so that keys are not repeated.
            by_products = not q.is_cuda and k.size(2) <= MAX_KEYS_OF_PRODUCTS
            function = _Attention.apply if by_products else F.scaled_dot_product_attention
            out = function(q.flatten(2, 3), k, v, grid.bias).unflatten(2, (group_size, -1))
        outs.append(out.permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1, 2))
    return torch.cat(outs).index_select(0, places_t)


class _Attention(torch.autograd.Function):
    """PyTorch's attention [B, K, M, D] with a backward of batched products, which keeps no scores."""

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
