"""Sync reward functions in a process of their own, and async ones beside it.

A sync function is foreign code: it may loop forever, start processes, or end its own. Whatever it
does, only its own call fails; a process that hangs is killed, and the next call starts another.
Async functions wait for servers: they run together in the caller's event loop, which they must not
block.

    this process -> guard -> worker, which makes the calls -> processes that reward functions start

    to the worker       sync calls, made one after another
    from the worker     None once it is ready, or the reason why it is not;
                        then a CallResult for each call

The guard (`rl.utils.descendants`) runs no foreign code: however worker or parent end, it ends all
processes below it.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FunctionType
from typing import Any, TypeVar

from rl.rollouts.rubric import MAX_CONCURRENCY, CallResult, Rubric, RubricCall
from rl.types import Rollout, Score
from rl.utils.descendants import run_guarded
from rl.utils.errors import RunError
from rl.utils.printing import describe_value
from rl.utils.processes import signal_name
from rl.utils.threads import WorkerThread, gather_or_cancel

GRACE_S = 1.0
"""Time after its limit in which a call may still answer before its process is killed."""
RESTART_S = 5.0
"""Time that the end of a process and the imports of the next one usually take at most."""
START_S = 300.0
"""Time in which the process must have imported the rubric's module, unless it is given."""
CLOSE_S = 10.0
"""Time in which the thread that waits for a killed process must end."""
END_S = 8.0
"""Time in which the guard of a process must end all that the process started."""

T = TypeVar("T")


class ProcessEndedError(Exception):
    """The reward process ended, or did not answer in time and was killed (exit code None)."""

    def __init__(self, *, exit_code: int | None) -> None:
        super().__init__(f"the reward process ended (exit code {exit_code})")
        self.exit_code = exit_code


def compute_longest_s(
    rubric: Rubric, num_rollouts: int, *, time_limit_s: float, start_timeout_s: float = START_S
) -> float:
    """Return a bound of the seconds for these rollouts, even if each ends the process at its limit.

    One of the starts of a process may take `start_timeout_s`; the others read modules that the disk
    has cached.
    """
    return num_rollouts * ((len(rubric.criteria) + 1) * time_limit_s + RESTART_S) + start_timeout_s


class RewardProcess:
    """Scores groups of rollouts in a child process; calls of `score` overlap.

    Args:
        time_limit_s: longest time for the sync functions of one rollout together, and for each
            async function of one. A function of a group has that time for each of its rollouts.
        max_concurrency: concurrent calls of each async function; waiting for a slot is not timed.
        start_timeout_s: longest time for the process to start and to import the rubric's module.
    """

    def __init__(
        self,
        *,
        rubric: Rubric,
        time_limit_s: float,
        max_concurrency: int = MAX_CONCURRENCY,
        start_timeout_s: float = START_S,
    ) -> None:
        self.rubric = rubric
        self._start_timeout_s = start_timeout_s
        self.time_limit_s = time_limit_s
        self.process: SpawnProcess | None = None
        """Guard of the worker; it ends with it."""
        self._link: Connection | None = None
        self._slots = rubric.make_slots(max_concurrency)
        self._thread = WorkerThread("rewards")
        """Talks to the process."""
        self._closed = False

    async def start(self) -> None:
        """Start the process now rather than at the first score.

        Idempotent; raises as `score` does.
        """
        await self._run_in_thread(self._start)

    async def score(
        self, groups: Sequence[Sequence[Rollout]], *, alone: bool = False
    ) -> list[list[Score]]:
        """Return a score for each rollout, in order; a call that takes too long fails.

        `alone` as in `rl.protocols.Rewarder`. Raises RunError if the process cannot load the rubric
        or was closed, TimeoutError if it did not start within `start_timeout_s`.
        """
        by_group = [self.rubric.list_calls(group, alone=alone) for group in groups]
        sync_calls, async_calls = list[RubricCall](), list[RubricCall]()
        for call in chain.from_iterable(by_group):
            (async_calls if call.is_async else sync_calls).append(call)

        # Lazy: a coroutine that is made and never awaited, because the process was closed, warns.
        here = (
            self.rubric.compute_result(call, slots=self._slots, time_limit_s=self.time_limit_s)
            for call in async_calls
        )
        sync_results, async_results = await gather_or_cancel(
            [self._run_in_thread(self._make_calls, sync_calls), gather_or_cancel(here)]
        )

        # Results are in the order of the calls, so each call takes the next one of its kind.
        remaining = {False: iter(sync_results), True: iter(async_results)}
        scores = []
        for group, calls in zip(groups, by_group, strict=True):
            results = [next(remaining[call.is_async]) for call in calls]
            scores.append(self.rubric.combine_scores(group, calls, results))
        return scores

    async def close(self) -> None:
        """End the process and all that it started; pending scores fail. Idempotent."""
        self._closed = True
        # The thread may wait for an answer of the process: its end wakes the thread.
        if self.process is not None:
            self.process.terminate()
        await asyncio.to_thread(self._thread.stop, timeout_s=CLOSE_S)
        await asyncio.to_thread(self._end)

    async def _run_in_thread(self, function: Callable[..., T], *args: Any) -> T:
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
        rubric = check_sendable(self.rubric)
        # Spawned, not forked: the parent has threads and loaded runtimes.
        context = multiprocessing.get_context("spawn")
        self._link, theirs = context.Pipe()
        process = context.Process(
            target=_run_guarded, args=(theirs, rubric), name="rewards", daemon=True
        )
        try:
            process.start()
        finally:
            theirs.close()
        self.process = process
        try:
            refusal = self._receive(self._start_timeout_s)
        except ProcessEndedError as error:
            code = error.exit_code
            if code is None:
                limit = f"{self._start_timeout_s:g} s (reward.start_timeout_s)"
                raise TimeoutError(f"the reward process did not start within {limit}") from None
            how = f"exit code {code}" if code >= 0 else f"killed by {signal_name(-code)}"
            raise RunError(
                f"the reward process ended while loading the rubric ({how}): see stderr"
            ) from error
        if refusal is not None:
            self._end()
            raise RunError(f"the reward process cannot load the rubric: {refusal}")

    def _receive(self, limit_s: float) -> Any:
        """Return the next message of the process.

        Raises ProcessEndedError if there is none within `limit_s`.
        """
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
        # A process that ends by itself has an exit code a moment later, which names the signal.
        if not is_late:
            process.join(GRACE_S)
        self._end()
        raise ProcessEndedError(exit_code=None if is_late else process.exitcode)

    def _end(self) -> None:
        """End the process and all that it started, if there is one, and wait for the end."""
        if self.process is not None:
            self.process.terminate()
            self.process.join(END_S)
            self.process.kill()  # a guard that another process has stopped
            self.process.join(END_S)
            self.process = None
        if self._link is not None:
            self._link.close()
            self._link = None

    def _make_calls(self, calls: Sequence[RubricCall]) -> list[CallResult]:
        """Make sync calls one after another.

        After one that ends the process, the others go to the next process.
        """
        results: list[CallResult] = []
        while len(results) < len(calls):
            self._start()
            assert self._link is not None
            # All calls at once, so that the process never waits for this thread between them.
            with contextlib.suppress(OSError):  # the process has ended, as `_receive` notices
                self._link.send(calls[len(results) :])
            try:
                while len(results) < len(calls):
                    # A function of a group has the limit for each of its rollouts.
                    limit_s = self.time_limit_s * len(calls[len(results)].rollouts)
                    results.append(self._receive(limit_s + GRACE_S))
            except ProcessEndedError as error:
                if self._closed:
                    raise RunError("the reward process was closed") from None
                # The call that ran when the process ended is to blame; it is not tried again.
                call, code = calls[len(results)], error.exit_code
                ended = f"{call.title} ended the reward process (exit code {code})"
                late = call.make_timeout(self.time_limit_s)
                results.append(late if code is None else CallResult(failure=ended))
        return results


def check_sendable(rubric: Rubric, *, to_actors: bool = False) -> bytes:
    """Return a pickled rubric.

    Raises RunError for functions that a reward process could not find by name.

    Actors, unlike a process of this one, do not have the script that was started.
    """
    pickled = io.BytesIO()
    try:
        (_ActorPickler if to_actors else pickle.Pickler)(pickled).dump(rubric)
    except Exception as error:
        raise RunError(
            f"the rubric cannot be sent to the reward process ({describe_value(error)}): define "
            "its functions at the top of a module; a method takes its object along, which must "
            "pickle"
        ) from error
    return pickled.getvalue()


class _ActorPickler(pickle.Pickler):
    """Pickler that refuses what is defined in the script that was started."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            name = value.__qualname__
            raise pickle.PicklingError(
                f"{name} is defined in the script that was started, which actors cannot import; "
                "reward.num_procs=0 needs no actors"
            )
        return NotImplemented


def _run_guarded(link: Connection, rubric: bytes) -> None:
    """Serve calls in a child of this process, and end it with all of its descendants."""
    run_guarded(partial(_serve, link, rubric), release=link.close)


def _serve(link: Connection, pickled: bytes) -> None:
    """Load the rubric, and make the calls that arrive; runs in the main thread."""
    # Reward functions may start processes, as in any script: a daemon may not, and a spawned
    # process would spawn its children, which import the module of the functions again.
    multiprocessing.current_process().daemon = False
    multiprocessing.set_start_method(None, force=True)
    try:
        rubric: Rubric = pickle.loads(pickled)
    except Exception as error:  # noqa: BLE001  (imports the modules of the functions)
        traceback.print_exc()
        link.send(describe_value(error))
        return
    link.send(None)
    while True:
        try:
            calls = link.recv()
        except EOFError:
            return
        for call in calls:
            result = rubric.call_sync(call)
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that a function left behind
            link.send(result)
