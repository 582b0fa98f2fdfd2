"""Real process meshes for tests, started and ended by `actors.launch`.

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
import os
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from monarch.actor import Actor, ProcMesh, endpoint

from actors import launch

T = TypeVar("T")

CALL_TIMEOUT_S = 90.0


class _Pid(Actor):
    @endpoint
    async def get(self) -> int:
        return os.getpid()


class Meshes:
    """One event loop, and the meshes that tests share on it."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._num_spawned = 0

    def run(self, awaitable: Awaitable[T], *, timeout_s: float = CALL_TIMEOUT_S) -> T:
        """The awaited value; TimeoutError rather than a hanging test."""

        async def wait() -> T:
            return await asyncio.wait_for(_coroutine(awaitable), timeout_s)

        return self._runner.run(wait())

    def spawn_mesh(
        self, num_procs: int, *, env: Mapping[str, str] | None = None, process_group: bool = True
    ) -> ProcMesh:
        """Processes with one thread each and, by default, the environment of a process group."""
        self._num_spawned += 1
        role = f"test{self._num_spawned}"
        mesh = self.run(launch.spawn_role(role, num_procs=num_procs, env=env, threads=1))
        if process_group:
            self.run(launch.setup_process_group_env(mesh))
        return mesh

    def pids(self, mesh: ProcMesh) -> list[int]:
        """Of the mesh's processes, by rank."""
        return [pid for _, pid in self.run(mesh.spawn("pid", _Pid).get.call()).items()]

    def stop(self, mesh: ProcMesh) -> None:
        self.run(launch.stop(mesh))


@contextmanager
def monarch_meshes() -> Iterator[Meshes]:
    """All meshes spawned inside end with the block."""
    with asyncio.Runner() as runner:
        meshes = Meshes(runner)
        try:
            yield meshes
        finally:
            meshes.run(launch.stop_all())


async def _coroutine(awaitable: Awaitable[T]) -> T:
    return await awaitable
