"""The parallel plans for decoders: the trainer's and the generator's.

The trainer has tensor parallelism with sequence parallelism, experts and FSDP2. Between the blocks
each tensor-parallel rank holds T / tp tokens at full width; inside attention and feed-forward all T
tokens of its own heads and feed-forward rows. A fused projection gathers the tokens, the output
projection scatters them again. Every parameter becomes a DTensor on the `tp` axis, including
replicated ones, so that with FSDP2 all of them live on one two-dimensional mesh and each gradient
is right. Context parallelism changes the axis that FSDP2 shards over; the batch tells attention
which tokens belong to this rank, or ranks exchange tokens for heads around it
(`rl.models.layers.attention`).

Pipeline parallelism divides the model into parts (`rl.distributed.stages`), each with some of the
layers, which FSDP2 always wraps: it casts their parameters, and sums their gradients once in a pass
of all micro-batches.

The generator has tensor parallelism alone, for any number of tokens, and no backward. Every rank
sees all tokens. The fused projections, the embedding and the output head hold this rank's rows; the
output projections hold its columns and sum their results over the ranks. A mixture's router is
whole on every rank and chooses the same experts there; each rank computes its part of each expert,
and one sum per layer combines the parts. Parameters are DTensors, so weights move between this
layout and any other by name. The forward works on their local shards with explicit collectives,
because DTensor's dispatch costs a small layer several times its arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from rl.distributed.context_parallel import ContextParallel
from rl.distributed.mesh import CP, DP_REPLICATE, EXPERT_SHARD, TP, ParallelismConfig
from rl.distributed.pipeline import Pipeline
from rl.distributed.sharding import (
    ShardingOptions,
    distribute,
    local_tensor,
    prepare_blocks,
    shard_data_parallel,
)
from rl.distributed.stages import plan_stages
from rl.models.decoder import (
    Attention,
    Decoder,
    Elsewhere,
    FeedForward,
    TransformerBlock,
    list_module_names,
    take_part,
)
from rl.models.layers.attention import HeadExchange
from rl.models.low_rank.layer import follow_base_weights

TOKENS = 0
HEADS = 1
"""Dimensions of activations."""
ROWS = 0
COLUMNS = 1
"""Dimensions of weights."""
_GENERATOR_SPLITS = {
    "embed_tokens": ROWS,
    "lm_head": ROWS,
    "qkv_proj": ROWS,
    "gate_up_proj": ROWS,
    "o_proj": COLUMNS,
    "down_proj": COLUMNS,
}
"""Dimension over which the generator's plan splits each layer's weight."""


# The trainer


def parallelize_decoder(
    model: Decoder,
    *,
    mesh: DeviceMesh | None,
    config: ShardingOptions,
    pipeline: Pipeline | None = None,
) -> list[Decoder]:
    """Shard the model in place, preferably on the meta device; without a mesh it stays whole.

    Returns the model, or with a pipeline the parts of this rank, one for each of its stages.

    Args:
        mesh: axes `dp_replicate`, `dp_shard`, `cp`, `tp`, each of size 1 or more, perhaps behind
            `pp`. The number of tokens of a forward must be a multiple of the size of `tp`.
            `check_decoder_layout` allows its sizes.
    """
    # Tensor parallelism first: FSDP2 shards what it leaves to a rank, on a second axis of the mesh.
    if mesh is not None:
        if mesh[TP].size() > 1:
            _shard_tensor_parallel(model, mesh[TP])
        if config.parallelism.exchanges_heads:
            _exchange_heads(model, ContextParallel.of(mesh[CP]))
        for layer in _find_mixtures(model):
            layer.shard(mesh, config=config)
        follow_base_weights(model)

    # Recomputation and compilation wrap the blocks, and FSDP2 must wrap the result.
    prepare_blocks(model.layers, mesh=mesh, options=config)
    parts = [model] if pipeline is None else _take_parts(model, pipeline)
    if mesh is None:
        return parts

    for part in parts:
        apart = []
        expert_mesh = config.expert_mesh
        if expert_mesh is not None:
            # Experts are sharded over the ranks that hold the same experts, not over all.
            is_replicated = expert_mesh[DP_REPLICATE].size() > 1
            axes = (DP_REPLICATE, EXPERT_SHARD) if is_replicated else (EXPERT_SHARD,)
            apart = [(layer.experts, expert_mesh[axes]) for layer in _find_mixtures(part)]
        blocks = [block for block in part.layers if not isinstance(block, Elsewhere)]
        shard_data_parallel(
            part, blocks=blocks, mesh=mesh, options=config, apart=apart, always=pipeline is not None
        )
    return parts


def _exchange_heads(model: Decoder, context: ContextParallel | None) -> None:
    """Let ranks exchange tokens for heads around each attention; None changes nothing."""
    if context is None:
        return
    for module in list(model.modules()):
        if isinstance(module, Attention):
            module.core = HeadExchange(module.core, context=context)


def _take_parts(model: Decoder, pipeline: Pipeline) -> list[Decoder]:
    """Return the model's part of each of this rank's stages."""
    parts = [take_part(model, pipeline.plan.modules[stage]) for stage in pipeline.stages]
    # The embedding of a tied model is in the first stage. The last stage has a copy as its head.
    if model.config.tie_embeddings and pipeline.stages[-1] == pipeline.num_stages - 1:
        weight = model.embed_tokens.weight
        head = nn.Linear(model.config.dim, model.config.vocab_size, bias=False, device="meta")
        head.weight = nn.Parameter(torch.empty_like(weight), requires_grad=weight.requires_grad)
        parts[-1].lm_head = head
    return parts


def _find_mixtures(model: Decoder) -> list[Any]:
    """Return the mixtures of experts of this rank's layers."""
    if not model.config.has_experts:
        return []
    return [block.feed_forward for block in model.layers if not isinstance(block, Elsewhere)]


def check_decoder_layout(config: Decoder.Config, parallelism: ParallelismConfig) -> None:
    """Raise ValueError for degrees that cannot split a model of these sizes."""
    whole_experts = config.has_experts and parallelism.expert_tensor_parallel_degree == 1
    check_tensor_parallel(config, parallelism.tensor_parallel_degree, whole_experts=whole_experts)
    num_heads = config.block.attention.num_heads // parallelism.tensor_parallel_degree
    if parallelism.exchanges_heads and num_heads % parallelism.context_parallel_degree:
        raise ValueError(
            f"context_parallel_degree={parallelism.context_parallel_degree} with "
            f"context_parallel_rotation='alltoall' must divide the {num_heads} query heads of a "
            f"tensor-parallel rank (num_heads={config.block.attention.num_heads}): choose another "
            "degree, or context_parallel_rotation='allgather'"
        )
    degree = parallelism.pipeline_parallel_degree
    if degree > 1:
        owner: Any = config.owner
        if owner.forward is not Decoder.forward:
            raise ValueError(
                f"pipeline_parallel_degree={degree}: must be 1, because {owner.__qualname__} has a "
                "forward of its own, which each stage would run"
            )
        plan_stages(parallelism, list_module_names(config))
    if config.has_experts:
        degree = parallelism.expert_parallel_degree
        if config.num_experts % degree:
            raise ValueError(
                f"expert_parallel_degree={degree} does not divide num_experts={config.num_experts}"
            )
        return
    for name in ("expert_parallel_degree", "expert_tensor_parallel_degree"):
        if getattr(parallelism, name) > 1:
            raise ValueError(
                f"{name}={getattr(parallelism, name)}: must be 1: a dense model has no experts"
            )


def check_tensor_parallel(
    config: Decoder.Config, degree: int, *, whole_experts: bool = False
) -> None:
    """Raise ValueError unless the degree divides key-value heads, hidden width and vocabulary.

    Key-value heads are not replicated over ranks; query heads are a multiple of them. The width of
    `whole_experts`, which each rank has for its own tokens, does not matter.
    """
    feed_forward: Any = config.block.feed_forward
    sizes = {
        "num_kv_heads": config.block.attention.num_kv_heads,
        "hidden_dim": feed_forward.hidden_dim,
        "vocab_size": config.vocab_size,
    }
    if whole_experts:
        del sizes["hidden_dim"]
    problems = [f"{name}={size}" for name, size in sizes.items() if size % degree]
    if problems:
        largest = math.gcd(*sizes.values())
        valid = ", ".join(str(n) for n in range(1, largest + 1) if largest % n == 0)
        raise ValueError(
            f"tensor_parallel_degree={degree} does not divide {' and '.join(problems)}: "
            f"must be one of {valid}"
        )


def _shard_tensor_parallel(model: Decoder, mesh: DeviceMesh) -> None:
    """Apply the plan to all layers except mixtures, which take and return T / tp tokens."""
    plan: dict[str, ParallelStyle] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(TOKENS)),
        # The output stays a DTensor: the head must know that it holds only a part of the tokens.
        "norm": SequenceParallel(sequence_dim=TOKENS),
    }
    if model.lm_head is not None:
        plan["lm_head"] = ColwiseParallel()
    for i, block in enumerate(model.layers):
        assert isinstance(block, TransformerBlock)
        for part, style in _block_plan(block).items():
            plan[f"layers.{i}.{part}"] = style
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
    for name in ("attention_post_norm", "ffn_post_norm"):
        if not isinstance(getattr(block, name), nn.Identity):
            plan[name] = tokens
    if block.attention.q_norm is not None:
        # Each rank normalizes its own heads with the same weight, whose gradient is then a sum over
        # ranks.
        heads = SequenceParallel(sequence_dim=HEADS, use_local_output=True)
        plan |= {"attention.q_norm": heads, "attention.k_norm": heads}
    if isinstance(block.feed_forward, FeedForward):
        plan |= {
            "feed_forward.gate_up_proj": ColwiseParallel(input_layouts=Shard(TOKENS)),
            "feed_forward.down_proj": RowwiseParallel(output_layouts=Shard(TOKENS)),
        }
    return plan


# The generator


def parallelize_decoder_generator(model: Decoder, mesh: DeviceMesh) -> Decoder:
    """Shard the model in place over a mesh of one axis, preferably on the meta device.

    Nothing is sent: every rank holds the same weights, or none yet. On a mesh of size 1 the model
    keeps its plain tensors. Norms are whole, plain tensors on every rank. `check_tensor_parallel`
    allows the size of the mesh.
    """
    if mesh.size() == 1:
        return model
    # Explicit collectives have no gradient.
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            dim = _GENERATOR_SPLITS.get(name)
            if dim is None:
                continue
            if isinstance(layer, nn.Linear):
                setattr(parent, name, ShardedLinear(layer, mesh, dim=dim))
            elif isinstance(layer, nn.Embedding):
                setattr(parent, name, VocabShardedEmbedding(layer, mesh))
    for mixture in _find_mixtures(model):
        mixture.shard_for_generation(mesh)
    return model


def gather_logits(hidden_TE: Tensor, weight_VE: Tensor) -> Tensor:
    """Return the logits [T, V] on every rank, from a plain or a vocabulary-sharded head weight."""
    return gather_parts(F.linear(hidden_TE, local_tensor(weight_VE)), weight_VE)


def gather_parts(part: Tensor, weight_VE: Tensor) -> Tensor:
    """Return the logits [T, V] on every rank, given those of its own rows of the head's weight."""
    if not isinstance(weight_VE, DTensor):
        return part
    mesh = weight_VE.device_mesh
    # Gathered on every rank, because each of them samples.
    parts = [torch.empty_like(part) for _ in range(mesh.size())]
    dist.all_gather(parts, part, group=mesh.get_group())
    return torch.cat(parts, dim=1)


def sum_over_ranks(x: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Sum the ranks' tensors in place."""
    dist.all_reduce(x, group=group)
    return x


class ShardedLinear(nn.Module):
    """Linear layer with this rank's rows or columns of the weight.

    With rows it returns this rank's part of the output, with columns the sum over all ranks.
    """

    def __init__(self, layer: nn.Linear, mesh: DeviceMesh, *, dim: int) -> None:
        super().__init__()
        self.weight = distribute(layer.weight, mesh, [Shard(dim)])
        self.bias = layer.bias
        if layer.bias is not None and dim == ROWS:
            self.bias = distribute(layer.bias, mesh, [Shard(ROWS)])
        self.is_partial = dim == COLUMNS
        self.all_reduce: Callable[[Tensor], Tensor] = partial(
            sum_over_ranks, group=mesh.get_group()
        )
        self.adapt: Callable[[Tensor, Tensor], None] | None = None
        """Adds the products of adapters for an input to this rank's summand, in place."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else local_tensor(self.bias)
        # The bias after the sum, or each rank would add it.
        out = F.linear(x, local_tensor(self.weight), None if self.is_partial else bias)
        if self.adapt is not None:
            self.adapt(x, out)
        if not self.is_partial:
            return out
        out = self.all_reduce(out)
        return out if bias is None else out + bias


class VocabShardedEmbedding(nn.Module):
    """Embedding of which each rank has a part of the vocabulary; the sum over ranks is complete."""

    def __init__(self, layer: nn.Embedding, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = distribute(layer.weight, mesh, [Shard(ROWS)])
        self.all_reduce: Callable[[Tensor], Tensor] = partial(
            sum_over_ranks, group=mesh.get_group()
        )
        self.num_rows = layer.num_embeddings // mesh.size()
        self.first_row = mesh.get_local_rank() * self.num_rows

    def forward(self, token_ids_T: Tensor) -> Tensor:
        rows_T = token_ids_T - self.first_row
        # Tokens of other ranks take any row that exists, and zeros in the sum.
        elsewhere_T = (rows_T < 0) | (rows_T >= self.num_rows)
        out_TE = F.embedding(rows_T.masked_fill(elsewhere_T, 0), local_tensor(self.weight))
        out_TE.masked_fill_(elsewhere_T.unsqueeze(-1), 0)
        return self.all_reduce(out_TE)
