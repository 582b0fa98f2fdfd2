"""Which player a run's agents have."""

import asyncio
from contextlib import asynccontextmanager
from typing import Any

from actors.cluster.agents import open_player

RENDERER: Any = "renderer"


class Played:
    """Task that brings its own player."""

    def __init__(self):
        self.ends = []

    @asynccontextmanager
    async def open_player(self, *, renderer):
        yield [renderer]
        self.ends.append(renderer)


def open_once(task: Any) -> Any:
    async def scenario():
        async with open_player(None, None, task=task, renderer=RENDERER) as player:
            assert not getattr(task, "ends", [])
            return player

    return asyncio.run(scenario())


def test_task_may_bring_its_own_player():
    task = Played()
    assert open_once(task) == [RENDERER]
    assert task.ends == [RENDERER]


def test_task_without_agents_has_no_player():
    assert open_once(object()) is None
