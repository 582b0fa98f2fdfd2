"""The trainer's parallel plan for decoders: tensor parallelism with sequence parallelism, experts, FSDP2.

Between the blocks each tensor-parallel rank holds T / tp tokens at full width; inside attention and feed-forward
all T tokens of its own heads and feed-forward rows. A fused projection gathers the tokens, the output projection
scatters them again. Every parameter becomes a DTensor on the `tp` axis, including replicated ones, so that with
FSDP2 all of them live on one two-dimensional mesh and each gradient is right.

Context parallelism only changes the axis that FSDP2 shards over: the batch tells attention which tokens belong
to this rank (`rl.models.attention`).

Experts of a mixture can be split in three ways, alone or together:

- FSDP, like every parameter of a block.
- Expert parallelism: groups of neighbours among the ranks that shard parameters hold different experts and send
  each other tokens. FSDP then shards a rank's experts over the ranks that hold the same ones.
- Tensor parallelism. A rank either keeps its T / tp tokens and all experts, or the layer gathers the tokens, each
  rank computes its part of every expert, and the sums are scattered again. Either way the router's gradient is a
  sum over the ranks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from rl.distributed.expert_parallel import ExpertExchange
from rl.distributed.mesh import DP_REPLICATE, EXPERT, EXPERT_SHARD, TP, ParallelismConfig
from rl.distributed.sharding import ShardingOptions, prepare_blocks, shard_data_parallel
from rl.models.decoder import Decoder, FeedForward, TransformerBlock
from rl.models.low_rank import follow_base_layers
from rl.models.moe import GroupedExperts, MoE

TOKENS = 0
HEADS = 1
EXPERTS = 0
ROWS_OF_EXPERT = 1
COLUMNS_OF_EXPERT = 2


def parallelize_decoder(model: Decoder, *, mesh: DeviceMesh | None, config: ShardingOptions) -> Decoder:
    """Shard the model in place, preferably on the meta device; without a mesh it stays whole.

    Args:
        mesh: axes `dp_replicate`, `dp_shard`, `cp`, `tp`, each of size 1 or more. The number of tokens of a
            forward must be a multiple of the size of `tp`.

    Raises:
        ValueError: if a degree does not divide the model's sizes.
    """
    if mesh is not None and mesh[TP].size() > 1:
        check_tensor_parallel(model.config, mesh[TP].size())
        _shard_tensor_parallel(model, mesh[TP])
        follow_base_layers(model)
    mixtures = [block.feed_forward for block in model.layers if isinstance(block.feed_forward, MoE)]
    if mixtures and config.expert_mesh is not None:
        _check_expert_parallel(mixtures[0].experts.num_experts, config.expert_mesh[EXPERT].size())
    if mesh is not None:
        for layer in mixtures:
            _place_experts(layer, mesh=mesh, config=config)
    prepare_blocks(model.layers, mesh=mesh, options=config)
    if mesh is not None:
        apart = [] if config.expert_mesh is None else _own_meshes(mixtures, config.expert_mesh)
        shard_data_parallel(model, blocks=model.layers, mesh=mesh, options=config, apart=apart)
    return model


def check_decoder_layout(config: Decoder.Config, parallelism: ParallelismConfig) -> None:
    """Raise ValueError for degrees that cannot split a model of these sizes."""
    check_tensor_parallel(config, parallelism.tensor_parallel_degree)
    if isinstance(config.block.feed_forward, MoE.Config):
        _check_expert_parallel(config.block.feed_forward.num_experts, parallelism.expert_parallel_degree)
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


def _check_expert_parallel(num_experts: int, degree: int) -> None:
    if num_experts % degree:
        raise ValueError(f"expert_parallel_degree={degree} does not divide num_experts={num_experts}")


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


def _own_meshes(layers: list[MoE], expert_mesh: DeviceMesh) -> list[tuple[nn.Module, DeviceMesh]]:
    axes = (EXPERT_SHARD,) if expert_mesh[DP_REPLICATE].size() == 1 else (DP_REPLICATE, EXPERT_SHARD)
    return [(layer.experts, expert_mesh[axes]) for layer in layers]


def _place_experts(layer: MoE, *, mesh: DeviceMesh, config: ShardingOptions) -> None:
    """Make router and experts DTensors on the axes over which their gradients are summed or kept apart."""
    tp, expert_mesh = mesh[TP], config.expert_mesh
    split = config.expert_tensor_parallel and tp.size() > 1
    if tp.size() > 1:
        layer.router.weight = _distributed(layer.router.weight, tp, [Replicate()])
    if split:
        layer.register_forward_pre_hook(_GatherTokens(tp))
        layer.register_forward_hook(_ScatterSums(tp))
    rows, columns = (Shard(ROWS_OF_EXPERT), Shard(COLUMNS_OF_EXPERT)) if split else (Replicate(), Replicate())
    if expert_mesh is not None:
        layer.experts.exchange = ExpertExchange(expert_mesh[EXPERT].get_group())
        axes = expert_mesh[EXPERT] if tp.size() == 1 else expert_mesh[EXPERT, TP]
        _distribute_experts(layer.experts, axes, [Shard(EXPERTS), rows], [Shard(EXPERTS), columns])
    elif tp.size() > 1:
        _distribute_experts(layer.experts, tp, [rows], [columns])


def _distribute_experts(
    experts: GroupedExperts, mesh: DeviceMesh, gate_up: list[Placement], down: list[Placement]
) -> None:
    experts.gate_up_proj = _distributed(experts.gate_up_proj, mesh, gate_up[: mesh.ndim])
    experts.down_proj = _distributed(experts.down_proj, mesh, down[: mesh.ndim])


def _distributed(parameter: nn.Parameter, mesh: DeviceMesh, placements: list[Placement]) -> nn.Parameter:
    # Every rank holds the same weights or loads its own part: nothing is sent from rank 0.
    sharded = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


class _GatherTokens:
    """Forward pre-hook from T / tp tokens to all T; gradients of the ranks' partial results are summed."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        split = DTensor.from_local(args[0], self.mesh, [Shard(TOKENS)], run_check=False)
        return (split.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]),)


class _ScatterSums:
    """Forward hook from partial results for all T tokens to the summed result for this rank's T / tp."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __call__(self, module: nn.Module, args: tuple[Any, ...], out_TE: Tensor) -> Tensor:
        parts = DTensor.from_local(out_TE, self.mesh, [Partial()], run_check=False)
        return parts.redistribute(placements=[Shard(TOKENS)]).to_local()
