"""Which part of a tensor this rank holds."""

from __future__ import annotations

import math

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part; the tensor itself where it is plain."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor without the class that torchao puts around a shard to gather it in float8; the same
    memory, so writing into it writes into the parameter."""
    local = local_tensor(tensor)
    inner = getattr(local, "_tensor", None)
    if not isinstance(inner, Tensor):
        return tensor
    if not isinstance(tensor, DTensor):
        return inner
    mesh, shape, stride = tensor.device_mesh, tensor.shape, tensor.stride()
    return DTensor.from_local(inner, mesh, tensor.placements, run_check=False, shape=shape, stride=stride)


def local_shard_of(full: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor that this rank holds of `like`; a view, no communication.

    Where two axes split one dim, the later axis (tensor parallel) has split first and the
    earlier (FSDP) splits that shard: the order in which they were applied.

    Raises:
        ValueError: if the shapes differ.
    """
    if full.shape != like.shape:
        raise ValueError(f"shape {tuple(full.shape)} differs from the model's {tuple(like.shape)}")
    if not isinstance(like, DTensor):
        return full
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not part of the parameter's mesh"
    for axis in reversed(range(like.device_mesh.ndim)):
        placement = like.placements[axis]
        if isinstance(placement, Shard | _StridedShard):
            chunks = full.chunk(like.device_mesh.size(axis), placement.dim)
            index = coordinate[axis]
            full = chunks[index] if index < len(chunks) else full.narrow(placement.dim, 0, 0)
    return full


def num_shards(tensor: Tensor) -> int:
    """Into how many different parts it is split; 1 for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    return math.prod(mesh.size(axis) for axis, p in enumerate(tensor.placements) if not p.is_replicate())


def whole_tensor(tensor: Tensor) -> Tensor:
    """All of it, on every rank of its mesh: one collective for each axis that splits it."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements: list[Placement] = list(tensor.placements)
    # Axis by axis, last split first: at once, PyTorch warns of the order that FSDP2 with TP has.
    for axis, placement in enumerate(placements):
        if not placement.is_replicate():
            placements[axis] = Replicate()
            tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()
