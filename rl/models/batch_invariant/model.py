"""A model whose every token has the same bits whatever is computed beside it.

What depends on the batch is replaced: attention, and the activation between the feed-forward
layers' products, whose exponentials PyTorch rounds differently at the ends of its vectors. Linear
layers stay what they are and get whole tiles of rows (`rows.py`); all else computes each row, or
each number, for itself. On a GPU only PyTorch's own kernels are told not to split sums.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from rl.models.attention import PackedAttention, Segments, SequenceLayout, gather_keys_and_values
from rl.models.batch_invariant.rows import ROW_MULTIPLE
from rl.models.qwen3.model import Attention, FeedForward, Qwen3
from rl.models.spec import ModelSpec


def make_batch_invariant(model: nn.Module, *, spec: ModelSpec, device: torch.device) -> None:
    """Exchange kernels in place, if `spec` says so; parameters stay what they are.

    Of core attentions only the trainer's is exchanged.
    """
    if not spec.batch_invariant:
        return
    on_cpu = device.type == "cpu"
    if not on_cpu:
        _split_no_sums()
    for module in model.modules():
        if isinstance(module, Attention) and isinstance(module.core, PackedAttention):
            module.core = InvariantAttention() if on_cpu else PackedAttention(num_splits=1)
        if isinstance(module, FeedForward) and on_cpu:
            # numba is needed in this mode alone.
            from rl.models.batch_invariant.functions import swiglu

            module.activation = swiglu


def row_multiple(spec: ModelSpec) -> int:
    """Tokens go through a model of `spec` in multiples of it."""
    return ROW_MULTIPLE if spec.batch_invariant else 1


def _split_no_sums() -> None:
    """Of this process's matrix products on a GPU, as vLLM does on Hopper; before the first of them."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    os.environ["CUBLASLT_WORKSPACE_SIZE"] = "1"
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.preferred_blas_library("cublaslt")


def check_batch_invariant_model(config: Qwen3.Config) -> None:
    """Raise ValueError for a model that has layers without such kernels."""
    if not isinstance(config.block.feed_forward, FeedForward.Config):
        raise ValueError(
            "batch_invariant=True: must be False for a mixture of experts, whose products have as many rows "
            "as tokens chose the expert"
        )


class InvariantAttention(nn.Module):
    """Core attention on a CPU, with the kernel that the generator has over its cache."""

    def forward(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, sequences: SequenceLayout | Segments
    ) -> Tensor:
        """Returns [T, H, D]; with a `SequenceShare` all are of this rank's tokens alone."""
        from rl.models.batch_invariant.functions import attend

        if isinstance(sequences, Segments):
            k_NKD, v_NKD = gather_keys_and_values(k_TKD, v_TKD, sequences)
            queries, keys = sequences.query_offsets, sequences.key_offsets
            return attend(q_THD, k_NKD, v_NKD, queries.long().numpy(), keys.long().numpy())
        offsets = sequences.offsets.long().numpy()
        return attend(q_THD, k_TKD, v_TKD, offsets, offsets)
