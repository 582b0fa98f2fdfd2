"""Expert parallelism: each rank holds some of the experts, and rows travel to the rank that holds theirs.

It re-uses the ranks over which parameters are sharded: those see different tokens, and between
them experts are split instead of gathered. The experts' gradients are then already sums over the
ranks that exchanged rows; between the groups that did not, FSDP adds them up.

Shape legend: S rows of this rank in the order of their experts, A rows that arrived, N experts,
P ranks, L = N / P experts of each rank, E features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rl.distributed.collectives import all_to_all
from rl.distributed.mesh import DP_REPLICATE, EXPERT, EXPERT_SHARD, TP
from rl.distributed.rows import exchange_rows, inverse_permutation, select_rows


def build_expert_mesh(mesh: DeviceMesh | None, *, degree: int) -> DeviceMesh | None:
    """The same ranks in the same order, their shards cut in two axes, `expert_shard` and `expert`.

    `degree` neighbours hold different experts; ranks that have the same ones share them as FSDP
    shards do. None where `degree` is 1.
    """
    if mesh is None or degree == 1:
        return None
    replicas, tp = mesh[DP_REPLICATE].size(), mesh[TP].size()
    shards = mesh.size() // (replicas * tp)
    assert shards % degree == 0, "checked by Degrees"
    return init_device_mesh(
        mesh.device_type,
        (replicas, shards // degree, degree, tp),
        mesh_dim_names=(DP_REPLICATE, EXPERT_SHARD, EXPERT, TP),
    )


class ExpertExchange:
    """Sends rows to the ranks of their experts and brings the results back, with gradients."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.num_ranks = group.size()

    def __call__(
        self, rows_SE: Tensor, ends_N: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """[S, E]: `compute` of each row, where its expert is.

        Every rank of the group calls it, also one without a row.

        Args:
            ends_N: int64, where the rows of each expert end.
            compute: rows [A, E] and ends [L] of this rank's experts to [A, E].
        """
        sent_PL = ends_N.diff(prepend=ends_N.new_zeros(1)).view(self.num_ranks, -1)
        one_each = [1] * self.num_ranks
        arrived_PL = all_to_all(sent_PL, sent=one_each, received=one_each, group=self.group.group_name)
        # One wait of the host for both.
        num_sent, num_arrived = torch.stack((sent_PL.sum(1), arrived_PL.sum(1))).tolist()
        arrived_AE = exchange_rows(rows_SE, sent=num_sent, received=num_arrived, group=self.group)

        # By rank, and by expert within a rank; from there to by expert, and by rank within an expert.
        num_local = sent_PL.size(1)
        expert_PL = torch.arange(num_local, device=rows_SE.device).expand_as(arrived_PL)
        expert_A = expert_PL.flatten().repeat_interleave(arrived_PL.flatten(), output_size=sum(num_arrived))
        order_A = expert_A.argsort(stable=True)
        places_A = inverse_permutation(order_A)
        computed_AE = compute(
            select_rows(arrived_AE, rows_S=order_A, places_S=places_A), arrived_PL.sum(0).cumsum(0)
        )
        returned_AE = select_rows(computed_AE, rows_S=places_A, places_S=order_A)
        return exchange_rows(returned_AE, sent=num_arrived, received=num_sent, group=self.group)
