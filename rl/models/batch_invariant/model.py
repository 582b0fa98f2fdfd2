"""Batch-invariant mode: a token's bits do not depend on the rest of the batch.

Operations that depend on the batch are replaced: attention, and the activation between the
feed-forward layers' products, whose exponentials PyTorch rounds differently at the ends of its
vectors. Linear layers stay and get whole tiles of rows: products of a few rows use other kernels
than large ones, which sum in another order, but at a multiple of `ROW_MULTIPLE` rows each row has
the same bits whatever the number; `probe.py` verifies this on the machine. All other operations
compute each row, or each number, independently.

Trainer and generator have the same kernels, and so the same bits, on CPUs only. On a GPU they share
products, norms and log-softmax (cuBLASLt without split sums, vLLM's batch-invariant kernels), but
not attention: the trainer's has a gradient (PyTorch's flash attention 2, memory-efficient attention
in float32), vLLM's reads a paged cache (flash attention 3, Triton in float32). Each sums in an
order of its own, which does not depend on the batch.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl.models.decoder import Attention, Decoder, FeedForward
from rl.models.layers.attention import PackedAttention, SequenceLayout, select_keys
from rl.models.spec import ModelSpec

ROW_MULTIPLE = 32
"""Row count of a tile; token counts of forwards are multiples of it in trainer and generator."""


def pad_rows(x: Tensor, multiple: int = ROW_MULTIPLE) -> Tensor:
    """Pad [T, ...] with zeros to a multiple of rows."""
    padding = -x.size(0) % multiple
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, padding)) if padding else x


def make_batch_invariant(model: nn.Module, *, spec: ModelSpec, device: torch.device) -> None:
    """Replace kernels in place if the spec asks for it; of core attentions only the trainer's."""
    if not spec.batch_invariant:
        return
    on_cpu = device.type == "cpu"
    if not on_cpu:
        _split_no_sums()
    for module in model.modules():
        if isinstance(module, Decoder):
            # Trainer and samplers pad the tokens of each forward to it.
            module.row_multiple = ROW_MULTIPLE
        if isinstance(module, Attention) and isinstance(module.core, PackedAttention):
            window = module.core.window
            on_gpu = PackedAttention(window=window, num_splits=1)
            module.core = InvariantAttention(window=window) if on_cpu else on_gpu
        if isinstance(module, FeedForward) and on_cpu:
            # Imported here, because only this mode needs numba.
            from rl.models.batch_invariant.functions import geglu, swiglu

            module.activation = {"swiglu": swiglu, "geglu": geglu}[module.config.activation]


def get_row_multiple(spec: ModelSpec) -> int:
    """Return the number whose multiples are valid token counts for the spec's model."""
    return ROW_MULTIPLE if spec.batch_invariant else 1


def _split_no_sums() -> None:
    """Configure this process's matrix products on a GPU as vLLM does on Hopper, before the first
    product.
    """
    # The libraries read these when they are first used.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    os.environ["CUBLASLT_WORKSPACE_SIZE"] = "1"
    matmul: Any = torch.backends.cuda.matmul
    # Reduced precision, and splitting the sum: a bool alone would allow to split.
    matmul.allow_fp16_reduced_precision_reduction = (False, False)
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.preferred_blas_library("cublaslt")


def check_capability(capability: tuple[int, int]) -> None:
    """Raise ValueError for a GPU for which vLLM's batch-invariant kernels have no gradient."""
    if capability < (9, 0):
        raise ValueError(
            "batch_invariant=True: must be False on a GPU of compute capability "
            f"{capability[0]}.{capability[1]}, for which vLLM's kernels have no gradient: needs at "
            "least 9.0"
        )


def check_batch_invariant_model(config: Decoder.Config) -> None:
    """Raise ValueError for a model with layers that have no batch-invariant kernels."""
    if config.has_experts:
        raise ValueError(
            "batch_invariant=True: must be False for a mixture of experts, whose products have as "
            "many rows as tokens chose the expert"
        )


class InvariantAttention(nn.Module):
    """Core attention on a CPU, with the kernel that the generator applies to its cache."""

    def __init__(self, *, window: int | None = None) -> None:
        super().__init__()
        self.window = window

    def forward(
        self, q_tHD: Tensor, k_tKD: Tensor, v_tKD: Tensor, layout: SequenceLayout
    ) -> Tensor:
        """Return [t, H, D]."""
        from rl.models.batch_invariant.functions import attend

        k_NKD, v_NKD = select_keys(k_tKD, v_tKD, layout)
        queries_S, keys_S = (x.long().numpy() for x in (layout.query_offsets, layout.key_offsets))
        return attend(q_tHD, k_NKD, v_NKD, queries_S, keys_S, window=self.window)
