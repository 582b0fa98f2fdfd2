"""Causal attention over packed sequences that do not see each other.

Shape legend: t packed tokens of this rank, S segments, N keys of all segments, H query heads, K
key-value heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl.distributed.collectives import GatherToUse
from rl.distributed.context_parallel import ContextParallel, join_ranges
from rl.models.compat import VARLEN_TAKES_GROUPED_HEADS, attend_varlen
from rl.models.layers.attention_grid import attend, build_grids
from rl.utils.tensor_memory import to_device

MAX_PADDED_KEYS = 20_000
"""Numbers in the longest segment's keys up to which padding is faster than grids while decoding.

Measured on 2 cores: one call with padding is three times faster than a call for each segment with
40 keys of 2 x 16, and five times slower with 600 keys of 4 x 32.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceLayout:
    """Segments of the packed tokens and the keys that each sees.

    A layout is built once per batch and used by every layer. A segment is a run of tokens within
    one sequence: all of them, unless sequences share a prompt, are split over ranks or continue a
    cache. Its last token sees all of its keys, the token before it all but the last, and so on.

    Example:
        >>> layout = SequenceLayout.from_lengths([3, 2])
        >>> layout.num_queries, layout.query_offsets.tolist()
        ((3, 2), [0, 3, 5])
    """

    num_queries: tuple[int, ...]
    """Number of tokens of each segment."""
    num_keys: tuple[int, ...]
    """Number of keys of each segment."""
    query_offsets: Tensor
    """[S+1] int32, index of each segment's first token, then t."""
    key_offsets: Tensor
    """[S+1] int32, index of each segment's first key, then N."""
    max_queries: int
    """Largest number of tokens of a segment."""
    max_keys: int
    """Largest number of keys of a segment."""
    key_rows: Tensor | None = None
    """[N] int64, row of each key in the concatenation of all ranks' packed tokens; None: each
    segment's keys are those of its own tokens."""
    context: ContextParallel | None = None
    """Ranks that the keys are gathered from."""

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int], *, device: torch.device | str = "cpu"
    ) -> SequenceLayout:
        """Build the layout of whole sequences that fill the packed axis without gaps."""
        return cls._build(lengths, lengths).to(device)

    @classmethod
    def after_prefixes(
        cls, lengths: Sequence[int], prefixes: Sequence[tuple[int, int]]
    ) -> SequenceLayout:
        """Build segments that fill the packed axis and see a prefix before their own tokens.

        Args:
            lengths: number of own tokens of each segment.
            prefixes: begin and end of the packed tokens that each segment sees first.

        Example:
            Two completions, of 2 and 3 tokens, of a prompt of 4 tokens, which is stored once:

            >>> layout = SequenceLayout.after_prefixes([4, 2, 3], [(0, 0), (0, 4), (0, 4)])
            >>> layout.num_keys
            (4, 6, 7)
        """
        return cls.after_paths(lengths, [(prefix,) for prefix in prefixes])

    @classmethod
    def after_paths(
        cls, lengths: Sequence[int], paths: Sequence[Sequence[tuple[int, int]]]
    ) -> SequenceLayout:
        """Build segments as `after_prefixes`, with prefixes that lie in several places.

        Args:
            lengths: number of own tokens of each segment.
            paths: parts of each segment's prefix in order, as begin and end of packed tokens.

        Example:
            A sequence of 6 tokens, a second one that leaves it after 4, and a third that leaves the
            second after one token more:

            >>> layout = SequenceLayout.after_paths([6, 2, 3], [(), [(0, 4)], [(0, 4), (6, 7)]])
            >>> layout.num_keys
            (6, 6, 8)
        """
        keys: list[tuple[int, int]] = []
        num_keys: list[int] = []
        begin = 0
        for length, path in zip(lengths, paths, strict=True):
            keys += [*path, (begin, begin + length)]
            num_keys.append(sum(end - start for start, end in path) + length)
            begin += length
        return cls._build(lengths, num_keys, key_rows=join_ranges(keys))

    @classmethod
    def of_single_queries(
        cls, keys: Sequence[np.ndarray], *, device: torch.device | str = "cpu"
    ) -> SequenceLayout:
        """Build a segment for each query that sees the keys in these rows."""
        rows = torch.from_numpy(np.concatenate(keys))
        return cls._build([1] * len(keys), [len(rows) for rows in keys], key_rows=rows).to(device)

    @classmethod
    def of_rank(
        cls, lengths: Sequence[int], *, context: ContextParallel, device: torch.device | str = "cpu"
    ) -> SequenceLayout:
        """Build a context-parallel rank's part of sequences that fill the packed axis."""
        ends = np.cumsum(lengths)
        num_tokens = int(ends[-1])
        num_queries: list[int] = []
        num_keys: list[int] = []
        keys: list[tuple[int, int]] = []
        for start, end in context.pieces(num_tokens):
            # A piece may hold the end of a sequence, whole sequences, and the begin of another.
            first = int(np.searchsorted(ends, start, side="right"))
            last = int(np.searchsorted(ends, end, side="left"))
            for sequence in range(first, last + 1):
                sequence_start = int(ends[sequence]) - lengths[sequence]
                segment_end = min(end, int(ends[sequence]))
                num_queries.append(segment_end - max(start, sequence_start))
                num_keys.append(segment_end - sequence_start)
                keys.append((sequence_start, segment_end))
        # The gathered keys lie in the order of the ranks, not of the packed tokens.
        rows = context.places(num_tokens)[join_ranges(keys)]
        return cls._build(num_queries, num_keys, key_rows=rows, context=context).to(device)

    @classmethod
    def _build(
        cls, num_queries: Sequence[int], num_keys: Sequence[int], **keys: Any
    ) -> SequenceLayout:
        return cls(
            num_queries=tuple(num_queries),
            num_keys=tuple(num_keys),
            query_offsets=torch.tensor([0, *np.cumsum(num_queries)], dtype=torch.int32),
            key_offsets=torch.tensor([0, *np.cumsum(num_keys)], dtype=torch.int32),
            max_queries=max(num_queries),
            max_keys=max(num_keys),
            **keys,
        )

    @property
    def num_tokens(self) -> int:
        return sum(self.num_queries)

    def to(self, device: torch.device | str) -> SequenceLayout:
        """Return the layout with its tensors on the device."""
        return replace(
            self,
            query_offsets=to_device(self.query_offsets, device),
            key_offsets=to_device(self.key_offsets, device),
            key_rows=None if self.key_rows is None else to_device(self.key_rows, device),
        )


def gather_keys(k_tKD: Tensor, v_tKD: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
    """Return the keys and values that `layout.key_rows` counts."""
    context = layout.context
    if context is None:
        return k_tKD, v_tKD
    # Gathered together: one collective instead of two.
    kv: Tensor = GatherToUse.apply(
        torch.cat((k_tKD, v_tKD), dim=1), context.num_ranks, context.group
    )
    k, v = kv.chunk(2, dim=1)
    return k, v


def select_keys(k_tKD: Tensor, v_tKD: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
    """Return the keys and values that this rank's tokens see, by segment, [N, K, D] each."""
    k_nKD, v_nKD = gather_keys(k_tKD, v_tKD, layout)
    rows = layout.key_rows
    if rows is None:
        return k_nKD, v_nKD
    if layout.context is not None or not k_tKD.requires_grad:
        return k_nKD.index_select(0, rows), v_nKD.index_select(0, rows)

    # In float32, because a shared key's gradient is a sum over the sequences that share it.
    dtype = k_nKD.dtype
    wide = torch.promote_types(dtype, torch.float32)
    k_NKD = k_nKD.to(wide).index_select(0, rows).to(dtype)
    v_NKD = v_nKD.to(wide).index_select(0, rows).to(dtype)
    return k_NKD, v_NKD


class PackedAttention(nn.Module):
    """The trainer's attention: grids of segments on a CPU, kernels for any lengths on a GPU.

    The kernels are flash attention in half precision, and memory-efficient attention in float32.
    """

    def __init__(self, *, window: int | None = None, num_splits: int | None = None) -> None:
        """Set the window and the splits.

        Args:
            window: number of the latest tokens, its own included, that a token sees; None: all.
            num_splits: 1 fixes the order in which flash kernels sum over keys; None lets them
                choose.
        """
        super().__init__()
        self.window = window
        # PyTorch 2.11 does not have the arguments.
        self.options: dict[str, Any] = {"enable_gqa": True} if VARLEN_TAKES_GROUPED_HEADS else {}
        if num_splits is not None:
            self.options["num_splits"] = num_splits
        self.by_segment = AttentionBySegment(window=window)

    def forward(
        self, q_tHD: Tensor, k_tKD: Tensor, v_tKD: Tensor, layout: SequenceLayout
    ) -> Tensor:
        """Return [t, H, D]."""
        in_half = q_tHD.dtype in (torch.bfloat16, torch.float16)
        # The kernel for float32 has no window.
        if not q_tHD.is_cuda or not (in_half or self.window is None):
            k_nKD, v_nKD = gather_keys(k_tKD, v_tKD, layout)
            out_tHD: Tensor = self.by_segment(q_tHD, k_nKD, v_nKD, layout)
            return out_tHD

        k_NKD, v_NKD = select_keys(k_tKD, v_tKD, layout)
        repeat = q_tHD.size(1) // k_NKD.size(1)
        if repeat > 1 and not (in_half and VARLEN_TAKES_GROUPED_HEADS):
            k_NKD = k_NKD.repeat_interleave(repeat, dim=1)
            v_NKD = v_NKD.repeat_interleave(repeat, dim=1)

        offsets = layout.query_offsets, layout.key_offsets
        lengths = layout.max_queries, layout.max_keys
        if not in_half:
            return attend_varlen(q_tHD, k_NKD, v_NKD, *offsets, *lengths)
        from torch.nn.attention.varlen import varlen_attn

        # Tokens before and after a query's own; the latter are 0 because attention is causal.
        window = (-1 if self.window is None else self.window - 1, 0)
        out = varlen_attn(
            q_tHD, k_NKD, v_NKD, *offsets, *lengths, window_size=window, **self.options
        )
        assert isinstance(out, Tensor)
        return out


class HeadExchange(nn.Module):
    """Core attention of context-parallel ranks, each with all packed tokens of its heads.

    Ranks exchange their tokens' heads for other tokens' before the attention, and back after it.
    """

    def __init__(self, core: nn.Module, *, context: ContextParallel) -> None:
        super().__init__()
        self.core = core
        self.context = context

    def forward(
        self, q_tHD: Tensor, k_tKD: Tensor, v_tKD: Tensor, layout: SequenceLayout
    ) -> Tensor:
        """Return [t, H, D]; the layout is that of all ranks' tokens."""
        num_ranks, num_kv_heads = self.context.num_ranks, k_tKD.size(1)
        # Ranks that share the queries of a key-value head get a copy each.
        repeat = num_ranks // math.gcd(num_ranks, num_kv_heads)
        if repeat > 1:
            k_tKD = k_tKD.repeat_interleave(repeat, dim=1)
            v_tKD = v_tKD.repeat_interleave(repeat, dim=1)

        # One exchange of queries, keys and values together.
        parts = [x.unflatten(1, (num_ranks, -1)) for x in (q_tHD, k_tKD, v_tKD)]
        sizes = [part.size(2) for part in parts]
        q, k, v = self.context.to_all_tokens(torch.cat(parts, dim=2)).split(sizes, dim=1)
        return self.context.to_own_tokens(self.core(q, k, v, layout)).flatten(1, 2)


class AttentionBySegment(nn.Module):
    """Attention in grids of segments, or to padded keys while decoding."""

    never_compiled = True
    """Every batch, with other lengths, would be compiled anew."""

    def __init__(self, *, window: int | None = None) -> None:
        super().__init__()
        self.window = window

    def forward(
        self, q_tHD: Tensor, k_nKD: Tensor, v_nKD: Tensor, layout: SequenceLayout
    ) -> Tensor:
        """Return [t, H, D]; keys and values are those of all ranks."""
        num_kv_heads = k_nKD.size(1)
        window = layout.max_keys if self.window is None else min(self.window, layout.max_keys)
        keys_fit = window * k_nKD[0].numel() <= MAX_PADDED_KEYS
        if layout.max_queries == 1 and len(q_tHD) == len(layout.num_queries) and keys_fit:
            return self._attend_single_queries(q_tHD, k_nKD, v_nKD, layout, window)
        grids = build_grids(
            layout.num_queries,
            layout.num_keys,
            layout.key_rows,
            window=self.window,
            num_kv_heads=num_kv_heads,
            group_size=q_tHD.size(1) // num_kv_heads,
            dtype=q_tHD.dtype,
            device=q_tHD.device,
        )
        return attend(q_tHD, k_nKD, v_nKD, grids)

    def _attend_single_queries(
        self, q_SHD: Tensor, k_nKD: Tensor, v_nKD: Tensor, layout: SequenceLayout, window: int
    ) -> Tensor:
        """Return [S, H, D] for segments of one query, padding their last `window` keys."""
        num_kv_heads = k_nKD.size(1)
        begins, ends = layout.key_offsets[:-1], layout.key_offsets[1:]
        rows = begins.maximum(ends - window)[:, None] + torch.arange(window, device=q_SHD.device)
        mask = (rows < ends[:, None])[:, None, None]
        # Rows of the padding are masked, but they must exist.
        rows = rows.clamp(max=sum(layout.num_keys) - 1).flatten()
        rows = rows if layout.key_rows is None else layout.key_rows[rows]
        k = k_nKD.index_select(0, rows).unflatten(0, (-1, window)).transpose(1, 2)
        v = v_nKD.index_select(0, rows).unflatten(0, (-1, window)).transpose(1, 2)
        # The heads that share keys are the queries of one head, so that keys are not repeated.
        q = q_SHD.unflatten(1, (num_kv_heads, -1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).flatten(1, 2)
