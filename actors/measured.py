"""Actors that say what their device can do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from monarch.actor import concurrent_endpoint, current_rank

from rl.distributed.process_group import World
from rl.machine_limits import MachineLimits, Workload, machine_limits
from rl.observability.activity import during

T = TypeVar("T")


class Measured:
    """Beside `Actor` among the bases of one that computes in a thread of its own."""

    async def _where_it_computes(self, function: Callable[[], T]) -> T:
        """Its result, called in that thread, when nothing else runs there."""
        raise NotImplementedError(f"{type(self).__qualname__} has no _where_it_computes()")

    @concurrent_endpoint
    @during("measure")
    async def measure_machine(self, workload: Workload, cache: str) -> MachineLimits | None:
        """Of rank 0's device; the others answer nothing, as they may share its cores."""
        if current_rank().rank:
            return None
        device = World.from_env().default_device()
        measure = partial(machine_limits, workload, device=device, cache=Path(cache))
        return await self._where_it_computes(measure)
