"""What one rank does for all, and all learn the outcome of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
V = TypeVar("V")


def on_first_rank(function: Callable[[Sequence[V]], T], value: V, *, group: dist.ProcessGroup | None) -> T:
    """`function`, called on rank 0 with every rank's `value`; what it returns or raises, on every rank.

    Args:
        group: all ranks, with a CPU backend; None is a single process.
    """
    if group is None:
        return function([value])
    first = dist.get_rank(group) == 0
    values: list[Any] | None = [None] * dist.get_world_size(group) if first else None
    dist.gather_object(value, values, dst=0, group=group)
    outcome: list[Any] = [None, None]
    if first:
        assert values is not None
        try:
            outcome[0] = function(values)
        except Exception as error:  # noqa: BLE001 - raised below, on every rank
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
