"""Private names of PyTorch that the models need, and differences between its versions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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
    """Compute the attention of each segment's queries to its keys, [t, H, D].

    The memory is linear in the tokens. PyTorch 2.13's public functions take segments in half
    precision only; `scaled_dot_product_attention` of float32 computes all scores if heads share
    keys.
    """
    needs_gradient = q_tHD.requires_grad or k_NHD.requires_grad or v_NHD.requires_grad
    out_1tHD: Tensor = torch.ops.aten._efficient_attention_forward(
        q_tHD.unsqueeze(0),
        k_NHD.unsqueeze(0),
        v_NHD.unsqueeze(0),
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


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Return True if a buffer of the module belongs to its weights.

    PyTorch 2.13 tells so only through `state_dict`, whose hooks shard an FSDP model again, even
    while another thread computes with it.
    """
    return buffer not in module._non_persistent_buffers_set


def has_forward_hooks(module: nn.Module) -> bool:
    """Return True if something is registered to run before or after the module's forward.

    PyTorch 2.13 has methods to add hooks and none to list them.
    """
    return bool(module._forward_hooks or module._forward_pre_hooks)
