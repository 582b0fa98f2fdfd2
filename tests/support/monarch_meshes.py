"""Real process meshes for tests, started and stopped by `actors.launch.launcher`.

    @pytest.fixture(scope="module")
    def meshes():
        with monarch_meshes() as meshes:
            yield meshes

    def test_x(meshes):
        mesh = meshes.spawn_mesh(2)
        actor = mesh.spawn("x", X)
        answers = meshes.run(actor.f.call(1))

Actor classes must stand in an importable module (`tests.support...`), not in the test file.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from monarch.actor import Actor, ProcMesh, endpoint

from actors.launch.launcher import Launcher, setup_process_group_env
from actors.launch.member import LogSettings, RoleProcesses
from actors.launch.placement import Placement

T = TypeVar("T")

CALL_TIMEOUT_S = 90.0


class _Pid(Actor):
    @endpoint
    async def get(self) -> int:
        return os.getpid()


class Meshes:
    """An event loop, and the meshes that tests share on it."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._numbers = itertools.count()
        self.launcher = Launcher()

    def run(self, awaitable: Awaitable[T], *, timeout_s: float = CALL_TIMEOUT_S) -> T:
        """Return the awaited value, or raise TimeoutError."""

        async def wait() -> T:
            return await asyncio.wait_for(_coroutine(awaitable), timeout_s)

        return self._runner.run(wait())

    def spawn_mesh(
        self, num_procs: int, *, env: Mapping[str, str] | None = None, process_group: bool = True
    ) -> ProcMesh:
        """Start processes with one thread each and, by default, the environment of a process
        group.
        """
        role = self.spawn_role(f"test{next(self._numbers)}", num_procs=num_procs, env=env)
        if process_group:
            self.run(setup_process_group_env(role))
        return role.mesh

    def spawn_role(
        self,
        name: str,
        *,
        env: Mapping[str, str] | None = None,
        logs: LogSettings | None = None,
        **settings: Any,
    ) -> RoleProcesses:
        return self.run(
            self.launcher.spawn_role(Placement(role=name, **settings), env=env, logs=logs)
        )

    def pids(self, mesh: ProcMesh) -> list[int]:
        """Return the pids by rank."""
        return [pid for _, pid in self.run(mesh.spawn("pid", _Pid).get.call()).items()]

    def stop(self, mesh: ProcMesh) -> None:
        for role in list(self.launcher.roles):
            if role.mesh is mesh:
                self.run(self.launcher.stop(role))


@contextmanager
def monarch_meshes() -> Iterator[Meshes]:
    """Yield a factory of meshes; all of them end with the block."""
    with asyncio.Runner() as runner:
        meshes = Meshes(runner)
        try:
            yield meshes
        finally:
            meshes.run(meshes.launcher.stop_all())


async def _coroutine(awaitable: Awaitable[T]) -> T:
    return await awaitable
