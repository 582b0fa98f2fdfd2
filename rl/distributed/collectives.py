"""Collectives inside a forward and its backward, eager or compiled.

Over PyTorch's functional collectives, which a compiler can trace; a group is given by name.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def group_name(mesh: DeviceMesh) -> str:
    """Of a mesh of one axis."""
    return mesh.get_group().group_name


def all_reduce(tensor: Tensor, op: Literal["sum", "max"], group: str) -> Tensor:
    """A new tensor, without gradient."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(tensor.contiguous(), op, group))


def all_gather(tensor: Tensor, num_ranks: int, group: str) -> Tensor:
    """All ranks' tensors one after another along the first dim, without gradient."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(tensor.contiguous(), num_ranks, group))


def reduce_scatter(tensor: Tensor, num_ranks: int, group: str) -> Tensor:
    """This rank's part, along the first dim, of the sum over ranks, without gradient."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.reduce_scatter_tensor(tensor.contiguous(), "sum", num_ranks, group))


def all_to_all(tensor: Tensor, *, sent: list[int], received: list[int], group: str) -> Tensor:
    """The next `sent[p]` along the first dim go to rank p, `received[p]` come from it; without gradient."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_to_all_single(tensor.contiguous(), received, sent, group))


class GatherToUse(torch.autograd.Function):
    """All ranks' tensors along the first dim, of which each rank makes something else.

    So the gradient of a rank's tensor is the sum of what all of them send back.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, num_ranks: int, group: str) -> Tensor:
        ctx.num_ranks, ctx.group = num_ranks, group
        return all_gather(tensor, num_ranks, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grads[0], ctx.num_ranks, ctx.group), None, None


class GatherAlike(torch.autograd.Function):
    """All ranks' tensors along the first dim, of which every rank makes the same.

    So each has the whole gradient already, and keeps its own part of it.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rank: int, num_ranks: int, group: str) -> Tensor:
        ctx.start, ctx.length = rank * tensor.size(0), tensor.size(0)
        return all_gather(tensor, num_ranks, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0].narrow(0, ctx.start, ctx.length), None, None, None
