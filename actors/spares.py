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
MAX_IDLE_DEATHS = 3
"""As often one that dies while it waits is started again."""


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
        self._tending: asyncio.Task[None] | None = None

    def fill(self) -> None:
        """Start those that are missing, in the background, and see to it that they live."""
        if self._tending is None and self._number:
            self._tending = in_background(self._tend(), name="watch over the spares")
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
            if _lives(mesh):
                try:
                    await self._roles.move(mesh, at)
                    return mesh
                except RunError as error:
                    logger.warning("%s could not take the place of %s: %s", name, at.role, error)
                    await launch.stop_lost(at.role)
            await launch.stop_lost(name)
        return None

    async def _tend(self) -> None:
        """What dies while it waits makes room for another one, for as long as that helps."""
        for num_lost in count(1):
            while not (dead := [(name, mesh) for name, mesh in self._ready if not _lives(mesh)]):
                await asyncio.sleep(LOOK_EVERY_S)
            self._ready.remove(dead[0])
            name, _ = dead[0]
            await launch.stop_lost(name)
            if num_lost > MAX_IDLE_DEATHS:
                logger.warning("%s died while it waited, as others before it: there is one less", name)
                self._number -= 1
            else:
                logger.info("%s died while it waited", name)
            self.fill()

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


def _lives(mesh: ProcMesh) -> bool:
    return all(is_alive(process) for process in launch.local_processes(mesh).values())
