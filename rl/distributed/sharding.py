"""Data parallelism over a model's blocks, for any model.

FSDP2 in all three forms: shards alone, replicas of shards (HSDP), and replicas alone (DDP:
one shard). Gradients are summed over ranks, never averaged: `optim_step` divides once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from rl.distributed.mesh import DP_REPLICATE, DP_SHARD


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingOptions:
    """What a family's `parallelize` needs besides the mesh."""

    param_dtype: torch.dtype = torch.float32
    """Forward and backward run in it; parameters are kept, and stepped, in their own."""
    reduce_dtype: torch.dtype = torch.float32
    """Gradients are summed between ranks in it."""
    reshard_after_forward: Literal["default", "always", "never"] = "default"
    """See `ParallelismConfig`."""
    expert_mesh: DeviceMesh | None = None
    """Of `build_expert_mesh`; None without expert parallelism."""
    expert_tensor_parallel: bool = False
    """Whether tensor parallelism splits each expert."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnMesh:
    """A module inside a block whose parameters are split over other ranks than the block's."""

    module: nn.Module
    mesh: DeviceMesh
    """What FSDP2 takes: shards, behind replicas where there are several."""


def shard_data_parallel(
    model: nn.Module,
    *,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    options: ShardingOptions,
    apart: Sequence[OwnMesh] = (),
) -> None:
    """`fully_shard` each block and then the root, in place; nothing where both data axes have size 1.

    Args:
        apart: modules that are sharded for themselves first.
    """
    replicas, shards = mesh[DP_REPLICATE].size(), mesh[DP_SHARD].size()
    if replicas * shards == 1:
        return
    settings: dict[str, Any] = {
        "mesh": mesh[DP_SHARD] if replicas == 1 else mesh[DP_REPLICATE, DP_SHARD],
        "mp_policy": MixedPrecisionPolicy(param_dtype=options.param_dtype, reduce_dtype=options.reduce_dtype),
    }
    for part in apart:
        reshard = options.reshard_after_forward != "never" and part.mesh.size(-1) > 1
        fully_shard(part.module, reshard_after_forward=reshard, **(settings | {"mesh": part.mesh}))
    for block in blocks:
        # One shard holds the whole block already: gathering it again would only cost a copy.
        reshard = options.reshard_after_forward != "never" and shards > 1
        fully_shard(block, reshard_after_forward=reshard, **settings)
    # The root's own parameters, embedding and head, are needed again as soon as backward starts.
    fully_shard(model, reshard_after_forward=options.reshard_after_forward == "always", **settings)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo cannot scale while it sums, and with it NCCL needs no averaging kernel.
            module.set_force_sum_reduction_for_comms(True)


def reshard(model: nn.Module) -> None:
    """Free what a forward without a backward has left gathered: parameters are shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def call_in_dtype(model: nn.Module, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    """`model(...)` with its parameters cast to `dtype`; gradients come back in their own dtype.

    What FSDP2's mixed precision does, for a model that FSDP2 does not manage.
    """
    if isinstance(model, FSDPModule):
        return model(*args, **kwargs)
    parameters = dict(model.named_parameters())
    if all(p.dtype == dtype for p in parameters.values()):
        return model(*args, **kwargs)
    cast = {name: p.to(dtype) for name, p in parameters.items()}
    return torch.func.functional_call(model, cast, args, kwargs)
