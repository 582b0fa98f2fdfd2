"""What the plans of all models share: options of their blocks, and data parallelism over them.

FSDP2 in all three forms: shards alone, replicas of shards (HSDP), and replicas alone (DDP:
one shard). Context-parallel ranks are shards too. Gradients are summed over ranks, never
averaged: `optim_step` divides once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from rl.distributed.activation_checkpoint import ActivationCheckpointConfig, checkpoint_activations
from rl.distributed.async_tensor_parallel import overlap_tensor_parallel
from rl.distributed.compile import CompileConfig, compile_blocks
from rl.distributed.mesh import TP, data_parallel_mesh


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingOptions:
    """What a family's `parallelize` needs besides the mesh."""

    param_dtype: torch.dtype = torch.float32
    """Forward and backward run in it; parameters are kept, and stepped, in their own."""
    reduce_dtype: torch.dtype = torch.float32
    """Gradients are summed between ranks in it."""
    reshard_after_forward: Literal["default", "always", "never"] = "default"
    """See `ParallelismConfig`."""
    loss_parallel: bool = True
    """See `ParallelismConfig`."""
    async_tensor_parallel: bool = False
    """See `ParallelismConfig`."""
    cpu_offload: bool = False
    """See `TrainingConfig`."""
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    expert_mesh: DeviceMesh | None = None
    """Of `build_expert_mesh`; None without expert parallelism."""
    expert_tensor_parallel: bool = False
    """Whether tensor parallelism splits each expert."""


def prepare_blocks(blocks: Iterable[nn.Module], *, mesh: DeviceMesh | None, options: ShardingOptions) -> None:
    """Checkpoint and compile each block's forward, in place: after tensor parallelism, before sharding."""
    blocks = list(blocks)
    checkpoint_activations(blocks, options.activation_checkpoint)
    if options.async_tensor_parallel:
        assert mesh is not None, "async tensor parallelism without tensor parallelism"
        overlap_tensor_parallel(mesh[TP])
    compile_blocks(blocks, options.compile)


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
    """`fully_shard` each block and then the root, in place.

    Nothing where there is one data-parallel rank alone, unless its parameters live on the host.

    Args:
        apart: modules that are sharded for themselves first.
    """
    data_mesh = data_parallel_mesh(mesh)
    if data_mesh.size() == 1 and not options.cpu_offload:
        return
    settings: dict[str, Any] = {
        "mesh": data_mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=options.param_dtype, reduce_dtype=options.reduce_dtype),
    }
    if options.cpu_offload:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    # One shard holds the whole block already: gathering it again would only cost a copy, except
    # from the host, where the copy is what is freed.
    can_free = data_mesh.size(-1) > 1 or options.cpu_offload
    for part in apart:
        reshard = options.reshard_after_forward != "never" and (part.mesh.size(-1) > 1 or options.cpu_offload)
        fully_shard(part.module, reshard_after_forward=reshard, **(settings | {"mesh": part.mesh}))
    for block in blocks:
        reshard = options.reshard_after_forward != "never" and can_free
        fully_shard(block, reshard_after_forward=reshard, **settings)
    # The root's own parameters, embedding and head, are needed again as soon as backward starts.
    fully_shard(model, reshard_after_forward=options.reshard_after_forward == "always", **settings)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo cannot scale while it sums, and with it NCCL needs no averaging kernel.
            module.set_force_sum_reduction_for_comms(True)


def materialize(model: nn.Module, *, device: torch.device, cpu_offload: bool) -> None:
    """Memory for a model on the meta device: parameters and buffers, none of them set."""
    model.to_empty(device=torch.device("cpu") if cpu_offload else device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


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
