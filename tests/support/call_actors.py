"""Actor with an endpoint for each way in which a call can end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from monarch.actor import Actor, concurrent_endpoint, current_rank, endpoint

from rl.observability.spans import add_error_context
from rl.utils.errors import RunError


class Answerer(Actor):
    @endpoint
    async def add(self, first: int, *, second: int) -> tuple[int, int]:
        """Return the rank and the sum."""
        return current_rank().rank, first + second

    @concurrent_endpoint
    async def never(self) -> None:
        """Wait forever without blocking later calls."""
        await asyncio.Event().wait()

    @endpoint
    async def raise_on_rank_1(self, run_error: bool) -> None:
        if current_rank().rank == 1:
            with add_error_context("here"):
                raise RunError("no good") if run_error else KeyError("missing")

    @concurrent_endpoint
    async def exit_on_rank_1_after_rank_0_raises(self, marker: str) -> None:
        """Exit on rank 1, while rank 0 raises the error of a collective that lost a peer before
        rank 1 is gone."""
        if current_rank().rank == 0:
            Path(marker).touch()
            raise RuntimeError("connection closed by peer")
        while not Path(marker).exists():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        os._exit(3)
