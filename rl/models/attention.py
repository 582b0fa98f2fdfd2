"""Causal attention over packed sequences that do not see each other.

Shape legend: T packed tokens, S sequences, L longest sequence, H query heads, K key-value heads, D head size.
For tokens whose keys are elsewhere (in a prompt that sequences share, or on other context-parallel ranks): t tokens
of this rank and the N keys that they see, segment by segment; a segment is a run of tokens within one sequence.
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
"""Smallest ratio of lengths in one padded grid; padding then costs no more than the calls for more grids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceLayout:
    """Positions of the sequences in a packed batch; built once per batch, used by every layer."""

    offsets: Tensor
    """[S+1] int32, index of each sequence's first token, then T."""
    slots: Tensor
    """[T] int64, position of each token in the padded [S*L] grid."""
    run_slots: Tensor
    """[T] int64, position of each token in the concatenation of one smaller grid per run."""
    runs: tuple[tuple[int, int], ...]
    """Number of sequences and longest length of each run of neighbours with similar lengths."""
    num_sequences: int
    max_length: int

    @classmethod
    def from_lengths(cls, lengths: list[int], *, device: torch.device | str = "cpu") -> SequenceLayout:
        """Build the layout of sequences that fill the packed axis without gaps."""
        runs = _runs(lengths)
        widths = [longest for count, longest in runs for _ in range(count)]
        layout = cls(
            offsets=_offsets(lengths),
            slots=_slots(lengths),
            run_slots=_slots(lengths, widths),
            runs=runs,
            num_sequences=len(lengths),
            max_length=max(lengths),
        )
        return on_device(layout, device)


def _runs(lengths: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Group neighbours while the shortest is at least `SIMILAR` times the longest; return (count, longest)."""
    runs: list[tuple[int, int, int]] = []  # count, shortest, longest
    for length in lengths:
        count, shortest, longest = runs[-1] if runs else (0, 0, 0)
        shortest, longest = min(shortest, length), max(longest, length)
        if shortest >= SIMILAR * longest:
            runs[-1] = (count + 1, shortest, longest)
        else:
            runs.append((1, length, length))
    return tuple((count, longest) for count, _, longest in runs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """Keys that each run of tokens sees if they are elsewhere; built once per batch."""

    query_offsets: Tensor
    """[S+1] int32, index of each segment's first token, then t."""
    key_offsets: Tensor
    """[S+1] int32, index of each segment's first key, then N. A segment's last query sees all of its keys, the
    one before all but the last, and so on."""
    key_rows: Tensor
    """[N] int64, row of each key in the concatenation of all ranks' packed tokens."""
    query_slots: Tensor
    """[t] int64, position of each query in the padded [S * max_queries] grid."""
    key_slots: Tensor
    """[N] int64, position of each key in the padded [S * max_keys] grid."""
    max_queries: int
    max_keys: int
    """Largest number of keys of a segment."""

    @classmethod
    def after_prefixes(cls, lengths: Sequence[int], prefixes: Sequence[tuple[int, int]]) -> Segments:
        """Build segments that fill the packed axis without gaps.

        Args:
            lengths: number of own tokens of each segment.
            prefixes: begin and end of the packed tokens that each segment sees before its own.
        """
        ends = np.cumsum(lengths)
        owns = [(int(end) - length, int(end)) for length, end in zip(lengths, ends, strict=True)]
        keys = [part for prefix, own in zip(prefixes, owns, strict=True) for part in (prefix, own)]
        num_keys = [end - begin + length for length, (begin, end) in zip(lengths, prefixes, strict=True)]
        return cls(**_grids(lengths, num_keys), key_rows=joined_ranges(keys))

    @classmethod
    def of_single_queries(cls, keys: Sequence[np.ndarray]) -> Segments:
        """Build a segment for each query that sees the keys in these rows."""
        num_keys = [len(rows) for rows in keys]
        return cls(**_grids([1] * len(keys), num_keys), key_rows=torch.from_numpy(np.concatenate(keys)))


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceShare(Segments):
    """Keys that the tokens of one context-parallel rank see."""

    num_ranks: int
    group: str
    """Name of the context-parallel process group."""

    @classmethod
    def from_lengths(
        cls, lengths: list[int], *, context: ContextParallel, device: torch.device | str = "cpu"
    ) -> SequenceShare:
        """Build this rank's share of sequences that fill the packed axis without gaps."""
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
    """Return the layout with its tensors on the device."""
    values = {field.name: getattr(layout, field.name) for field in fields(layout)}
    moved: Any = {k: v.to(device, non_blocking=True) for k, v in values.items() if isinstance(v, Tensor)}
    return replace(layout, **moved)


def _grids(queries: Sequence[int], keys: Sequence[int]) -> dict[str, Any]:
    """Return the fields of `Segments` that follow from the numbers of queries and keys."""
    return {
        "query_offsets": _offsets(queries),
        "key_offsets": _offsets(keys),
        "query_slots": _slots(queries),
        "key_slots": _slots(keys),
        "max_queries": max(queries),
        "max_keys": max(keys),
    }


def _offsets(lengths: Sequence[int]) -> Tensor:
    """Return the start of each run and the end of the last, [S+1] int32."""
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def _slots(lengths: Sequence[int], widths: Sequence[int] | None = None) -> Tensor:
    """Return the position of each row if segments are padded to these widths, by default to the longest."""
    ends = np.cumsum(widths or [max(lengths)] * len(lengths))
    starts = [0, *ends[:-1].tolist()]
    return joined_ranges([(start, start + length) for start, length in zip(starts, lengths, strict=True)])


class PackedAttention(nn.Module):
    """The trainer's attention: flash varlen kernels on a GPU in half precision, padded grids otherwise.

    Each run of neighbours of similar length has its own grid; micro-batches hold the longest sequences first. A
    compiled forward uses a single grid of S*L positions, because otherwise every batch would be compiled anew. A
    causal mask with padding on the right needs no further mask.
    """

    def __init__(self, *, num_splits: int | None = None) -> None:
        """Fix the order in which flash kernels sum over keys with `num_splits` 1; None lets them choose."""
        super().__init__()
        self.num_splits = num_splits

    def forward(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, sequences: SequenceLayout | Segments
    ) -> Tensor:
        """Return [T, H, D]; with a `SequenceShare` the tokens are this rank's."""
        if isinstance(sequences, Segments):
            k_NKD, v_NKD = gather_keys_and_values(k_TKD, v_TKD, sequences)
            return attend_in_segments(q_THD, k_NKD, v_NKD, sequences, num_splits=self.num_splits)
        layout, length = sequences, sequences.max_length
        if _has_flash(q_THD):
            offsets = layout.offsets
            return _varlen(q_THD, k_TKD, v_TKD, offsets, offsets, length, length, self.num_splits)
        runs, slots = layout.runs, layout.run_slots
        if torch.compiler.is_compiling():
            runs, slots = ((layout.num_sequences, length),), layout.slots
        sizes = [count * longest for count, longest in runs]
        grids = (_rows(x, slots, sum(sizes)).split(sizes) for x in (q_THD, k_TKD, v_TKD))
        outs = []
        for run, *qkv in zip(runs, *grids, strict=True):
            q, k, v = (x.unflatten(0, run).transpose(1, 2) for x in qkv)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.size(1) != k.size(1))
            outs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outs).index_select(0, slots)


def _has_flash(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


def gather_keys_and_values(k_tKD: Tensor, v_tKD: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Return the keys and values that this rank's tokens see, segment by segment, [N, K, D] each."""
    if isinstance(segments, SequenceShare):
        kv: Tensor = GatherToUse.apply(torch.cat((k_tKD, v_tKD), dim=1), segments.num_ranks, segments.group)
        k_tKD, v_tKD = kv.chunk(2, dim=1)
        return k_tKD.index_select(0, segments.key_rows), v_tKD.index_select(0, segments.key_rows)
    # In float32, because a shared key's gradient is a sum over the sequences that share it.
    wide = torch.promote_types(k_tKD.dtype, torch.float32) if k_tKD.requires_grad else k_tKD.dtype
    k_NKD, v_NKD = (x.to(wide).index_select(0, segments.key_rows).to(x.dtype) for x in (k_tKD, v_tKD))
    return k_NKD, v_NKD


def attend_in_segments(
    q_tHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, segments: Segments, *, num_splits: int | None = None
) -> Tensor:
    """Attend to the keys and values of `gather_keys_and_values`; return [t, H, D]."""
    if _has_flash(q_tHD):
        return _varlen(
            q_tHD, k_NKD, v_NKD, segments.query_offsets, segments.key_offsets,
            segments.max_queries, segments.max_keys, num_splits,
        )  # fmt: skip
    num_segments = segments.query_offsets.numel() - 1
    q = _scatter(q_tHD, segments.query_slots, num_segments, segments.max_queries)
    k = _scatter(k_NKD, segments.key_slots, num_segments, segments.max_keys)
    v = _scatter(v_NKD, segments.key_slots, num_segments, segments.max_keys)
    # Query i of a segment's m queries sees all but the last m - 1 - i keys. Padding sees at least one key;
    # otherwise its softmax and the gradient of the keys would be NaN.
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
    """Scatter [T, H, D] into [S, H, L, D], with zeros in the gaps."""
    return _rows(x_THD, slots, num_rows * length).unflatten(0, (num_rows, length)).transpose(1, 2)


def _rows(x_THD: Tensor, slots: Tensor, count: int) -> Tensor:
    """Scatter [T, H, D] into [count, H, D], with zeros in the gaps."""
    return x_THD.new_zeros((count, *x_THD.shape[1:])).index_copy(0, slots, x_THD)


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
    """Run flash attention; the last query of a segment sees all of its keys."""
    from torch.nn.attention.varlen import varlen_attn

    repeat = q.size(1) // k.size(1)
    if repeat > 1:
        k = k.repeat_interleave(repeat, dim=1)
        v = v.repeat_interleave(repeat, dim=1)
    # PyTorch 2.11 does not have the argument.
    splits: dict[str, Any] = {} if num_splits is None else {"num_splits": num_splits}
    out = varlen_attn(
        q, k, v, query_offsets, key_offsets, max_queries, max_keys, window_size=(-1, 0), **splits
    )
    assert isinstance(out, Tensor)
    return out
