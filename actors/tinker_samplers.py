"""Who samples from which weights: generators serve one snapshot after another.

All requests of the snapshot that is served run at once. As soon as one for another snapshot has waited, no
more are let in; when those that run have ended, the generators take the weights that the oldest one waits
for. So none waits for more than what was there before it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from monarch.actor import ActorError

from actors.backend import ActorSampler
from actors.calls import ActorCallError, ActorTimeoutError, Group
from actors.sync_check import pull_checked
from actors.tinker_calls import BackendLostError
from actors.vllm.errors import DivergedError, GeneratorError
from rl.errors import RunError
from rl.tinker.errors import InvalidRequestError
from rl.types import BoxSum

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True, eq=False)
class Snapshot:
    """Weights in the store, which nobody changes."""

    version: int
    sums: tuple[BoxSum, ...]
    """Of what was pushed."""
    num_users: int = 0
    """Requests that wait or run, and pulls."""
    is_closed: bool = False
    """Whether it is forgotten with its last user."""


@dataclass(kw_only=True, slots=True, eq=False)
class Replica:
    """One generator."""

    generator: Group
    sampler: ActorSampler
    load: int = 0
    """Completions under way."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Waiting:
    snapshot: Snapshot
    admitted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class SnapshotServer:
    """Used from one event loop."""

    def __init__(self, *, generators: Sequence[Group], forget: Callable[[Snapshot], Awaitable[None]]) -> None:
        """`forget` is called for a closed snapshot when nobody uses it any more."""
        self._replicas = [Replica(generator=g, sampler=ActorSampler(g)) for g in generators]
        self._forget = forget
        self._served: Snapshot | None = None
        self._num_running = 0
        self._waiting: list[_Waiting] = []
        """Oldest first."""
        self._swap: asyncio.Task[None] | None = None
        self._forgetting: set[asyncio.Task[None]] = set()
        self._failure: Exception | None = None
        self._ended = False

    @asynccontextmanager
    async def serving(self, snapshot: Snapshot, *, load: int) -> AsyncIterator[Replica]:
        """Within it the generators have these weights; `load` counts completions.

        Raises:
            BackendLostError: a generator is gone, now or before.
        """
        snapshot.num_users += 1
        try:
            await self._admission(snapshot)
            replica = min(self._replicas, key=lambda replica: replica.load)
            replica.load += load
            try:
                yield replica
            except DivergedError as error:
                raise InvalidRequestError(f"the sampler's weights have diverged: {error}") from error
            except (ActorCallError, ActorTimeoutError, GeneratorError) as error:
                if isinstance(error.__cause__, ActorError) and not isinstance(error, GeneratorError):
                    raise  # of this request alone: the generator itself answered
                raise self._lost(error) from error
            finally:
                replica.load -= load
                self._num_running -= 1
                self._advance()
        finally:
            self._release(snapshot)

    def close_snapshot(self, snapshot: Snapshot) -> None:
        """Forget it once its requests have ended."""
        snapshot.is_closed = True
        self._forget_unused(snapshot)

    async def end(self, error: Exception) -> None:
        """Those that wait, and all later ones, raise this; those that run end with their generators."""
        self._ended = True
        self._fail(error)
        tasks = [task for task in (self._swap, *self._forgetting) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _admission(self, snapshot: Snapshot) -> None:
        if self._failure is not None:
            raise self._failure
        waiting = _Waiting(snapshot=snapshot)
        self._waiting.append(waiting)
        self._advance()
        try:
            await waiting.admitted
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif not waiting.admitted.cancelled() and waiting.admitted.exception() is None:
                # Let in, and cancelled before it knew.
                self._num_running -= 1
            self._advance()
            raise

    def _advance(self) -> None:
        """Let in who may come in now, or begin to take the weights that the oldest waits for."""
        if self._swap is not None or self._failure is not None:
            return
        while self._waiting and self._waiting[0].snapshot is self._served:
            self._admit(self._waiting.pop(0))
        if self._waiting and not self._num_running:
            self._swap = asyncio.create_task(self._take(self._waiting[0].snapshot))

    def _admit(self, waiting: _Waiting) -> None:
        if not waiting.admitted.done():  # Or it was cancelled, and has not had its turn to say so.
            self._num_running += 1
            waiting.admitted.set_result(None)

    async def _take(self, snapshot: Snapshot) -> None:
        """Let the generators have these weights, and then all that wait for them."""
        snapshot.num_users += 1
        self._served = None
        try:
            await pull_checked(
                snapshot.version,
                sums=snapshot.sums,
                generators=[replica.generator for replica in self._replicas],
                limit="sync_s",
            )
        except RunError as error:
            self._lost(error)
            return
        finally:
            self._swap = None
            self._release(snapshot)
        self._served = snapshot
        for waiting in [one for one in self._waiting if one.snapshot is snapshot]:
            self._waiting.remove(waiting)
            self._admit(waiting)
        self._advance()

    def _lost(self, error: Exception) -> Exception:
        """From now on nothing is sampled."""
        lost = BackendLostError(f"a generator is lost, and nothing can be sampled any more: {error}")
        lost.__cause__ = error
        logger.error("%s", lost)
        self._fail(lost)
        return lost

    def _fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.admitted.done():
                one.admitted.set_exception(error)

    def _release(self, snapshot: Snapshot) -> None:
        snapshot.num_users -= 1
        self._forget_unused(snapshot)

    def _forget_unused(self, snapshot: Snapshot) -> None:
        if snapshot.is_closed and not snapshot.num_users and not self._ended:
            task = asyncio.create_task(self._forget_quietly(snapshot))
            self._forgetting.add(task)
            task.add_done_callback(self._forgetting.discard)

    async def _forget_quietly(self, snapshot: Snapshot) -> None:
        try:
            await self._forget(snapshot)
        except RunError as error:
            logger.warning("version %d was not forgotten: %s", snapshot.version, error)
