"""The trainer's parallel plan for decoders: tensor parallelism with sequence parallelism, experts, FSDP2.

Between the blocks each tensor-parallel rank holds T / tp tokens at full width; inside attention and feed-forward
all T tokens of its own heads and feed-forward rows. A fused projection gathers the tokens, the output projection
scatters them again. Every parameter becomes a DTensor on the `tp` axis, including replicated ones, so that with
FSDP2 all of them live on one two-dimensional mesh and each gradient is right.

Context parallelism only changes the axis that FSDP2 shards over: the batch tells attention which tokens belong
to this rank (`rl.models.attention`).
"""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from rl.distributed.mesh import DP_REPLICATE, EXPERT_SHARD, TP, ParallelismConfig
from rl.distributed.sharding import ShardingOptions, prepare_blocks, shard_data_parallel
from rl.models.decoder import Decoder, FeedForward, TransformerBlock
from rl.models.low_rank import follow_base_layers

TOKENS = 0
HEADS = 1


def parallelize_decoder(model: Decoder, *, mesh: DeviceMesh | None, config: ShardingOptions) -> Decoder:
    """Shard the model in place, preferably on the meta device; without a mesh it stays whole.

    Args:
        mesh: axes `dp_replicate`, `dp_shard`, `cp`, `tp`, each of size 1 or more. The number of tokens of a
            forward must be a multiple of the size of `tp`. `check_decoder_layout` allows its sizes.
    """
    if mesh is not None and mesh[TP].size() > 1:
        _shard_tensor_parallel(model, mesh[TP])
        follow_base_layers(model)
    mixtures: list[Any] = [block.feed_forward for block in model.layers] if model.config.has_experts else []
    if mesh is not None:
        for layer in mixtures:
            layer.shard(mesh, config=config)
    prepare_blocks(model.layers, mesh=mesh, options=config)
    if mesh is not None:
        apart = []
        if (expert_mesh := config.expert_mesh) is not None:
            axes = (DP_REPLICATE, EXPERT_SHARD) if expert_mesh[DP_REPLICATE].size() > 1 else (EXPERT_SHARD,)
            apart = [(layer.experts, expert_mesh[axes]) for layer in mixtures]
        shard_data_parallel(model, blocks=model.layers, mesh=mesh, options=config, apart=apart)
    return model


def check_decoder_layout(config: Decoder.Config, parallelism: ParallelismConfig) -> None:
    """Raise ValueError for degrees that cannot split a model of these sizes."""
    check_tensor_parallel(config, parallelism.tensor_parallel_degree)
    if config.has_experts:
        degree = parallelism.expert_parallel_degree
        if config.num_experts % degree:
            raise ValueError(
                f"expert_parallel_degree={degree} does not divide num_experts={config.num_experts}"
            )
        return
    for name in ("expert_parallel_degree", "expert_tensor_parallel_degree"):
        if getattr(parallelism, name) > 1:
            raise ValueError(f"{name}={getattr(parallelism, name)}: must be 1: a dense model has no experts")


def check_tensor_parallel(config: Decoder.Config, degree: int) -> None:
    """Raise ValueError unless the degree divides the key-value heads and the vocabulary.

    Query heads and feed-forward width are multiples of the key-value heads.
    """
    for name, size in (
        ("num_kv_heads", config.block.attention.num_kv_heads),
        ("vocab_size", config.vocab_size),
    ):
        if size % degree:
            raise ValueError(f"tensor_parallel_degree={degree} does not divide {name}={size}")


def _shard_tensor_parallel(model: Decoder, mesh: DeviceMesh) -> None:
    """Apply the plan to all layers except mixtures, which take and return this rank's T / tp tokens."""
    plan: dict[str, ParallelStyle] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(TOKENS)),
        # The output stays a DTensor: the head must know that it holds only a part of the tokens.
        "norm": SequenceParallel(sequence_dim=TOKENS),
    }
    if model.lm_head is not None:
        plan["lm_head"] = ColwiseParallel()
    for i, block in enumerate(model.layers):
        assert isinstance(block, TransformerBlock)
        plan |= {f"layers.{i}.{part}": style for part, style in _block_plan(block).items()}
    # Every rank holds the same weights or loads its own part: nothing is sent from rank 0.
    parallelize_module(model, mesh, plan, src_data_rank=None)


def _block_plan(block: TransformerBlock) -> dict[str, ParallelStyle]:
    tokens = SequenceParallel(sequence_dim=TOKENS, use_local_output=True)
    plan: dict[str, ParallelStyle] = {
        "attention_norm": tokens,
        "attention.qkv_proj": ColwiseParallel(input_layouts=Shard(TOKENS)),
        "attention.o_proj": RowwiseParallel(output_layouts=Shard(TOKENS)),
        "ffn_norm": tokens,
    }
    if block.attention.q_norm is not None:
        # Each rank normalizes its own heads with the same weight, whose gradient is then a sum over ranks.
        heads = SequenceParallel(sequence_dim=HEADS, use_local_output=True)
        plan |= {"attention.q_norm": heads, "attention.k_norm": heads}
    if isinstance(block.feed_forward, FeedForward):
        plan |= {
            "feed_forward.gate_up_proj": ColwiseParallel(input_layouts=Shard(TOKENS)),
            "feed_forward.down_proj": RowwiseParallel(output_layouts=Shard(TOKENS)),
        }
    return plan
