"""What happens to accumulated gradients before the optimizer: sum, norm, scale and clip."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rl.distributed.reductions import sum_over_world
from rl.distributed.shards import local_tensor, num_shards

COALESCED = 1 << 16
"""Numbers of a gradient that is summed together with others: a norm's, not that of whole experts."""


def sum_partial_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Finish the sums over tensor-parallel ranks that backward has left open.

    A replicated parameter has seen only its rank's tokens or heads. Small ones, as a norm's weight, share
    one collective a mesh; larger ones, as experts that are not split, are summed where they are.
    """
    partial: dict[tuple[DeviceMesh, torch.dtype], list[nn.Parameter]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements):
            assert grad.device_mesh.ndim == 1, "a partial sum is over the tensor-parallel axis alone"
            partial.setdefault((grad.device_mesh, grad.dtype), []).append(parameter)
    for (mesh, _), members in partial.items():
        local = [p.grad.to_local().contiguous() for p in members]  # type: ignore[union-attr]
        _sum_in_place(local, group=mesh.get_group())
        for parameter, grad in zip(members, local, strict=True):
            assert isinstance(parameter.data, DTensor)
            parameter.grad = DTensor.from_local(grad, mesh, parameter.data.placements, run_check=False)


def _sum_in_place(tensors: Sequence[Tensor], *, group: dist.ProcessGroup) -> None:
    small = [tensor for tensor in tensors if tensor.numel() < COALESCED]
    if small:
        flat = torch.cat([tensor.flatten() for tensor in small])
        dist.all_reduce(flat, group=group)
        for tensor, summed in zip(small, flat.split([tensor.numel() for tensor in small]), strict=True):
            tensor.copy_(summed.view_as(tensor))
    for tensor in tensors:
        if tensor.numel() >= COALESCED:
            dist.all_reduce(tensor, group=group)


def global_norm(parameters: Sequence[nn.Parameter], *, mesh: DeviceMesh | None) -> float:
    """2-norm of all gradients, the same number on every rank; one collective over the world.

    Every rank adds the squares of its own parts, each divided by the number of ranks that
    hold the same part.
    """
    with_grad = [p for p in parameters if p.grad is not None]
    norms = torch._foreach_norm(_local_gradients(with_grad))
    squares = torch.stack(norms).double().square()
    world_size = 1 if mesh is None else mesh.size()
    shares = [num_shards(p) / world_size for p in with_grad]
    total = (squares * torch.tensor(shares, dtype=torch.float64, device=squares.device)).sum()
    return math.sqrt(sum_over_world(total, mesh=mesh))


def zero_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Let every parameter have a gradient of zero, placed as it is."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter.data)


def scale_gradients(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Multiply all gradients, in place."""
    if factor != 1.0:
        torch._foreach_mul_(_local_gradients(parameters), factor)


def clip_factor(norm: float, *, max_norm: float) -> float:
    """What to multiply gradients of this norm by so that it is at most `max_norm`."""
    return min(1.0, max_norm / (norm + 1e-6))


def _local_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [local_tensor(p.grad) for p in parameters if p.grad is not None]
