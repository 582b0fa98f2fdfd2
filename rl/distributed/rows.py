"""Rows of a tensor in another order, and on another rank, with gradients.

Shape legend: T rows, S rows of the result, E features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl.distributed.collectives import all_to_all


def select_rows(x_TE: Tensor, *, rows_S: Tensor, places_S: Tensor) -> Tensor:
    """[S, E]: `x_TE[rows_S]`, where every row is taken S / T times.

    Its backward adds without atomic operations, so in the same order each time.

    Args:
        places_S: int64, where the first taken of row 0 lies in the result, the second, then those of row 1...
    """
    selected: Tensor = _SelectRows.apply(x_TE, rows_S, places_S)
    return selected


class _SelectRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, rows_S: Tensor, places_S: Tensor) -> Tensor:
        ctx.save_for_backward(places_S)
        ctx.num_rows = x_TE.size(0)
        return x_TE.index_select(0, rows_S)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SE: Tensor) -> tuple[Tensor, None, None]:
        (places_S,) = ctx.saved_tensors
        grad_TKE = grad_SE.index_select(0, places_S).unflatten(0, (ctx.num_rows, -1))
        return (grad_TKE.sum(1) if grad_TKE.size(1) > 1 else grad_TKE.squeeze(1)), None, None


def inverse_permutation(order_S: Tensor) -> Tensor:
    """Where each number of a permutation is."""
    inverse_S = torch.empty_like(order_S)
    inverse_S[order_S] = torch.arange(order_S.numel(), device=order_S.device)
    return inverse_S


def exchange_rows(
    rows_TE: Tensor, *, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    """[S, E]: the next `sent[p]` rows go to rank p, `received[p]` rows come from it; gradients return.

    Every rank of the group calls it, also one that has nothing to send.
    """
    arrived: Tensor = _ExchangeRows.apply(rows_TE, sent, received, group)
    return arrived


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.splits = (sent, received)
        ctx.group = group
        return _exchange(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.splits
        return _exchange(grad, received, sent, ctx.group), None, None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    return all_to_all(rows, sent=sent, received=received, group=group.group_name)
