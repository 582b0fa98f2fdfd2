"""Causal attention over packed sequences that do not see each other.

Shape legend: T packed tokens, S sequences, L longest sequence, H query heads,
K key-value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceLayout:
    """Where each sequence of a packed batch lies; made once a batch, used by every layer."""

    offsets: Tensor
    """[S+1] int32, first token of each sequence, then T."""
    slots: Tensor
    """[T] int64, place of each token in the padded [S*L] grid."""
    num_sequences: int
    max_length: int

    @classmethod
    def from_lengths(cls, lengths: list[int], *, device: torch.device | str = "cpu") -> SequenceLayout:
        """`lengths` of the sequences in order; they fill the packed axis without gaps."""
        lengths_S = torch.tensor(lengths, dtype=torch.int64)
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        torch.cumsum(lengths_S, 0, out=offsets[1:])
        max_length = max(lengths)
        starts_T = torch.repeat_interleave(torch.arange(len(lengths)) * max_length - offsets[:-1], lengths_S)
        return cls(
            offsets=offsets.to(device=device, dtype=torch.int32),
            slots=(starts_T + torch.arange(int(offsets[-1]))).to(device),
            num_sequences=len(lengths),
            max_length=max_length,
        )


class PackedAttention(nn.Module):
    """Attention of the trainer: flash varlen kernels on a GPU in half precision, else a padded grid.

    The grid costs S*L instead of T positions, for attention alone; a causal mask with
    padding on the right needs no further mask.
    """

    def forward(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, sequences: SequenceLayout) -> Tensor:
        """Returns [T, H, D]."""
        if q_THD.is_cuda and q_THD.dtype in (torch.bfloat16, torch.float16):
            return _varlen_attention(q_THD, k_TKD, v_TKD, sequences)
        q, k, v = (_to_grid(x, sequences) for x in (q_THD, k_TKD, v_TKD))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.size(1) != k.size(1))
        return out.transpose(1, 2).flatten(0, 1).index_select(0, sequences.slots)


def _to_grid(x_THD: Tensor, sequences: SequenceLayout) -> Tensor:
    """[T, H, D] -> [S, H, L, D], zeros in the gaps."""
    size = (sequences.num_sequences * sequences.max_length, *x_THD.shape[1:])
    grid = x_THD.new_zeros(size).index_copy(0, sequences.slots, x_THD)
    return grid.unflatten(0, (sequences.num_sequences, sequences.max_length)).transpose(1, 2)


def _varlen_attention(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, sequences: SequenceLayout) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    repeat = q_THD.size(1) // k_TKD.size(1)
    if repeat > 1:
        k_TKD = k_TKD.repeat_interleave(repeat, dim=1)
        v_TKD = v_TKD.repeat_interleave(repeat, dim=1)
    length = sequences.max_length
    offsets = sequences.offsets
    out = varlen_attn(q_THD, k_TKD, v_TKD, offsets, offsets, length, length, window_size=(-1, 0))
    assert isinstance(out, Tensor)
    return out
