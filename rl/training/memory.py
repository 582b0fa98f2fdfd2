"""What a layout needs on each device, estimated before anything is allocated.

Exact for parameters, gradients and optimizer state; activations are counted from what each
operation of a block keeps for its backward, without activation checkpointing.

Legend: T tokens of a micro-batch, E model width, H query heads, K key-value heads, D head
size, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl.distributed.mesh import Degrees
from rl.models.qwen3.model import Qwen3
from rl.training.config import TrainingConfig

ADAM_STATES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes on one rank of the trainer."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    """What FSDP gathers of other ranks' shards: the two largest units, in the forward's dtype."""
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return (
            self.parameters + self.gradients + self.optimizer + self.gathered + self.activations + self.logits
        )


def estimate(model: Qwen3.Config, *, degrees: Degrees, training: TrainingConfig) -> MemoryEstimate:
    """Of `model` in this layout, with Adam's two states in the parameters' dtype."""
    with torch.device("meta"):
        module: Qwen3 = model.build()
    num_all = sum(p.numel() for p in module.parameters())
    num_embedding = sum(p.numel() for n, p in module.named_parameters() if not n.startswith("layers"))
    num_block = sum(p.numel() for p in module.layers[0].parameters())
    num_local = -(-num_all // (degrees.tp * degrees.fsdp))
    stored, computed = _size(training.dtype), _size(training.param_dtype)
    sharded = degrees.fsdp > 1
    num_tokens = -(-training.max_tokens_per_microbatch // degrees.cp)
    num_logit_tokens = min(num_tokens, training.logits_chunk_tokens or num_tokens)
    return MemoryEstimate(
        parameters=num_local * stored,
        gradients=num_local * stored,
        optimizer=ADAM_STATES * num_local * stored,
        gathered=(num_embedding + 2 * num_block) // degrees.tp * computed if sharded else 0,
        activations=num_tokens * _activation_bytes(model, degrees.tp, computed),
        # The logits themselves, their float32 form, its softmax and its gradient; gathered over TP.
        logits=num_logit_tokens * model.vocab_size * (computed + 3 * 4),
    )


def _activation_bytes(model: Qwen3.Config, tp: int, itemsize: int) -> int:
    """Kept for the backward for each token, by all blocks."""
    attention, feed_forward = model.block.attention, model.block.feed_forward
    num_query = attention.num_heads * attention.head_dim
    num_key = attention.num_kv_heads * attention.head_dim
    per_block = (
        4 * model.dim  # both norms' inputs and outputs; gathered, the outputs are whole on each rank
        + 3 * (num_query + num_key) // tp  # q and k before the norm, after it, rotated
        + (2 * num_query + num_key) // tp  # v, the attention's output, its copy for the projection
        + 4 * feed_forward.hidden_dim // tp  # gate and up, silu(gate), their product
    )
    return model.num_layers * per_block * itemsize


def _size(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)
