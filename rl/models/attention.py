"""Causal attention over packed sequences that do not see each other.

Shape legend: T packed tokens, S sequences, L longest sequence, H query heads,
K key-value heads, D head size. Where tokens see keys that do not lie beside them (a prompt that
sequences share, or the tokens of other context-parallel ranks): t tokens of this rank, N keys
that they see, segment by segment; a segment is a run of its tokens within one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl.distributed.collectives import GatherToUse
from rl.distributed.context_parallel import ContextParallel, joined_ranges

Layout = TypeVar("Layout", bound="SequenceLayout | Segments")

SIMILAR = 0.9
"""Lengths that share a padded grid: padding costs no more than the calls that more grids would."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceLayout:
    """Where each sequence of a packed batch lies; made once a batch, used by every layer."""

    offsets: Tensor
    """[S+1] int32, first token of each sequence, then T."""
    slots: Tensor
    """[T] int64, place of each token in the padded [S*L] grid."""
    run_slots: Tensor
    """[T] int64, the same in a smaller grid for each of `runs`, one grid after another."""
    runs: tuple[tuple[int, int], ...]
    """How many sequences and the longest of them: neighbours whose lengths differ little."""
    num_sequences: int
    max_length: int

    @classmethod
    def from_lengths(cls, lengths: list[int], *, device: torch.device | str = "cpu") -> SequenceLayout:
        """`lengths` of the sequences in order; they fill the packed axis without gaps."""
        lengths_S = torch.tensor(lengths, dtype=torch.int64)
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        torch.cumsum(lengths_S, 0, out=offsets[1:])
        max_length = max(lengths)
        runs = _runs(lengths)
        widths_S = torch.tensor([longest for count, longest in runs for _ in range(count)])

        def slots(widths_S: Tensor) -> Tensor:
            starts_S = widths_S.cumsum(0) - widths_S - offsets[:-1]
            return (torch.repeat_interleave(starts_S, lengths_S) + torch.arange(int(offsets[-1]))).to(device)

        return cls(
            offsets=offsets.to(device=device, dtype=torch.int32),
            slots=slots(torch.full_like(lengths_S, max_length)),
            run_slots=slots(widths_S),
            runs=runs,
            num_sequences=len(lengths),
            max_length=max_length,
        )


def _runs(lengths: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Neighbours together as long as the shortest is `SIMILAR` times the longest: (how many, longest)."""
    runs: list[tuple[int, int]] = []
    shortest = 0
    for length in lengths:
        count, longest = runs[-1] if runs else (0, 0)
        if runs and min(shortest, length) >= SIMILAR * max(longest, length):
            runs[-1] = (count + 1, max(longest, length))
            shortest = min(shortest, length)
        else:
            runs.append((1, length))
            shortest = length
    return tuple(runs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """Which keys each run of tokens sees, where they do not lie beside it; made once a batch."""

    query_offsets: Tensor
    """[S+1] int32, first token of each segment, then t."""
    key_offsets: Tensor
    """[S+1] int32, first key of each segment, then N. Its last query sees all of them, the one before
    all but the last, and so on."""
    key_rows: Tensor
    """[N] int64, row of each key in the packed tokens, those of all ranks one after another."""
    query_slots: Tensor
    """[t] int64, place of each query in the padded [S * max_queries] grid."""
    key_slots: Tensor
    """[N] int64, place of each key in the padded [S * max_keys] grid."""
    max_queries: int
    max_keys: int
    """Of one segment."""

    @classmethod
    def after_prefixes(cls, lengths: Sequence[int], prefixes: Sequence[tuple[int, int]]) -> Segments:
        """Segments that fill the packed axis without gaps.

        Args:
            lengths: own tokens of each.
            prefixes: begin and end of the packed tokens that each sees before its own.
        """
        ends = np.cumsum(lengths)
        owns = [(int(end) - length, int(end)) for length, end in zip(lengths, ends, strict=True)]
        keys = [part for prefix, own in zip(prefixes, owns, strict=True) for part in (prefix, own)]
        num_keys = [end - begin + length for length, (begin, end) in zip(lengths, prefixes, strict=True)]
        return cls(**_grids(lengths, num_keys), key_rows=joined_ranges(keys))


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceShare(Segments):
    """Which keys the tokens of one context-parallel rank see; made once a batch, used by every layer."""

    num_ranks: int
    group: str
    """Name of the ranks' process group."""

    @classmethod
    def from_lengths(
        cls, lengths: list[int], *, context: ContextParallel, device: torch.device | str = "cpu"
    ) -> SequenceShare:
        """`lengths` of the sequences in order; they fill the packed axis without gaps."""
        ends = np.cumsum(lengths)
        num_tokens = int(ends[-1])
        queries: list[int] = []
        keys: list[tuple[int, int]] = []
        for start, end in context.pieces(num_tokens):
            first = int(np.searchsorted(ends, start, side="right"))
            last = int(np.searchsorted(ends, end, side="left"))
            for sequence in range(first, last + 1):
                sequence_start = int(ends[sequence]) - lengths[sequence]
                segment_end = min(end, int(ends[sequence]))
                queries.append(segment_end - max(start, sequence_start))
                keys.append((sequence_start, segment_end))
        share = cls(
            **_grids(queries, [end - start for start, end in keys]),
            key_rows=context.places(num_tokens)[joined_ranges(keys)],
            num_ranks=context.num_ranks,
            group=context.group,
        )
        return on_device(share, device)


def on_device(layout: Layout, device: torch.device | str) -> Layout:
    """The same with its tensors there."""
    values = {field.name: getattr(layout, field.name) for field in fields(layout)}
    moved: Any = {k: v.to(device, non_blocking=True) for k, v in values.items() if isinstance(v, Tensor)}
    return replace(layout, **moved)


def _grids(queries: Sequence[int], keys: Sequence[int]) -> dict[str, Any]:
    """Fields of `Segments` that follow from how many queries and keys each has."""
    return {
        "query_offsets": _offsets(queries),
        "key_offsets": _offsets(keys),
        "query_slots": _slots(queries),
        "key_slots": _slots(keys),
        "max_queries": max(queries),
        "max_keys": max(keys),
    }


def _offsets(lengths: Sequence[int]) -> Tensor:
    """[S+1] int32."""
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def _slots(lengths: Sequence[int]) -> Tensor:
    """Place of each row in a grid of one row a segment, padded to the longest."""
    longest = max(lengths)
    return joined_ranges([(i * longest, i * longest + length) for i, length in enumerate(lengths)])


class PackedAttention(nn.Module):
    """Attention of the trainer: flash varlen kernels on a GPU in half precision, else padded grids.

    One grid for each run of neighbours of similar length: micro-batches hold the longest first.
    Compiled, a single one of S*L positions, or every batch would be a program of its own. A
    causal mask with padding on the right needs no further mask.
    """

    def __init__(self, *, num_splits: int | None = None) -> None:
        """`num_splits` 1 lets flash kernels sum over keys in one order; None leaves it to them."""
        super().__init__()
        self.num_splits = num_splits

    def forward(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, sequences: SequenceLayout | Segments
    ) -> Tensor:
        """Returns [T, H, D]; with a `SequenceShare` all are of this rank's tokens alone."""
        if isinstance(sequences, Segments):
            k_NKD, v_NKD = gather_keys_and_values(k_TKD, v_TKD, sequences)
            return attend_in_segments(q_THD, k_NKD, v_NKD, sequences, num_splits=self.num_splits)
        if q_THD.is_cuda and q_THD.dtype in (torch.bfloat16, torch.float16):
            return _varlen_attention(q_THD, k_TKD, v_TKD, sequences, self.num_splits)
        runs, slots = sequences.runs, sequences.run_slots
        if torch.compiler.is_compiling():
            runs, slots = ((sequences.num_sequences, sequences.max_length),), sequences.slots
        return _grid_attention(q_THD, k_TKD, v_TKD, runs, slots)


def _grid_attention(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, runs: Sequence[tuple[int, int]], slots: Tensor
) -> Tensor:
    """[T, H, D], by a padded grid for each of `runs`, in which tokens lie at `slots`."""
    sizes = [count * longest for count, longest in runs]
    grids = ((_rows(x, slots, sum(sizes))).split(sizes) for x in (q_THD, k_TKD, v_TKD))
    outs = []
    for run, *qkv in zip(runs, *grids, strict=True):
        q, k, v = (x.unflatten(0, run).transpose(1, 2) for x in qkv)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.size(1) != k.size(1))
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs).index_select(0, slots)


def gather_keys_and_values(k_tKD: Tensor, v_tKD: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Each [N, K, D], of all that this rank's tokens see, segment by segment."""
    if isinstance(segments, SequenceShare):
        kv: Tensor = GatherToUse.apply(torch.cat((k_tKD, v_tKD), dim=1), segments.num_ranks, segments.group)
        k_tKD, v_tKD = kv.chunk(2, dim=1)
        return k_tKD.index_select(0, segments.key_rows), v_tKD.index_select(0, segments.key_rows)
    # A shared key's gradient is a sum over the sequences that share it; a GPU would sum in half precision.
    wide = torch.promote_types(k_tKD.dtype, torch.float32)
    k_NKD, v_NKD = (x.to(wide).index_select(0, segments.key_rows).to(x.dtype) for x in (k_tKD, v_tKD))
    return k_NKD, v_NKD


def attend_in_segments(
    q_tHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, segments: Segments, *, num_splits: int | None = None
) -> Tensor:
    """[t, H, D]; keys and values are those of `gather_keys_and_values`."""
    if q_tHD.is_cuda and q_tHD.dtype in (torch.bfloat16, torch.float16):
        return _varlen(
            q_tHD, k_NKD, v_NKD, segments.query_offsets, segments.key_offsets,
            segments.max_queries, segments.max_keys, num_splits,
        )  # fmt: skip
    num_segments = segments.query_offsets.numel() - 1
    q = _scatter(q_tHD, segments.query_slots, num_segments, segments.max_queries)
    k = _scatter(k_NKD, segments.key_slots, num_segments, segments.max_keys)
    v = _scatter(v_NKD, segments.key_slots, num_segments, segments.max_keys)
    # Query i of a segment's m sees all but its last m - 1 - i keys. Padding sees no fewer than one, or its
    # softmax would be NaN and so would the gradient of the keys.
    num_keys_S = segments.key_offsets.diff()
    hidden_S = num_keys_S - segments.query_offsets.diff()
    queries, keys = (torch.arange(n, device=q.device) for n in (segments.max_queries, segments.max_keys))
    seen = torch.minimum(queries + hidden_S.unsqueeze(1), num_keys_S.unsqueeze(1) - 1)
    mask = keys <= seen.unsqueeze(2)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask.unsqueeze(1), enable_gqa=q.size(1) != k.size(1)
    )
    return out.transpose(1, 2).flatten(0, 1).index_select(0, segments.query_slots)


def _scatter(x_THD: Tensor, slots: Tensor, num_rows: int, length: int) -> Tensor:
    """[T, H, D] -> [S, H, L, D], zeros in the gaps."""
    return _rows(x_THD, slots, num_rows * length).unflatten(0, (num_rows, length)).transpose(1, 2)


def _rows(x_THD: Tensor, slots: Tensor, count: int) -> Tensor:
    """[T, H, D] -> [count, H, D], zeros in the gaps."""
    return x_THD.new_zeros((count, *x_THD.shape[1:])).index_copy(0, slots, x_THD)


def _varlen_attention(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, sequences: SequenceLayout, num_splits: int | None
) -> Tensor:
    offsets, length = sequences.offsets, sequences.max_length
    return _varlen(q_THD, k_TKD, v_TKD, offsets, offsets, length, length, num_splits)


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    max_queries: int,
    max_keys: int,
    num_splits: int | None,
) -> Tensor:
    """Flash attention; where a segment has more keys than queries, the last query sees all of them."""
    from torch.nn.attention.varlen import varlen_attn

    repeat = q.size(1) // k.size(1)
    if repeat > 1:
        k = k.repeat_interleave(repeat, dim=1)
        v = v.repeat_interleave(repeat, dim=1)
    # Earlier versions of PyTorch do not know the argument.
    splits: dict[str, Any] = {} if num_splits is None else {"num_splits": num_splits}
    out = varlen_attn(
        q, k, v, query_offsets, key_offsets, max_queries, max_keys, window_size=(-1, 0), **splits
    )
    assert isinstance(out, Tensor)
    return out
