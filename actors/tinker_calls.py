"""Calls to all ranks of the Tinker backend's trainer, one after another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from monarch.actor import ActorError

from actors.calls import ActorCallError, ActorGroup, ActorTimeoutError
from rl.errors import RunError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class BackendLostError(RunError):
    """Processes of the backend are gone, or in a state that nobody knows: it has to be closed."""


@dataclass(kw_only=True, slots=True)
class _Caller:
    waits: bool = True
    has_turn: bool = False


class TrainerCalls:
    """Who has the trainer makes calls to it alone; who comes next waits, in order.

    What has begun goes on to its end, also where its caller was cancelled: ranks that are in the middle of
    a call could not do another one.
    """

    def __init__(self, trainer: ActorGroup, *, num_ranks: int) -> None:
        self.trainer = trainer
        self._num_ranks = num_ranks
        self._turn = asyncio.Lock()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """By an error of all calls, when there is one."""
        self._tasks: set[asyncio.Task[Any]] = set()

    async def alone(
        self, work: Callable[[], Awaitable[T]], *, undo: Callable[[T], Awaitable[None]] | None = None
    ) -> T:
        """What `work` returns. Where nobody waits for it any more, `undo` takes that instead.

        Raises:
            TinkerError: the request was refused.
            BackendLostError: the trainer is gone; from then on every call raises it.
        """
        self.check()
        caller = _Caller()
        task = asyncio.create_task(self._in_turn(work, undo, caller))
        self._tasks.add(task)
        task.add_done_callback(self._done)
        awaited: set[asyncio.Future[Any]] = {task, self._ended}
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            caller.waits = False
            if not caller.has_turn:
                task.cancel()
            elif undo is not None and task.done() and task.exception() is None:
                await undo(task.result())  # It came too late.
            raise
        if not task.done():
            task.cancel()
            self.check()
        return task.result()

    async def call(self, endpoint: str, *args: Any, limit: str) -> list[Any]:
        """The answers of all ranks. Only within `alone`.

        Raises:
            TinkerError, RunError: the first refusal among them.
        """
        answers = await self.trainer.call(endpoint, *args, limit=limit)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def check(self) -> None:
        """Raise what ended all calls, if anything has."""
        if self._ended.done():
            self._ended.result()

    def end(self, error: Exception) -> None:
        """Let those that wait, and all later calls, raise this."""
        if not self._ended.done():
            self._ended.set_exception(error)
            self._ended.exception()  # Perhaps nobody asks.

    async def _in_turn(
        self,
        work: Callable[[], Awaitable[T]],
        undo: Callable[[T], Awaitable[None]] | None,
        caller: _Caller,
    ) -> T:
        async with self._turn:
            caller.has_turn = True
            self.check()
            try:
                result = await work()
                if undo is not None and not caller.waits:
                    await undo(result)
                return result
            except (ActorCallError, ActorTimeoutError) as error:
                if self._survived(error):
                    raise
                lost = BackendLostError(
                    f"the trainer is lost, and with it all models in training: {error}. Close this backend "
                    "and start another; what was saved can be loaded there"
                )
                self.end(lost)
                raise lost from error

    def _survived(self, error: Exception) -> bool:
        """Whether the endpoint itself raised, in a process that lives and has no others to be out of step
        with."""
        return self._num_ranks == 1 and isinstance(error.__cause__, ActorError)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # Its caller may have been cancelled.
