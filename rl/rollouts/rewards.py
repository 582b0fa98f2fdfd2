"""Reward functions in a process of their own, with time limits that always hold.

A reward function is foreign code: it may loop forever in Python (a signal interrupts it) or in C (its process
is killed and started again), or end its process. Whatever it does, only its own call fails: one score, or those
of a group. The process calls sync functions one at a time in its main thread, and has the next few at hand;
async functions overlap in an event loop. If the process ends while several calls are under way, each of them is
repeated alone in a second process to find the guilty one.

    to the process      (id, RubricCall)
    from the process    (0, None) once it is ready; then (id, CallResult)
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue
from typing import Any

from rl.rollouts.main_thread_limit import MainThreadLimit, TimeLimitError
from rl.rollouts.rubric import MAX_CONCURRENCY, CallResult, Concurrency, Rubric, RubricCall
from rl.types import Rollout, Score
from rl.utils.errors import RunError
from rl.utils.threads import run_now

GRACE_S = 1.5
"""Time after its limit in which a call may still answer before its process is killed."""
START_S = 120.0
"""Time in which the process must have imported the rubric's module."""
MAX_SENT = 16
"""Calls of sync functions that the process has at a time, so that it never waits for the next one."""

logger = logging.getLogger(__name__)


class ProcessEndedError(Exception):
    """The reward process ended, or was killed because a call did not answer in time.

    Args:
        num_calls: calls that were under way.
    """

    def __init__(self, *, exit_code: int | None, num_calls: int) -> None:
        super().__init__(f"the reward process ended (exit code {exit_code}) during {num_calls} calls")
        self.exit_code = exit_code
        self.num_calls = num_calls


def longest_s(rubric: Rubric, num_rollouts: int, *, time_limit_s: float) -> float:
    """Return an upper bound of the seconds that one process needs if all functions keep their time limits."""
    return (len(rubric.criteria) + 1) * num_rollouts * time_limit_s


class RewardProcess:
    """Scores groups of rollouts in a child process; calls of `score` overlap. Bound to one event loop.

    Args:
        time_limit_s: longest time for the sync functions of one rollout together, and for each async function
            of one. A function of a group has that time for each of its rollouts.
        max_concurrency: async reward functions under way at once; waiting for a slot is not timed.
        grace_s: time after its limit in which a call may still answer before its process is killed.
    """

    def __init__(
        self,
        *,
        rubric: Rubric,
        time_limit_s: float,
        max_concurrency: int = MAX_CONCURRENCY,
        grace_s: float = GRACE_S,
    ) -> None:
        self.rubric = rubric
        self.time_limit_s = time_limit_s
        self.grace_s = grace_s
        self._process = _Child(rubric, time_limit_s)
        self._second = _Child(rubric, time_limit_s)
        """Process for calls that are repeated alone."""
        self._sync = asyncio.Semaphore(MAX_SENT)
        self._turn = asyncio.Lock()
        """Held by the sync call that the process works on, the first that was sent."""
        self._alone = asyncio.Lock()
        self._concurrency = Concurrency(max_concurrency)
        self._tasks: set[asyncio.Task[CallResult]] = set()
        self._closed = False

    async def start(self) -> None:
        """Start the process now rather than at the first score; idempotent. Raises as `score` does."""
        await self._process.start()

    async def score(self, groups: Sequence[Sequence[Rollout]], *, alone: bool = False) -> list[list[Score]]:
        """Return a score for each rollout, in order; a call that takes too long gives a failed score.

        `alone` as in `rl.protocols.Rewarder`.

        Raises:
            RunError: the process cannot be started because it cannot load the rubric, or was closed.
            TimeoutError: the process did not start within `START_S`.
        """
        calls = [self.rubric.calls(group, alone=alone) for group in groups]
        tasks = [asyncio.create_task(self._result(call)) for of_group in calls for call in of_group]
        for task in tasks:
            # Calls go on when `score` is cancelled: the process could not stop them either.
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        results = iter(await asyncio.gather(*map(asyncio.shield, tasks)))
        return [
            self.rubric.scores(group, of_group, [next(results) for _ in of_group])
            for group, of_group in zip(groups, calls, strict=True)
        ]

    async def close(self) -> None:
        """End the processes; pending scores fail. Idempotent."""
        self._closed = True
        await asyncio.gather(self._process.close(), self._second.close())
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _result(self, call: RubricCall) -> CallResult:
        if self.rubric.is_async(call):
            async with self._concurrency.slot(self.rubric.criterion(call.names[0])):
                result = await self._attempt(call, self._process)
        else:
            async with self._sync:
                result = await self._attempt(call, self._process, turn=self._turn)
        if result is None:
            async with self._alone:
                result = await self._attempt(call, self._second)
        assert result is not None, "a call alone in a process has a result"
        return result

    async def _attempt(
        self, call: RubricCall, process: _Child, *, turn: asyncio.Lock | None = None
    ) -> CallResult | None:
        """Make a call in a process; return None if the process ended, perhaps because of another call.

        The call's time begins with its turn.
        """
        if not self._closed:
            await process.start()
        if self._closed:
            raise RunError("the reward process was closed")
        answer = process.send(call)
        async with turn or contextlib.nullcontext():
            await asyncio.wait({answer}, timeout=self.time_limit_s * len(call.rollouts))
            # The second wait also lets this event loop, if it was busy, read the answer.
            await asyncio.wait({answer}, timeout=self.grace_s)
            if overdue := not answer.done():
                process.kill()
        try:
            result: CallResult = await answer
            return result
        except ProcessEndedError as error:
            if self._closed:
                raise RunError("the reward process was closed") from None
            if error.num_calls > 1:
                logger.warning("the reward process ended or hung during %d calls", error.num_calls)
                return None
            if overdue:
                return call.too_long(self.time_limit_s)
            return CallResult(failure=f"{call.title} ended the reward process (exit code {error.exit_code})")


class _Child:
    """A child process, and the threads that write to and read from its pipe."""

    def __init__(self, rubric: Rubric, time_limit_s: float) -> None:
        self.process: SpawnProcess | None = None
        self._arguments = (rubric, time_limit_s)
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._outgoing: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
        self._ended = asyncio.Event()
        self._ended.set()
        self._starting = asyncio.Lock()

    @property
    def is_running(self) -> bool:
        return not self._ended.is_set() and self.process is not None and self.process.is_alive()

    async def start(self) -> None:
        """Start the process unless it runs already, and wait until it is ready."""
        async with self._starting:
            if self.is_running:
                return
            await self._end()
            # Spawned, not forked: the parent has threads and loaded runtimes.
            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, *self._arguments), name="rewards", daemon=True
            )
            try:
                process.start()
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise RunError(
                    f"the rubric cannot be sent to the reward process ({error}): define its functions at the top of "
                    "a module"
                ) from error
            finally:
                theirs.close()
            self.process, self._outgoing, self._ended = process, SimpleQueue(), asyncio.Event()
            ready = self._answer(0)
            loop = asyncio.get_running_loop()
            threading.Thread(target=_write, args=(ours, self._outgoing), daemon=True).start()
            threading.Thread(target=self._read, args=(loop, ours, process), daemon=True).start()
            try:
                await asyncio.wait_for(ready, START_S)
            except TimeoutError:
                await self._end()
                raise TimeoutError(f"the reward process did not start within {START_S:g} s") from None
            except ProcessEndedError as error:
                code = error.exit_code
                raise RunError(
                    f"the reward process ended while loading the rubric (exit code {code}): see stderr"
                ) from error

    def send(self, message: Any) -> asyncio.Future[Any]:
        """Send a message to the running process; the answer is a ProcessEndedError if the process ends."""
        call_id = next(self._ids)
        answer = self._answer(call_id)
        self._outgoing.put((call_id, message))
        return answer

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    async def close(self) -> None:
        async with self._starting:
            await self._end()

    async def _end(self) -> None:
        """Kill the process, if there is one, and wait until it is gone."""
        self.kill()
        await self._ended.wait()

    def _answer(self, call_id: int) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[call_id] = answer
        answer.add_done_callback(lambda _: self._answers.pop(call_id))
        return answer

    def _read(self, loop: asyncio.AbstractEventLoop, link: Connection, process: SpawnProcess) -> None:
        """Hand out answers until the process has ended and all that it sent is read, in a thread."""
        assert process.pid is not None
        # A process that a reward function forked may keep the pipe and `process.sentinel` open.
        end = os.pidfd_open(process.pid)
        with contextlib.suppress(EOFError, OSError):
            while link in wait([link, end]):
                loop.call_soon_threadsafe(self._settle, *link.recv())
        process.join()
        os.close(end)
        link.close()
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(self._fail, process.exitcode)

    def _settle(self, call_id: int, message: Any) -> None:
        answer = self._answers.get(call_id)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def _fail(self, exit_code: int | None) -> None:
        """Fail the calls that a process which ended has not answered."""
        self._outgoing.put(None)
        self._ended.set()
        waiting = [answer for answer in self._answers.values() if not answer.done()]
        for answer in waiting:
            answer.set_exception(ProcessEndedError(exit_code=exit_code, num_calls=len(waiting)))


def _write(link: Connection, outgoing: SimpleQueue[tuple[int, Any] | None]) -> None:
    """Write messages in a thread, because a process that hangs does not read."""
    with contextlib.suppress(OSError):
        while (message := outgoing.get()) is not None:
            link.send(message)


def score_within(rubric: Rubric, group: Sequence[Rollout], *, time_limit_s: float) -> list[Score]:
    """Score a problem's rollouts in this process with time limits; in the main thread only (a signal)."""
    calls = rubric.calls(group)
    with MainThreadLimit() as limit:
        results = [
            run_now(rubric.async_result(call, time_limit_s=time_limit_s))
            if rubric.is_async(call)
            else _result_within(rubric, call, time_limit_s=time_limit_s, limit=limit)
            for call in calls
        ]
    return rubric.scores(group, calls, results)


def _result_within(
    rubric: Rubric, call: RubricCall, *, time_limit_s: float, limit: MainThreadLimit
) -> CallResult:
    try:
        return limit.call(lambda: rubric.result(call), limit_s=time_limit_s * len(call.rollouts))
    except TimeLimitError:
        return call.too_long(time_limit_s)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that a function left behind


def _serve(link: Connection, rubric: Rubric, time_limit_s: float) -> None:
    """Make the calls that arrive, until the other end of the pipe is closed; runs in the main thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    sending = threading.Lock()

    def send(call_id: int, message: Any) -> None:
        with sending:
            link.send((call_id, message))

    calls: SimpleQueue[tuple[int, RubricCall]] = SimpleQueue()
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run_loop, args=(loop,), daemon=True).start()

    async def call_async(call_id: int, call: RubricCall) -> None:
        send(call_id, await rubric.async_result(call, time_limit_s=time_limit_s))

    def take(call_id: int, call: RubricCall) -> None:
        if rubric.is_async(call):
            asyncio.run_coroutine_threadsafe(call_async(call_id, call), loop)
        else:
            calls.put((call_id, call))

    threading.Thread(target=_receive, args=(link, take), daemon=True).start()
    send(0, None)
    with MainThreadLimit() as limit:
        while True:
            call_id, call = calls.get()
            send(call_id, _result_within(rubric, call, time_limit_s=time_limit_s, limit=limit))


def _receive(link: Connection, take: Callable[[int, Any], None]) -> None:
    """Pass calls on until the parent is gone, then end the process, whatever it is doing."""
    try:
        while True:
            take(*link.recv())
    finally:
        os._exit(0)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:  # a task that a reward function started raised SystemExit
        os._exit(1)
