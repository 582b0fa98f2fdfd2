"""Collectives inside forward and backward, reductions of metrics, and calls on one rank for all.

The tensor collectives use PyTorch's functional collectives, which a compiler can trace; groups are
given by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from rl.distributed.compat import collective_ops as ops
from rl.distributed.mesh import CP, TP

T = TypeVar("T")
V = TypeVar("V")


def all_reduce(tensor: Tensor, op: Literal["sum", "max"], group: str) -> Tensor:
    """Return the reduction in a new tensor, without gradient."""
    return ops.wait_tensor(ops.all_reduce(tensor.contiguous(), op, group))


def all_gather(tensor: Tensor, num_ranks: int, group: str) -> Tensor:
    """Return all ranks' tensors concatenated along the first dimension, without gradient."""
    return ops.wait_tensor(ops.all_gather_into_tensor(tensor.contiguous(), num_ranks, group))


def reduce_scatter(tensor: Tensor, num_ranks: int, group: str) -> Tensor:
    """Return this rank's part, along the first dimension, of the sum, without gradient."""
    return ops.wait_tensor(ops.reduce_scatter_tensor(tensor.contiguous(), "sum", num_ranks, group))


def all_to_all(tensor: Tensor, *, sent: list[int], received: list[int], group: str) -> Tensor:
    """Send `sent[p]` rows to each rank p, and receive `received[p]` from it, without gradient."""
    return ops.wait_tensor(ops.all_to_all_single(tensor.contiguous(), received, sent, group))


class GatherToUse(torch.autograd.Function):
    """All-gather along the first dimension for ranks that use the result differently.

    The gradient of a rank's tensor is the sum of the gradients from all ranks.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, num_ranks: int, group: str) -> Tensor:
        ctx.num_ranks, ctx.group = num_ranks, group
        return all_gather(tensor, num_ranks, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grads[0], ctx.num_ranks, ctx.group), None, None


class GatherAlike(torch.autograd.Function):
    """All-gather along the first dimension for ranks that compute the same from the result.

    Every rank has the whole gradient already and keeps its own part.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rank: int, num_ranks: int, group: str) -> Tensor:
        ctx.start, ctx.length = rank * tensor.size(0), tensor.size(0)
        return all_gather(tensor, num_ranks, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0].narrow(0, ctx.start, ctx.length), None, None, None


class ExchangeRows(torch.autograd.Function):
    """Send `sent[p]` rows to each rank p and return the `received[p]` rows from it.

    Gradients travel back. Every rank of the group has to call it, even with nothing to send.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
        ctx.splits, ctx.group = (sent, received), group
        return all_to_all(rows, sent=sent, received=received, group=group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.splits
        grad = all_to_all(grad, sent=received, received=sent, group=ctx.group)
        return grad, None, None, None


def reduce_sums_and_maxima(
    sums: Tensor, maxima: Tensor, *, mesh: DeviceMesh | None
) -> tuple[list[float], list[float]]:
    """Reduce numbers over the data-parallel ranks, to the same bits on every rank.

    NaN on any rank gives NaN. Context- and tensor-parallel ranks hold the same sums, which count
    once; of a pipeline's stages only one gives sums other than 0.

    Args:
        sums, maxima: [A] and [B] float64, on the mesh's device.
    """
    # A gather, not a reduction: every rank adds the same numbers in the same order, so that all get
    # the same bits.
    rows = _gather_rows(torch.cat((sums, maxima)), mesh)
    num_sums = sums.numel()
    largest = rows[:, num_sums:].amax(0).tolist() if maxima.numel() else []
    if mesh is not None:
        # These two are the last axes, so neighbouring ranks hold the same sums.
        rows = rows[:: mesh[CP].size() * mesh[TP].size()]
    return rows[:, :num_sums].sum(0).tolist(), largest


def sum_over_world(value: Tensor, *, mesh: DeviceMesh | None) -> float:
    """Return the sum of one number, [] float64, over every rank, tensor-parallel ones included."""
    return float(_gather_rows(value.reshape(1), mesh).sum())


def sum_each_over_world(values: Tensor, *, mesh: DeviceMesh | None) -> list[float]:
    """Return the sums of several numbers, [N] float64 on the mesh's device, as `sum_over_world`."""
    sums: list[float] = _gather_rows(values, mesh).sum(0).tolist()
    return sums


def _gather_rows(values: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Return every rank's values, [world, N], on the host."""
    if mesh is None:
        return values.unsqueeze(0).cpu()
    # `all_gather` writes into the rows of one tensor, so a single copy brings all to the host.
    rows = values.new_empty(dist.get_world_size(), values.numel())
    dist.all_gather(list(rows), values.contiguous())
    return rows.cpu()


def run_on_first_rank(
    function: Callable[[Sequence[V]], T], value: V, *, group: dist.ProcessGroup | None
) -> T:
    """Call a function on rank 0 with every rank's value; return or raise its outcome on every rank.

    Args:
        group: a group of all ranks with a CPU backend; None for a single process.
    """
    if group is None:
        return function([value])
    first = dist.get_rank(group) == 0
    values: list[Any] | None = [None] * dist.get_world_size(group) if first else None
    dist.gather_object(value, values, dst=0, group=group)

    # An error is sent as well: the other ranks would wait for the result until the deadline.
    outcome: list[Any] = [None, None]
    if first:
        assert values is not None
        try:
            outcome[0] = function(values)
        except Exception as error:  # noqa: BLE001 - Raised below, on every rank.
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def run_on_all_ranks(function: Callable[[], T], *, group: dist.ProcessGroup | None) -> T:
    """Call a function on every rank and return its result.

    Raises:
        ValueError: on every rank, that of the first rank that has failed.
    """
    results: list[T] = []
    problem: ValueError | None = None
    try:
        results.append(function())
    except ValueError as error:
        problem = error
    # All ranks meet here, also those without a problem, so that none goes on alone.
    run_on_first_rank(_raise_first, problem, group=group)
    return results[0]


def _raise_first(problems: Sequence[ValueError | None]) -> None:
    for problem in filter(None, problems):
        raise problem
