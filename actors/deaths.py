"""Deaths of the processes that calls of actors wait for, looked for once for all calls of an event
loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from rl.utils.processes import ProcessId, is_alive

LOOK_EVERY_S = 0.5
"""Interval at which processes are looked at."""


class DeathWatch:
    """Watch over processes, which are looked at twice a second, at the same cost for one waiting
    call and thousands.
    """

    def __init__(self) -> None:
        self._watched: dict[asyncio.Future[None], Collection[ProcessId]] = {}
        self._num_watches: Counter[ProcessId] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        """The next look; None while nothing is watched."""

    @contextmanager
    def watching(self, processes: Collection[ProcessId]) -> Iterator[asyncio.Future[None]]:
        """Yield a future that is done as soon as one of the processes is dead."""
        loop = asyncio.get_running_loop()
        death: asyncio.Future[None] = loop.create_future()
        self._watched[death] = processes
        self._num_watches.update(processes)
        if self._timer is None:
            self._timer = loop.call_later(LOOK_EVERY_S, self._look)
        try:
            yield death
        finally:
            death.cancel()
            del self._watched[death]
            for process in processes:
                self._num_watches[process] -= 1
                if not self._num_watches[process]:
                    del self._num_watches[process]

    def _look(self) -> None:
        dead = {process for process in self._num_watches if not is_alive(process)}
        if dead:
            for death, processes in self._watched.items():
                if not death.done() and not dead.isdisjoint(processes):
                    death.set_result(None)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(LOOK_EVERY_S, self._look) if self._watched else None


_WATCHES: WeakKeyDictionary[asyncio.AbstractEventLoop, DeathWatch] = WeakKeyDictionary()


def death_watch() -> DeathWatch:
    """Return the watch of the running event loop."""
    return _WATCHES.setdefault(asyncio.get_running_loop(), DeathWatch())
