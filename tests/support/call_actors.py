"""An actor whose endpoints end in every way a call can."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from monarch.actor import Actor, concurrent_endpoint, current_rank, endpoint

from rl.errors import RunError, naming
from rl.observability.activity import during


class Answerer(Actor):
    @endpoint
    async def add(self, first: int, *, second: int) -> tuple[int, int]:
        """Its rank, and the sum."""
        return current_rank().rank, first + second

    @concurrent_endpoint
    @during("never")
    async def never(self) -> None:
        """Holds up no later call."""
        await asyncio.Event().wait()

    @endpoint
    async def raise_on_rank_1(self, run_error: bool) -> None:
        if current_rank().rank == 1:
            with naming("here"):
                raise RunError("no good") if run_error else KeyError("missing")

    @concurrent_endpoint
    async def exit_on_rank_1_as_0_tells(self, marker: str) -> None:
        """Rank 0 raises what a collective raises that has lost a peer, before that one is gone."""
        if current_rank().rank == 0:
            Path(marker).touch()
            raise RuntimeError("connection closed by peer")
        while not Path(marker).exists():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        os._exit(3)

    @concurrent_endpoint
    async def exit_on_rank_1(self) -> None:
        if current_rank().rank == 1:
            os._exit(3)
        await asyncio.Event().wait()
