"""Numbers of all ranks, in one collective, the same bits everywhere.

Every rank gets all ranks' numbers and adds them in the same order, so that all decide
alike on what they read. NaN on any rank gives NaN.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rl.distributed.mesh import CP, TP


def reduce_sums_and_maxima(
    sums: Tensor, maxima: Tensor, *, mesh: DeviceMesh | None
) -> tuple[list[float], list[float]]:
    """Sums and maxima over the data-parallel ranks; context- and tensor-parallel ones hold the same numbers.

    Args:
        sums, maxima: [A] and [B] float64, on the mesh's device. One copy to the host.
    """
    rows = _gather(torch.cat((sums, maxima)), mesh)
    if mesh is not None:
        rows = rows[:: mesh[CP].size() * mesh[TP].size()]
    num_sums = sums.numel()
    largest = rows[:, num_sums:].amax(0).tolist() if maxima.numel() else []
    return rows[:, :num_sums].sum(0).tolist(), largest


def sum_over_world(value: Tensor, *, mesh: DeviceMesh | None) -> float:
    """Sum of one number, [] float64, over every rank, tensor-parallel ones too."""
    return float(_gather(value.reshape(1), mesh).sum())


def _gather(values: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """[world, N] on the host."""
    if mesh is None:
        return values.unsqueeze(0).cpu()
    rows = values.new_empty(mesh.size(), values.numel())
    dist.all_gather(list(rows), values.contiguous())
    return rows.cpu()
