"""A run that has lost its trainer gets another one."""

from __future__ import annotations

from actors.fleet import Fleet
from rl.errors import RunError


async def revive_trainer(fleet: Fleet, error: RunError) -> Fleet:
    """The fleet with a trainer that is set up and has not loaded anything, after `error` of its loop.

    Raises:
        RunError: `error`: the trainer is not lost, or may not be started again.
    """
    raise error
