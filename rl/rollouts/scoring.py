"""Scoring with a time limit, in a process that can be killed.

A reward function is somebody's code: it may loop for ever, in Python (a signal interrupts it) or in C (its
process is killed and started again), and it may end its process. Whatever it does, one score fails, or all of
a group where it is a function of a group; what else was under way is scored again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import multiprocessing
import pickle
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from rl.errors import RunError
from rl.rollouts.rubric import MAX_CONCURRENCY, Rubric, RubricCall
from rl.rollouts.rubric_functions import CallResult, Criterion, is_async, named, too_long
from rl.rollouts.scoring_limit import score_within
from rl.rollouts.scoring_process import BEGAN, HEADER, StatesCall, frame, serve
from rl.types import Rollout, Score

__all__ = ["ScoringWorker", "longest_s", "score_within"]

GRACE_S = 1.5
LOOK_EVERY_S = 0.2
"""How often it is looked whether a call is overdue, and whether the process lives."""
STATES_S = 5.0
START_S = 120.0
"""Within this a process has imported the rubric's module."""
MOST_IDLE_ENDS = 3
"""A process that ends as often without having called a reward function will not do better next time."""

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True, eq=False)
class _Work:
    """A call of reward functions, on its way."""

    call_id: int
    frame: bytes
    names: tuple[str, ...]
    num_rollouts: int
    limit_s: float
    kill_after_s: float
    result: asyncio.Future[CallResult]
    began_at: float | None = None
    """By `time.monotonic`; None while it waits in the process, or for one."""

    def is_overdue(self) -> bool:
        return self.began_at is not None and time.monotonic() - self.began_at > self.kill_after_s


def longest_s(
    rubric: Rubric, num_rollouts: int, *, time_limit_s: float, max_concurrency: int = MAX_CONCURRENCY
) -> float:
    """An upper bound of what so many rollouts take in one process whose functions keep their time limits.

    Sync functions of a rollout, and functions of a group, run one after another. Async ones of a rollout
    overlap: until there is no place for one more, then as far as their own `max_concurrency` lets them.
    """
    functions = [c.function for c in rubric.criteria if isinstance(c, Criterion)]
    overlapping = [f for f in functions if is_async(f)]
    has_sync = len(overlapping) < len(functions) or callable(rubric.correct)
    num_of_groups = len(rubric.criteria) - len(functions)
    num_limits = num_rollouts * (has_sync + num_of_groups)
    if overlapping:
        own = (getattr(f, "max_concurrency", None) or max_concurrency for f in overlapping)
        fewest = min(max_concurrency, *own)
        num_limits += math.ceil(num_rollouts * len(overlapping) / max_concurrency)
        num_limits += math.ceil(num_rollouts / fewest)
    return num_limits * time_limit_s


class ScoringWorker:
    """Scores groups of rollouts in a process of its own; calls overlap. Of one event loop.

    Args:
        time_limit_s: longest time that the sync functions of one rollout may take together, and each async
            function of one. A function of a group has that for each of its rollouts.
        max_concurrency: async reward functions under way at once; who waits for a place is not timed.
        grace_s: how much longer than its limit a call may take before its process is killed.
        states_s: how long the process may take to tell its random states; a function that holds the
            interpreter's lock is in the way.
    """

    def __init__(
        self,
        *,
        rubric: Rubric,
        time_limit_s: float,
        max_concurrency: int = MAX_CONCURRENCY,
        grace_s: float = GRACE_S,
        states_s: float = STATES_S,
    ) -> None:
        self.rubric = rubric
        self.time_limit_s = time_limit_s
        self.max_concurrency = max_concurrency
        self.grace_s = grace_s
        self.states_s = states_s
        self._ids = itertools.count(1)
        self._work: dict[int, _Work] = {}
        self._waiting: deque[_Work] = deque()
        self._suspects: deque[_Work] = deque()
        self._states: dict[int, asyncio.Future[bytes]] = {}
        """Answers to `StatesCall` that are awaited."""
        self._link: _Link | None = None
        self._started: asyncio.Future[None] | None = None
        self._supervisor: asyncio.Task[None] | None = None

    async def score(self, groups: Sequence[Sequence[Rollout]], *, alone: bool = False) -> list[list[Score]]:
        """A score for each rollout, in order; one that takes too long is a failed score. `alone` as in
        `rl.protocols.Scorer`.

        Raises:
            RunError: the process cannot be started, as the rubric cannot be loaded in it.
            TimeoutError: the process did not start within `START_S`.
        """
        calls = [self.rubric.calls(group, alone=alone) for group in groups]
        works = [[self._submit(call) for call in of_group] for of_group in calls]
        self._ensure_started()
        self._send()
        await asyncio.gather(*(work.result for of_group in works for work in of_group))
        return [
            self.rubric.scores(group, of_group, [work.result.result() for work in works_of_group])
            for group, of_group, works_of_group in zip(groups, calls, works, strict=True)
        ]

    async def start(self) -> None:
        """Start the process now rather than at the first score; idempotent. Raises as `score` does."""
        await asyncio.shield(self._ensure_started())

    async def random_states(self) -> bytes | None:
        """Of the process that calls reward functions; None where none is, or it does not answer soon."""
        return await self._ask_for_states(StatesCall())

    async def restore_random_states(self, states: bytes) -> None:
        """Set what `random_states` returned, in the process that is there now."""
        await self.start()
        if await self._ask_for_states(StatesCall(restored=states)) is None:
            logger.warning("random states of the scoring process are not restored: it does not answer")

    async def _ask_for_states(self, call: StatesCall) -> bytes | None:
        if self._link is None:
            return None
        call_id = next(self._ids)
        answer = self._states[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._link.writer.write(frame(call_id, call))
            return await asyncio.wait_for(answer, self.states_s)
        except TimeoutError:
            return None
        finally:
            del self._states[call_id]

    async def close(self) -> None:
        """End the process; scores that are awaited fail. Idempotent."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.cancel()
            await asyncio.wait({supervisor})

    def _ensure_started(self) -> asyncio.Future[None]:
        """Done when a process is there."""
        if self._supervisor is None or self._supervisor.done() or self._started is None:
            self._started = asyncio.get_running_loop().create_future()
            self._supervisor = asyncio.create_task(self._supervise(self._started))
        return self._started

    def _submit(self, call: RubricCall) -> _Work:
        call_id, limit_s = next(self._ids), self.time_limit_s * len(call.rollouts)
        work = _Work(
            call_id=call_id,
            frame=frame(call_id, call),
            names=call.names,
            num_rollouts=len(call.rollouts),
            limit_s=limit_s,
            kill_after_s=limit_s + self.grace_s,
            result=asyncio.get_running_loop().create_future(),
        )
        self._work[call_id] = work
        self._waiting.append(work)
        return work

    def _send(self) -> None:
        """What may be sent: all that waits, or the first suspect alone."""
        if self._link is None or self._suspects:
            return
        while self._waiting:
            self._link.writer.write(self._waiting.popleft().frame)

    async def _supervise(self, started: asyncio.Future[None]) -> None:
        """Keep a process running while there is work; returns when one has ended and there is none."""
        error: BaseException = RunError("the scoring process was closed")
        num_idle_ends = 0
        try:
            while self._work or not started.done():
                async with _Link.open(self.rubric, self.time_limit_s, self.max_concurrency) as link:
                    self._link = link
                    if not started.done():
                        started.set_result(None)
                    self._send_again()
                    late = await self._follow(link)
                num_idle_ends = 0 if self._blame(late, link.process.exitcode) else num_idle_ends + 1
                if num_idle_ends == MOST_IDLE_ENDS and self._work:
                    raise RunError(
                        f"the scoring process ended {MOST_IDLE_ENDS} times before it called a reward "
                        f"function (exit code {link.process.exitcode}); its own error is on stderr"
                    )
        except Exception as raised:  # noqa: BLE001  (goes to everybody who waits)
            error = raised
        finally:
            self._link = None
            unanswered: list[asyncio.Future[Any]] = [started, *(w.result for w in self._work.values())]
            for waiting in unanswered:
                if not waiting.done():
                    waiting.set_exception(error)
                    waiting.exception()  # Retrieved, should nobody wait.
            self._work.clear()
            self._waiting.clear()
            self._suspects.clear()

    def _send_again(self) -> None:
        """To a new process, whatever has no result: its suspects one by one, before all others."""
        assert self._link is not None
        if self._suspects:
            self._link.writer.write(self._suspects[0].frame)
        else:
            self._send()

    async def _follow(self, link: _Link) -> list[_Work]:
        """Until the process has ended, or has to be ended as calls are overdue: those."""
        receiving = asyncio.create_task(self._receive(link))
        late: list[_Work] = []
        dead = False
        try:
            while True:
                await asyncio.wait({receiving}, timeout=LOOK_EVERY_S)
                if receiving.done():
                    receiving.result()
                    return []
                if dead:
                    return []
                # What is seen twice is so: this process itself may have been too busy to read the results.
                dead = not link.process.is_alive()
                overdue = [work for work in self._work.values() if work.is_overdue()]
                if confirmed := [work for work in overdue if work in late]:
                    return confirmed
                late = overdue
        finally:
            self._link = None
            receiving.cancel()

    async def _receive(self, link: _Link) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                call_id, message = await link.receive()
                if (answer := self._states.get(call_id)) is not None:
                    if not answer.done():
                        answer.set_result(message)
                elif isinstance(message, bytes):
                    continue  # states that nobody awaits any more
                elif message == BEGAN:
                    self._work[call_id].began_at = time.monotonic()
                else:
                    self._end(self._work[call_id], message)

    def _end(self, work: _Work, result: CallResult) -> None:
        del self._work[work.call_id]
        if not work.result.done():  # Nobody may wait any more.
            work.result.set_result(result)
        if self._suspects and self._suspects[0] is work:
            self._suspects.popleft()
            self._send_again()

    def _blame(self, late: Sequence[_Work], exit_code: int | None) -> bool:
        """Fail the call that ended the process, where that is known: it alone had begun.

        Of several it may have been any, so they run one by one in the next process; the first that ends that
        one was it, and the rest is free again. Returns whether any call had begun.
        """
        begun = [*late, *(w for w in self._work.values() if w.began_at is not None and w not in late)]
        self._suspects.clear()
        if len(begun) == 1:
            (work,) = begun
            reason = f"{named(work.names)} ended the scoring process (exit code {exit_code})"
            if late:
                reason = too_long(work.names, work.limit_s, work.num_rollouts)
            logger.warning("%s; the process is started again", reason)
            self._end(work, CallResult(failure=reason))
        elif begun:
            logger.warning("the scoring process ended or hung within %d calls: one by one now", len(begun))
            self._suspects.extend(begun)
        for work in list(self._work.values()):
            work.began_at = None
            if work.result.cancelled():
                del self._work[work.call_id]
        self._suspects = deque(work for work in self._suspects if not work.result.cancelled())
        self._waiting = deque(work for work in self._work.values() if work not in self._suspects)
        return bool(begun)


@dataclass(kw_only=True, slots=True, eq=False)
class _Link:
    """A scoring process and the way to it."""

    process: Any
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @staticmethod
    @contextlib.asynccontextmanager
    async def open(rubric: Rubric, time_limit_s: float, max_concurrency: int) -> AsyncIterator[_Link]:
        """A process that is ready, and that is gone afterwards."""
        # Spawned, not forked: the actor's process has threads and loaded runtimes.
        context = multiprocessing.get_context("spawn")
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        process = context.Process(
            target=serve, args=(theirs, rubric, time_limit_s, max_concurrency), name="scoring", daemon=True
        )
        link = _Link(process=process, reader=reader, writer=writer)
        try:
            link._start_process(theirs)
            await link._wait_until_ready()
            yield link
        finally:
            writer.close()
            if process.pid is not None:
                process.kill()
                await asyncio.shield(asyncio.to_thread(process.join))

    async def receive(self) -> tuple[int, Any]:
        call_id, length = HEADER.unpack(await self.reader.readexactly(HEADER.size))
        return call_id, pickle.loads(await self.reader.readexactly(length))

    def _start_process(self, theirs: socket.socket) -> None:
        with theirs:
            try:
                self.process.start()
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise RunError(
                    f"the rubric cannot be sent to the scoring process ({error}): define reward functions at "
                    "the top of a module, not within a function"
                ) from error

    async def _wait_until_ready(self) -> None:
        try:
            await asyncio.wait_for(self.receive(), START_S)
        except TimeoutError:
            raise TimeoutError(f"the scoring process did not start within {START_S:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            await asyncio.to_thread(self.process.join, GRACE_S)
            raise RunError(
                f"the scoring process ended while loading the rubric (exit code {self.process.exitcode}); "
                "its own error is on stderr"
            ) from error
