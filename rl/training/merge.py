"""What rounding loses of adapters that are merged into the weights that generators get."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rl.distributed.collectives import sum_each_over_world
from rl.distributed.mesh import count_ranks_of_stage
from rl.distributed.sharding import count_shards, local_tensor, unwrap
from rl.models.lora import LoRA
from rl.training.policy import Policy

PIECE_NUMBERS = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Numbers of a weight that are compared at once, by device: on a CPU they stay in its cache."""


@torch.no_grad()
def measure_merge(
    policy: Policy, *, state_dict: Mapping[str, Tensor], dtype: torch.dtype
) -> float | None:
    """Return the share of the adapters' update that is lost in the merge; None without LoRA.

    The share is ||round(W + s B A) - round(W) - s B A|| / ||s B A|| in the Frobenius norm over all
    adapted weights, where `round` is to the weights' dtype and then to the generators':

        0      generators have the whole update, or B is still zero
        1      generators have W as it was
        > 1    a W that `dtype` does not represent is rounded, at random as it were, by more than
               the update

    Collective, and the same on every rank.

    Args:
        state_dict: result of `Policy.state_dict` with merged adapters.
        dtype: the generators'.
    """
    lora = next((m for m in policy.converters.members if isinstance(m, LoRA)), None)
    if lora is None:
        return None
    total = torch.zeros(2, dtype=torch.float64)
    for name, merged in state_dict.items():
        if name not in policy.parameters:
            continue  # a buffer
        weight = unwrap(policy.parameters[name].detach())
        before, after = local_tensor(weight), local_tensor(merged)
        # Replicas sum the same part, and count as one.
        share = count_shards(weight) / count_ranks_of_stage(policy.mesh)
        # Products are computed again: kept from the merge, all of them are as large as the model.
        for place, update in lora.yield_updates(name, weight):
            total += share * sum_rounding(before[place], update, after[place], dtype=dtype).cpu()
    if policy.mesh is not None:
        total = total.to(policy.mesh.device_type)
    lost, whole = sum_each_over_world(total, mesh=policy.mesh)
    return math.sqrt(lost / whole) if whole else 0.0


def sum_rounding(weight: Tensor, update: Tensor, merged: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return the squares, summed, of what rounding takes from an update, and of the update itself.

    A generator with the adapter beside the weight would hold the rounded weight and the update; the
    difference from these is lost.

    Args:
        weight, update, merged: W, s B A in float32 and W + s B A, of equal shapes.
        dtype: the generators'.

    Returns:
        [2] float64.

    Example:
        1 + 0.5 stays 1.5 in bfloat16, 1 + 0.001 is 1: of ones and updates of 0.5 and 0.001 the sums
        are 0.001**2 and 0.5**2 + 0.001**2.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=update.device)
    num_rows = max(1, PIECE_NUMBERS[update.device.type] * len(update) // max(1, update.numel()))
    # In pieces, because the results in between have several times the weight's bytes.
    for old, new, added in zip(
        weight.split(num_rows), merged.split(num_rows), update.split(num_rows), strict=True
    ):
        lost = new.to(dtype).float() - old.to(dtype).float() - added
        sums += torch.stack([_sum_squares(lost), _sum_squares(added)])
    return sums


def _sum_squares(tensor: Tensor) -> Tensor:
    # float32 is exact enough for a piece; the norm of 10^8 numbers at once was off by 1% on a CPU.
    return torch.dot(tensor.flatten(), tensor.flatten())
