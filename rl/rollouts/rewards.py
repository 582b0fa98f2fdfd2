"""Reward functions in a process of their own, with time limits that always hold.

A reward function is foreign code: it may loop forever, or end its process. Whatever it does, only its own call
fails: one score, or those of a group; a process that hangs is killed, and the next call starts another. Sync
functions run one at a time. Async functions that were asked for in the meantime run together, up to a limit; if
the process ends, each of those without a result is repeated alone to find the guilty one.

    to the process      calls that run together
    from the process    None once it is ready; then (index, CallResult) for each call, in any order
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue
from typing import Any, TypeVar

from rl.rollouts.rubric import MAX_CONCURRENCY, CallResult, Rubric, RubricCall
from rl.types import Rollout, Score
from rl.utils.errors import RunError
from rl.utils.threads import WorkerThread, run_now

GRACE_S = 1.0
"""Time after its limit in which a call may still answer before its process is killed."""
START_S = 120.0
"""Time in which the process must have imported the rubric's module."""
CLOSE_S = 10.0
"""Time in which the thread that waits for a killed process must end."""
SIGNAL = signal.SIGRTMIN + 5
"""Signal that interrupts the main thread; C libraries use the first few real-time signals themselves."""

T = TypeVar("T")


class ProcessEndedError(Exception):
    """The reward process ended, or was killed because it did not answer in time.

    Args:
        exit_code: None if it was killed for that.
    """

    def __init__(self, *, exit_code: int | None) -> None:
        super().__init__(f"the reward process ended (exit code {exit_code})")
        self.exit_code = exit_code


class TimeLimitError(BaseException):
    """Raised in a function that takes too long; not an Exception, which a reward function might swallow."""


def longest_s(rubric: Rubric, num_rollouts: int, *, time_limit_s: float) -> float:
    """Return an upper bound of the seconds that one process needs if all functions keep their time limits."""
    return (len(rubric.criteria) + 1) * num_rollouts * time_limit_s


class RewardProcess:
    """Scores groups of rollouts in a child process; calls of `score` overlap.

    Args:
        time_limit_s: longest time for the sync functions of one rollout together, and for each async function
            of one. A function of a group has that time for each of its rollouts.
        max_concurrency: concurrent calls of each async function; waiting for a slot is not timed.
    """

    def __init__(
        self, *, rubric: Rubric, time_limit_s: float, max_concurrency: int = MAX_CONCURRENCY
    ) -> None:
        self.rubric = rubric
        self.time_limit_s = time_limit_s
        self.max_concurrency = max_concurrency
        self.process: SpawnProcess | None = None
        self._link: Connection | None = None
        self._waiting: SimpleQueue[tuple[RubricCall, Future[CallResult]]] = SimpleQueue()
        self._thread = WorkerThread("rewards")
        """Talks to the process."""
        self._closed = False

    async def start(self) -> None:
        """Start the process now rather than at the first score; idempotent. Raises as `score` does."""
        await self._in_thread(self._start)

    async def score(self, groups: Sequence[Sequence[Rollout]], *, alone: bool = False) -> list[list[Score]]:
        """Return a score for each rollout, in order; a call that takes too long gives a failed score.

        `alone` as in `rl.protocols.Rewarder`.

        Raises:
            RunError: the process cannot be started because it cannot load the rubric, or was closed.
            TimeoutError: the process did not start within `START_S`.
        """
        calls = [self.rubric.calls(group, alone=alone) for group in groups]
        answers: list[list[Future[CallResult]]] = [[Future() for _ in of_group] for of_group in calls]
        for of_group, futures in zip(calls, answers, strict=True):
            for pair in zip(of_group, futures, strict=True):
                self._waiting.put(pair)
        # Calls that came earlier, or will come until the thread is free, are answered together with these.
        await self._in_thread(self._answer_waiting)
        return [
            self.rubric.scores(group, of_group, [future.result() for future in futures])
            for group, of_group, futures in zip(groups, calls, answers, strict=True)
        ]

    async def close(self) -> None:
        """End the process; pending scores fail. Idempotent."""
        self._closed = True
        if self.process is not None:
            self.process.kill()
        await asyncio.to_thread(self._thread.stop, timeout_s=CLOSE_S)
        self._end()

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        if self._closed:
            raise RunError("the reward process was closed")
        return await self._thread.run(function, *args)

    def _start(self) -> None:
        """Start the process unless it runs already, and wait until it is ready."""
        if self._closed:
            raise RunError("the reward process was closed")
        if self.process is not None and self.process.is_alive():
            return
        self._end()
        # Spawned, not forked: the parent has threads and loaded runtimes.
        context = multiprocessing.get_context("spawn")
        self._link, theirs = context.Pipe()
        arguments = (theirs, self.rubric, self.time_limit_s, self.max_concurrency)
        process = context.Process(target=_serve, args=arguments, name="rewards", daemon=True)
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise RunError(
                f"the rubric cannot be sent to the reward process ({error}): define its functions at the top of "
                "a module"
            ) from error
        finally:
            theirs.close()
        self.process = process
        try:
            self._receive(START_S)
        except ProcessEndedError as error:
            if error.exit_code is None:
                raise TimeoutError(f"the reward process did not start within {START_S:g} s") from None
            raise RunError(
                f"the reward process ended while loading the rubric (exit code {error.exit_code}): see stderr"
            ) from error

    def _receive(self, limit_s: float) -> Any:
        """Return the next message of the process; raise ProcessEndedError if there is none within `limit_s`."""
        process, link = self.process, self._link
        assert process is not None
        assert process.pid is not None
        assert link is not None
        is_late = False
        with contextlib.suppress(OSError, EOFError):
            # A process that a reward function forked may keep the pipe and `process.sentinel` open.
            end = os.pidfd_open(process.pid)
            try:
                ready = wait([link, end], limit_s)
            finally:
                os.close(end)
            if link in ready:
                return link.recv()
            is_late = not ready
        if not is_late:
            process.join(GRACE_S)
        self._end()
        raise ProcessEndedError(exit_code=None if is_late else process.exitcode)

    def _end(self) -> None:
        """Kill the process, if there is one, and wait until it is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None
        if self._link is not None:
            self._link.close()
            self._link = None

    def _answer_waiting(self) -> None:
        """Make all calls that wait now."""
        taken = [self._waiting.get() for _ in range(self._waiting.qsize())]
        portions = [[pair for pair in taken if pair[0].is_async == is_async] for is_async in (False, True)]
        try:
            while portions:
                portion = portions.pop(0)
                results = self._results([call for call, _ in portion])
                for i, result in results.items():
                    portion[i][1].set_result(result)
                left = [pair for pair in portion if not pair[1].done()]
                if left:
                    portions += [[pair] for pair in left] if left[0][0].is_async else [left]
        except Exception as error:  # noqa: BLE001  (raised by each `score`)
            for _, answer in taken:
                if not answer.done():
                    answer.set_exception(error)

    def _results(self, calls: Sequence[RubricCall]) -> dict[int, CallResult]:
        """Make calls together and return their results by index.

        If the process ends, calls that it has not answered are left out, except the one that ended it if that
        is known: sync functions are called in order.
        """
        results: dict[int, CallResult] = {}
        if not calls:
            return results
        self._start()
        assert self._link is not None
        limit_s = self.time_limit_s * max(len(call.rollouts) for call in calls)
        try:
            self._link.send(calls)
            while len(results) < len(calls):
                index, result = self._receive(limit_s + GRACE_S)
                results[index] = result
        except (ProcessEndedError, OSError) as error:
            if self._closed:
                raise RunError("the reward process was closed") from None
            first = min(set(range(len(calls))) - results.keys())
            if len(calls) == 1 or not calls[first].is_async:
                code = getattr(error, "exit_code", None)
                ended = f"{calls[first].title} ended the reward process (exit code {code})"
                late = calls[first].too_long(self.time_limit_s)
                results[first] = late if code is None else CallResult(failure=ended)
        return results


def score_within(rubric: Rubric, group: Sequence[Rollout], *, time_limit_s: float) -> list[Score]:
    """Score a problem's rollouts in this process with time limits; in the main thread only (a signal)."""

    def interrupt(*_: object) -> None:
        raise TimeLimitError

    def result(call: RubricCall) -> CallResult:
        if call.is_async:
            return run_now(rubric.result(call, slots=rubric.slots(1), time_limit_s=time_limit_s))
        # Not an alarm: the process has a single one, which math-verify sets and clears at each parse.
        main, limit_s = threading.main_thread().ident, time_limit_s * len(call.rollouts)
        assert main is not None
        timer = threading.Timer(limit_s, signal.pthread_kill, (main, SIGNAL))
        timer.start()
        try:
            return rubric.sync_result(call)
        except TimeLimitError:
            return call.too_long(time_limit_s)
        finally:
            timer.cancel()

    calls = rubric.calls(group)
    before = signal.signal(SIGNAL, interrupt)
    try:
        return rubric.scores(group, calls, [result(call) for call in calls])
    finally:
        signal.signal(SIGNAL, before)


def _serve(link: Connection, rubric: Rubric, time_limit_s: float, max_concurrency: int) -> None:
    """Make the calls that arrive, until the parent is gone; runs in the main thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()
    slots = rubric.slots(max_concurrency)

    async def answer(index: int, call: RubricCall) -> None:
        result = await rubric.result(call, slots=slots, time_limit_s=time_limit_s)
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that a function left behind
        link.send((index, result))

    async def answer_all(calls: Sequence[RubricCall]) -> None:
        await asyncio.gather(*(answer(i, call) for i, call in enumerate(calls)))

    link.send(None)
    with asyncio.Runner() as runner:
        while True:
            runner.run(answer_all(link.recv()))


def _end_with_parent() -> None:
    """End the process with its parent, whatever the main thread is doing."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)
