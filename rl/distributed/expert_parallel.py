"""Expert parallelism: each rank holds some of the experts, and rows travel to their ranks.

The ranks over which parameters are sharded are reused: they see different tokens, and experts are
split among them instead of gathered. The experts' gradients are then already sums over the ranks
that exchanged rows; FSDP sums them between the groups that did not.

Shape legend: T rows, S rows selected or sent by this rank in the order of their experts, A rows
that arrived, N experts, P ranks, L = N / P experts of each rank, E features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl.distributed.collectives import ExchangeRows, all_to_all


class ExpertExchange:
    """Transport of rows to the ranks of their experts and of the results back, with gradients."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.num_ranks = group.size()

    def __call__(
        self, rows_SE: Tensor, ends_N: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Return the result of each row, [S, E], computed on the rank of its expert.

        Every rank of the group has to call it, even without a row.

        Args:
            ends_N: int64, end of each expert's run of rows.
            compute: maps rows [A, E] and ends [L] of this rank's experts to [A, E].
        """
        # Ranks first exchange how many rows each expert gets: a receiver has to allocate its rows.
        sent_PL = ends_N.diff(prepend=ends_N.new_zeros(1)).view(self.num_ranks, -1)
        one_each = [1] * self.num_ranks
        arrived_PL = all_to_all(
            sent_PL, sent=one_each, received=one_each, group=self.group.group_name
        )
        num_sent, num_arrived = count_rows(sent_PL, arrived_PL)
        arrived_AE = ExchangeRows.apply(rows_SE, num_sent, num_arrived, self.group.group_name)

        # Rows arrive sorted by rank, then expert; the experts need them sorted by expert, then
        # rank.
        num_local = sent_PL.size(1)
        expert_PL = torch.arange(num_local, device=rows_SE.device).expand_as(arrived_PL)
        expert_A = expert_PL.flatten().repeat_interleave(
            arrived_PL.flatten(), output_size=sum(num_arrived)
        )
        order_A = expert_A.argsort(stable=True)
        places_A = invert_permutation(order_A)
        computed_AE = compute(
            select_rows(arrived_AE, rows_S=order_A, places_S=places_A), arrived_PL.sum(0).cumsum(0)
        )
        returned_AE = select_rows(computed_AE, rows_S=places_A, places_S=order_A)
        returned_SE: Tensor = ExchangeRows.apply(
            returned_AE, num_arrived, num_sent, self.group.group_name
        )
        return returned_SE


def count_rows(sent_PL: Tensor, arrived_PL: Tensor) -> list[list[int]]:
    """Return the numbers of rows sent to and received from each rank."""
    # In a single copy, so that the host waits for the GPU once.
    counts: list[list[int]] = torch.stack((sent_PL.sum(1), arrived_PL.sum(1))).tolist()
    return counts


def select_rows(x_TE: Tensor, *, rows_S: Tensor, places_S: Tensor) -> Tensor:
    """Return `x_TE[rows_S]`, [S, E], with every row taken S / T times.

    The backward adds without atomic operations, hence always in the same order.

    Args:
        places_S: int64, positions in the result of row 0's copies, then of row 1's, and so on.
    """
    selected: Tensor = _SelectRows.apply(x_TE, rows_S, places_S)
    return selected


class _SelectRows(torch.autograd.Function):
    """Selection of rows whose backward is a selection too, and so adds in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, rows_S: Tensor, places_S: Tensor) -> Tensor:
        ctx.save_for_backward(places_S)
        ctx.num_rows = x_TE.size(0)
        return x_TE.index_select(0, rows_S)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SE: Tensor) -> tuple[Tensor, None, None]:
        (places_S,) = ctx.saved_tensors
        # `index_select`'s own backward scatters with atomic additions, in any order.
        grad_TKE = grad_SE.index_select(0, places_S).unflatten(0, (ctx.num_rows, -1))
        return (grad_TKE.sum(1) if grad_TKE.size(1) > 1 else grad_TKE.squeeze(1)), None, None


def invert_permutation(order_S: Tensor) -> Tensor:
    """Return the place of each index in `order_S`, [S] int64."""
    # By a scatter, which is cheaper than a second sort.
    inverse_S = torch.empty_like(order_S)
    inverse_S[order_S] = torch.arange(order_S.numel(), device=order_S.device)
    return inverse_S
