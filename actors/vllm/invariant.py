"""Attention over vLLM's paged cache with the trainer's kernel, for the batch-invariant mode on a CPU.

The cache's memory, its blocks and who owns them are vLLM's; what lies in a block is ours.

Shape legend: T tokens of this step, H and K query and key-value heads of this rank, D head size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

from rl.models.attention import SequenceLayout
from rl.models.batch_invariant.functions import attend_to_cache, store_in_cache
from rl.models.batch_invariant.probe import check_machine
from rl.models.spec import ModelSpec

if TYPE_CHECKING:
    from actors.vllm.engine import GeneratorEngine
    from actors.vllm.model import PagedAttention


def check_generators_machine(
    config: GeneratorEngine.Config, *, model_spec: ModelSpec, hf_assets_path: str
) -> None:
    """Try the model's layers on the calling thread; nothing where the mode is off, or on a GPU.

    Before vLLM is started, which takes the setting of thread counts away from its process.

    Raises:
        ValueError: a layer whose rows depend on their number.
    """
    if not model_spec.batch_invariant or not current_platform.is_cpu():
        return
    folder = Path(hf_assets_path)
    model: Any = model_spec.from_hf_config(json.loads((folder / "config.json").read_text("utf-8")))
    check_machine(
        model,
        dtype=getattr(torch, config.dtype),
        max_rows=config.max_num_batched_tokens,
        tensor_parallel_degree=config.tensor_parallel_degree,
    )


class InvariantPagedAttention(nn.Module):
    """Core attention in place of one that asks vLLM's kernels; that one still asks vLLM for a cache."""

    def __init__(self, paged: PagedAttention) -> None:
        super().__init__()
        self.attention = paged.attention

    def forward(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, sequences: SequenceLayout | None = None
    ) -> Tensor:
        """Returns [T, H, D]. Where sequences lie is in vLLM's forward context."""
        by_layer = get_forward_context().attn_metadata
        out_THD = torch.zeros(q_THD.shape, dtype=q_THD.dtype)
        if by_layer is None:  # vLLM measures how much memory a forward takes.
            return out_THD
        assert isinstance(by_layer, dict)
        metadata = by_layer[self.attention.layer_name]
        assert isinstance(metadata, CPUAttentionMetadata)
        num_tokens = metadata.num_actual_tokens
        cache = self.attention.kv_cache
        block_size = cache.size(2)
        store_in_cache(
            k_TKD[:num_tokens],
            v_TKD[:num_tokens],
            cache,
            slots_T=metadata.slot_mapping[:num_tokens],
            block_size=block_size,
        )
        out_THD[:num_tokens] = attend_to_cache(
            q_THD[:num_tokens],
            cache,
            queries_S=metadata.query_start_loc,
            lengths_S=metadata.seq_lens,
            tables=metadata.block_table,
            block_size=block_size,
        )
        return out_THD
