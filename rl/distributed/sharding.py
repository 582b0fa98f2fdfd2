"""Data parallelism by FSDP2 for all models, and access to the shards of a tensor.

FSDP2 serves in all three forms: shards alone, replicas of shards (HSDP), and replicas alone (DDP:
one shard). Context-parallel ranks are shards too. Gradients are summed over ranks, never averaged:
`optim_step` divides once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from rl.distributed.activation_checkpoint import ActivationCheckpointConfig, checkpoint_activations
from rl.distributed.compat import StridedShard
from rl.distributed.compile import CompileConfig, compile_blocks, overlap_tensor_parallel
from rl.distributed.mesh import TP, ParallelismConfig, get_data_parallel_mesh


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingOptions:
    """Options of a model's parallel plan besides the mesh."""

    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    param_dtype: torch.dtype = torch.float32
    """Dtype of forward and backward; parameters are stored and stepped in their own dtype."""
    reduce_dtype: torch.dtype = torch.float32
    """Dtype in which gradients are summed over ranks."""
    cpu_offload: bool = False
    """See `TrainingConfig`."""
    activation_checkpoint: ActivationCheckpointConfig = field(
        default_factory=ActivationCheckpointConfig
    )
    compile: CompileConfig = field(default_factory=CompileConfig)
    expert_mesh: DeviceMesh | None = None
    """Mesh of `build_expert_mesh`; None without expert parallelism."""


def prepare_blocks(
    blocks: Iterable[nn.Module], *, mesh: DeviceMesh | None, options: ShardingOptions
) -> None:
    """Checkpoint and compile each block's forward in place.

    Call it after tensor parallelism and before sharding.
    """
    blocks = list(blocks)
    # In this order, so that checkpointing is within the compiled forward.
    checkpoint_activations(blocks, options.activation_checkpoint)
    if options.parallelism.async_tensor_parallel:
        assert mesh is not None, "async tensor parallelism without tensor parallelism"
        overlap_tensor_parallel(mesh[TP])
    compile_blocks(blocks, options.compile)


def shard_data_parallel(
    model: nn.Module,
    *,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    options: ShardingOptions,
    apart: Sequence[tuple[nn.Module, DeviceMesh]] = (),
    always: bool = False,
) -> None:
    """Apply `fully_shard` to each block and then to the root, in place.

    A single data-parallel rank is left alone unless its parameters live on the host, or `always`.

    Args:
        apart: modules inside blocks to shard first, each with a mesh of its own: shards, behind
            replicas if there are several.
    """
    data_mesh = get_data_parallel_mesh(mesh)
    if data_mesh.size() == 1 and not options.cpu_offload and not always:
        return
    settings: dict[str, Any] = {
        "mesh": data_mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=options.param_dtype, reduce_dtype=options.reduce_dtype
        ),
    }
    if options.cpu_offload:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")

    policy = options.parallelism.reshard_after_forward
    if policy == "default" and options.parallelism.pipeline_parallel_degree > 1:
        # Several micro-batches are on their way: each would gather every block again.
        policy = "never"
    # A single shard is the whole block: gathering it again would only cost a copy. With parameters
    # on the host the copy on the device is what is freed.
    for module, own_mesh in (*apart, *((block, data_mesh) for block in blocks)):
        reshard = policy != "never" and (own_mesh.size(-1) > 1 or options.cpu_offload)
        fully_shard(module, reshard_after_forward=reshard, **(settings | {"mesh": own_mesh}))
    # The root's own parameters, embedding and head, are needed again as soon as backward starts.
    fully_shard(model, reshard_after_forward=policy == "always", **settings)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo cannot scale while it sums, and with it NCCL needs no averaging kernel.
            module.set_force_sum_reduction_for_comms(True)


def materialize(model: nn.Module, *, device: torch.device, cpu_offload: bool) -> None:
    """Allocate uninitialized parameters and buffers for a model on the meta device."""
    model.to_empty(device=torch.device("cpu") if cpu_offload else device)
    # Buffers stay on the device even with parameters on the host: FSDP does not move them.
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def reshard(model: nn.Module) -> None:
    """Free the parameters that a forward without a backward left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def call_in_dtype(model: nn.Module, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    """Call the model with its parameters cast to `dtype`; gradients have the parameters' own dtype.

    This is FSDP2's mixed precision for a model that FSDP2 does not manage.
    """
    if isinstance(model, FSDPModule):
        return model(*args, **kwargs)
    parameters = dict(model.named_parameters())
    if all(p.dtype == dtype for p in parameters.values()):
        return model(*args, **kwargs)
    cast = {name: p.to(dtype) for name, p in parameters.items()}
    return torch.func.functional_call(model, cast, args, kwargs)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; a plain tensor is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part as a plain tensor, with gradient.

    Ranks that hold the same part use it for different tokens, or for their own share of each
    token's result: the gradient of the whole tensor is the sum of theirs.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local(
        grad_placements=[Partial() if p.is_replicate() else p for p in tensor.placements]
    )


def wrap_like(tensor: Tensor, local: Tensor) -> Tensor:
    """Wrap `local` as this rank's part of a tensor with the shape and layout of `tensor`."""
    if not isinstance(tensor, DTensor):
        return local
    mesh, shape, stride = tensor.device_mesh, tensor.shape, tensor.stride()
    return DTensor.from_local(
        local, mesh, tensor.placements, run_check=False, shape=shape, stride=stride
    )


def distribute(
    parameter: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> nn.Parameter:
    """Return the parameter in another layout.

    Every rank holds the same weights or loads its own part: nothing is sent from rank 0.
    """
    sharded = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


def unwrap(tensor: Tensor) -> Tensor:
    """Return the tensor without torchao's wrapper for float8 gathering, in the same memory."""
    inner = getattr(local_tensor(tensor), "_tensor", None)
    return wrap_like(tensor, inner) if isinstance(inner, Tensor) else tensor


def slice_local_shard(full: Tensor, like: Tensor) -> Tensor:
    """Return the part of a whole tensor that corresponds to this rank's part of `like`, as a view.

    Raises ValueError if the shapes differ.
    """
    if full.shape != like.shape:
        raise ValueError(f"shape {tuple(full.shape)} differs from the model's {tuple(like.shape)}")
    if not isinstance(like, DTensor):
        return full
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not part of the parameter's mesh"
    # If two axes split one dimension, the later axis (tensor parallel) splits first and the earlier
    # (FSDP) splits its shards, the order in which the plans are applied.
    for axis in reversed(range(like.device_mesh.ndim)):
        placement = like.placements[axis]
        if isinstance(placement, Shard | StridedShard):
            chunks = full.chunk(like.device_mesh.size(axis), placement.dim)
            index = coordinate[axis]
            # `chunk` gives fewer chunks than ranks where the rows run out: the rest are empty.
            full = chunks[index] if index < len(chunks) else full.narrow(placement.dim, 0, 0)
    return full


def count_shards(tensor: Tensor) -> int:
    """Return the number of different parts of the tensor; 1 for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    return math.prod(
        mesh.size(axis) for axis, p in enumerate(tensor.placements) if not p.is_replicate()
    )


def gather_whole(tensor: Tensor) -> Tensor:
    """Gather the tensor on every rank of its mesh, with one collective per axis that splits it."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements: list[Placement] = list(tensor.placements)
    # One axis at a time: in one call PyTorch warns about the axis order of FSDP2 with TP.
    for axis, placement in enumerate(placements):
        if not placement.is_replicate():
            placements[axis] = Replicate()
            tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()
