"""Private names of PyTorch, and differences between its versions, that attention needs."""

from __future__ import annotations

import torch
from torch import Tensor

VARLEN_TAKES_GROUPED_HEADS = torch.__version__ >= "2.13"
"""False if flash attention over segments needs the keys repeated for each query head (2.11)."""

_CAUSAL_FROM_LAST = 2
"""The last query sees the last key (`torch.nn.attention.bias.CausalVariant.LOWER_RIGHT`)."""


def attend_varlen(
    q_tHD: Tensor,
    k_NHD: Tensor,
    v_NHD: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    max_queries: int,
    max_keys: int,
) -> Tensor:
    """Return the attention of each segment's queries to its keys, [t, H, D], with memory linear in
    the tokens.

    PyTorch 2.13's public functions take segments in half precision only;
    `scaled_dot_product_attention` of float32 computes all scores if heads share keys.
    """
    inputs = [x.unsqueeze(0) for x in (q_tHD, k_NHD, v_NHD)]
    needs_gradient = any(x.requires_grad for x in inputs)
    out_1tHD: Tensor = torch.ops.aten._efficient_attention_forward(
        *inputs,
        None,
        query_offsets,
        key_offsets,
        max_queries,
        max_keys,
        0.0,
        _CAUSAL_FROM_LAST,
        needs_gradient,
    )[0]
    return out_1tHD.squeeze(0)
