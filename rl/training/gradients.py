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


def sum_partial_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Finish the sums over tensor-parallel ranks that backward has left open, in one collective a mesh.

    A replicated parameter (a norm's weight) has seen only its rank's tokens or heads.
    """
    partial: dict[tuple[DeviceMesh, torch.dtype], list[nn.Parameter]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements):
            assert grad.device_mesh.ndim == 1, "a partial sum is over the tensor-parallel axis alone"
            partial.setdefault((grad.device_mesh, grad.dtype), []).append(parameter)
    for (mesh, _), members in partial.items():
        local = [p.grad.to_local() for p in members]  # type: ignore[union-attr]
        flat = torch.cat([grad.flatten() for grad in local])
        dist.all_reduce(flat, group=mesh.get_group())
        for parameter, grad in zip(members, flat.split([grad.numel() for grad in local]), strict=True):
            assert isinstance(parameter.data, DTensor)
            summed = grad.view(parameter.shape).clone()
            parameter.grad = DTensor.from_local(summed, mesh, parameter.data.placements, run_check=False)


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


def scale_gradients(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Multiply all gradients, in place."""
    if factor != 1.0:
        torch._foreach_mul_(_local_gradients(parameters), factor)


def clip_factor(norm: float, *, max_norm: float) -> float:
    """What to multiply gradients of this norm by so that it is at most `max_norm`."""
    return min(1.0, max_norm / (norm + 1e-6))


def _local_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [local_tensor(p.grad) for p in parameters if p.grad is not None]
