"""What a layout needs on each device, estimated before anything is allocated.

Exact for parameters, gradients and optimizer state; activations are counted from what each
operation of a block keeps for its backward, without activation checkpointing.

Legend: T tokens of a micro-batch, E model width, H query heads, K key-value heads, D head
size, F feed-forward width, V vocabulary; of a mixture, N experts, C chosen for each token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from rl.distributed.mesh import Degrees
from rl.models.qwen3.model import FeedForward, Qwen3
from rl.models.qwen3_moe.model import GroupedExperts, MoE
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
    num_all, num_experts = _num_parameters(module)
    num_block, num_block_experts = _num_parameters(module.layers[0])
    num_embedding = num_all - len(module.layers) * num_block
    # Experts are split by their own degree of tensor parallelism.
    num_rank = (num_all - num_experts) / degrees.tp + num_experts / degrees.etp
    num_local = math.ceil(num_rank / degrees.fsdp)
    num_gathered_block = (num_block - num_block_experts) // degrees.tp
    num_gathered_block += num_block_experts // (degrees.etp * degrees.ep)
    stored, computed = _size(training.dtype), _size(training.param_dtype)
    sharded = degrees.fsdp > 1
    num_tokens = math.ceil(training.max_tokens_per_microbatch / degrees.cp)
    num_logit_tokens = min(num_tokens, training.logits_chunk_tokens or num_tokens)
    return MemoryEstimate(
        parameters=num_local * stored,
        gradients=num_local * stored,
        optimizer=ADAM_STATES * num_local * stored,
        gathered=(num_embedding // degrees.tp + 2 * num_gathered_block) * computed if sharded else 0,
        activations=num_tokens * _activation_bytes(model, degrees, computed),
        # The logits themselves, their float32 form, its softmax and its gradient; gathered over TP.
        logits=num_logit_tokens * model.vocab_size * (computed + 3 * 4),
    )


def _num_parameters(module: nn.Module) -> tuple[int, int]:
    """All, and those of experts among them."""
    experts = [part for part in module.modules() if isinstance(part, GroupedExperts)]
    return (
        sum(p.numel() for p in module.parameters()),
        sum(p.numel() for part in experts for p in part.parameters()),
    )


def _activation_bytes(model: Qwen3.Config, degrees: Degrees, itemsize: int) -> int:
    """Kept for the backward for each token, by all blocks."""
    attention, tp = model.block.attention, degrees.tp
    num_query = attention.num_heads * attention.head_dim
    num_key = attention.num_kv_heads * attention.head_dim
    per_block = (
        4 * model.dim  # both norms' inputs and outputs; gathered, the outputs are whole on each rank
        + 3 * (num_query + num_key) // tp  # q and k before the norm, after it, rotated
        + (2 * num_query + num_key) // tp  # v, the attention's output, its copy for the projection
        + _feed_forward_values(model, degrees)
    )
    return model.num_layers * per_block * itemsize


def _feed_forward_values(model: Qwen3.Config, degrees: Degrees) -> int:
    """Of one block, for each token: gate and up, silu(gate), their product; with experts, C times that."""
    feed_forward = model.block.feed_forward
    if isinstance(feed_forward, MoE.Config):
        # Each copy of a token, what its expert made of it, and the router's scores in float32 and before.
        split = 4 * feed_forward.hidden_dim // degrees.etp
        copies = feed_forward.num_experts_per_token * (2 * model.dim + split) + 3 * feed_forward.num_experts
        return copies if degrees.etp > 1 else copies // degrees.tp
    assert isinstance(feed_forward, FeedForward.Config)
    return 4 * feed_forward.hidden_dim // degrees.tp


def _size(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)
