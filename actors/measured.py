"""Measurement of an actor's device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from monarch.actor import concurrent_endpoint, current_rank

from rl.distributed.process_group import World
from rl.observability.machine_limits import MachineLimits, Workload, machine_limits
from rl.observability.spans import span

T = TypeVar("T")


class Measured:
    """Mixin of actors that compute in their own thread."""

    async def _where_it_computes(self, function: Callable[[], T]) -> T:
        """Run the function in the computing thread while nothing else runs there."""
        raise NotImplementedError(f"{type(self).__qualname__} has no _where_it_computes()")

    @concurrent_endpoint
    @span("measure")
    async def measure_machine(self, workload: Workload, cache: str) -> MachineLimits | None:
        """Measure the device of rank 0; other ranks return None, since they may share its cores."""
        if current_rank().rank:
            return None
        device = World.from_env().default_device()
        measure = partial(machine_limits, workload, device=device, cache=Path(cache))
        return await self._where_it_computes(measure)
