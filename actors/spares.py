"""Generators' processes that have imported all they need, and wait to take a lost one's place."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from itertools import count

from monarch.actor import ProcMesh

from actors import launch
from actors.background import in_background
from actors.calls import LOOK_EVERY_S
from actors.generator import VLLMGenerator
from actors.placement import Place
from actors.processes import is_alive
from actors.roles import Roles
from rl.errors import RunError

logger = logging.getLogger(__name__)

SPARE = "spare"
"""Start of the names of their roles."""


class Spares:
    """As many as there are to be are there or on their way; each is all processes of one generator."""

    def __init__(self, *, number: int, roles: Roles, config: VLLMGenerator.Config, like: Place) -> None:
        """`like` is the place of any generator: all have as many processes and threads."""
        self._number = number
        self._roles = roles
        self._config = config
        self._like = like
        self._ready: list[tuple[str, ProcMesh]] = []
        """With the names of their roles."""
        self._num_starting = 0
        self._names = count()

    def fill(self) -> None:
        """Start those that are missing, in the background."""
        for _ in range(self._number - len(self._ready) - self._num_starting):
            self._num_starting += 1
            name = f"{SPARE}_{next(self._names)}"
            in_background(self._start(name), name=f"start of {name}")

    async def ready(self) -> None:
        """Until as many are there as there are to be; each start has deadlines of its own."""
        while len(self._ready) < self._number:
            await asyncio.sleep(LOOK_EVERY_S)

    async def take(self, at: Place) -> ProcMesh | None:
        """One that is now of this place; None if none is ready. `fill` starts another one."""
        while self._ready:
            name, mesh = self._ready.pop(0)
            if all(is_alive(process) for process in launch.local_processes(mesh).values()):
                await self._roles.move(mesh, at)
                return mesh
            await launch.stop_lost(name)
        return None

    async def _start(self, name: str) -> None:
        try:
            mesh = await self._roles.spare(replace(self._like, role=name, gpus=None), self._config)
            self._ready.append((name, mesh))
            logger.info("%s is ready", name)
        except RunError as error:
            # Not worth a run's end: what is lost meanwhile takes longer to start.
            logger.warning("%s did not start, there is one less: %s", name, error)
            self._number -= 1
        finally:
            self._num_starting -= 1
