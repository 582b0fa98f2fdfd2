"""The trainer's plan for Qwen3: tensor parallelism with sequence parallelism, then blocks, then FSDP2.

Between the blocks each tensor-parallel rank holds T / tp tokens of full width; inside
attention and feed-forward all T tokens of its own heads and feed-forward rows. A fused
projection gathers the tokens, the output projection scatters them again.

Every parameter becomes a DTensor on the `tp` axis, replicated ones too, so that with FSDP2
all live on one two-dimensional mesh and gradients are right for each.

Context parallelism changes nothing here but the axis that FSDP2 shards over: attention is told
by the batch which tokens are this rank's (`rl/models/attention.py`).
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from rl.distributed.mesh import TP, ParallelismConfig
from rl.distributed.sharding import ShardingOptions, prepare_blocks, shard_data_parallel
from rl.models.converters.low_rank import follow_base_layers
from rl.models.qwen3.model import FeedForward, Qwen3, TransformerBlock

TOKENS = 0
HEADS = 1


def parallelize_qwen3(model: Qwen3, *, mesh: DeviceMesh | None, config: ShardingOptions) -> Qwen3:
    """Shard `model`, best on the meta device, in place; `mesh` None leaves it whole.

    Args:
        mesh: axes `dp_replicate`, `dp_shard`, `cp`, `tp`, each of size 1 or more. The number of
            this rank's tokens in a forward must be a multiple of the size of `tp`.

    Raises:
        ValueError: if the tensor-parallel degree does not divide the key-value heads or the
            vocabulary.
    """
    if mesh is not None and mesh[TP].size() > 1:
        check_tensor_parallel(model.config, mesh[TP].size())
        shard_tensor_parallel(model, mesh[TP])
        follow_base_layers(model)
    prepare_blocks(model.layers, mesh=mesh, options=config)
    if mesh is not None:
        shard_data_parallel(model, blocks=model.layers, mesh=mesh, options=config)
    return model


def check_qwen3_layout(config: Qwen3.Config, parallelism: ParallelismConfig) -> None:
    """Raise ValueError for degrees that a dense Qwen3 of this size cannot be split by."""
    check_tensor_parallel(config, parallelism.tensor_parallel_degree)
    for name in ("expert_parallel_degree", "expert_tensor_parallel_degree"):
        if getattr(parallelism, name) > 1:
            raise ValueError(f"{name}={getattr(parallelism, name)}: must be 1: a dense model has no experts")


def check_tensor_parallel(config: Qwen3.Config, degree: int) -> None:
    """Raise ValueError unless `degree` ranks can share this model.

    Query heads and feed-forward width are multiples of the key-value heads, so these and
    the vocabulary decide.
    """
    for name, size in (
        ("num_kv_heads", config.block.attention.num_kv_heads),
        ("vocab_size", config.vocab_size),
    ):
        if size % degree:
            raise ValueError(f"tensor_parallel_degree={degree} does not divide {name}={size}")


def shard_tensor_parallel(model: Qwen3, mesh: DeviceMesh) -> None:
    """All but feed-forward layers of another kind, which take and give this rank's T / tp tokens."""
    plan: dict[str, ParallelStyle] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(TOKENS)),
        # Stays a DTensor: the head must know that it holds only a part of the tokens.
        "norm": SequenceParallel(sequence_dim=TOKENS),
    }
    if model.lm_head is not None:
        plan["lm_head"] = ColwiseParallel()
    for i, block in enumerate(model.layers):
        assert isinstance(block, TransformerBlock)
        styles = _attention_plan()
        if isinstance(block.feed_forward, FeedForward):
            styles |= _feed_forward_plan()
        plan |= {f"layers.{i}.{part}": style for part, style in styles.items()}
    # Every rank holds the same weights or loads its own part: nothing is sent from rank 0.
    parallelize_module(model, mesh, plan, src_data_rank=None)


def _attention_plan() -> dict[str, ParallelStyle]:
    """And both norms."""
    tokens = SequenceParallel(sequence_dim=TOKENS, use_local_output=True)
    # Each rank norms its own heads with the same weight, whose gradient is then a sum over ranks.
    heads = SequenceParallel(sequence_dim=HEADS, use_local_output=True)
    return {
        "attention_norm": tokens,
        "attention.qkv_proj": ColwiseParallel(input_layouts=Shard(TOKENS)),
        "attention.q_norm": heads,
        "attention.k_norm": heads,
        "attention.o_proj": RowwiseParallel(output_layouts=Shard(TOKENS)),
        "ffn_norm": tokens,
    }


def _feed_forward_plan() -> dict[str, ParallelStyle]:
    return {
        "feed_forward.gate_up_proj": ColwiseParallel(input_layouts=Shard(TOKENS)),
        "feed_forward.down_proj": RowwiseParallel(output_layouts=Shard(TOKENS)),
    }
