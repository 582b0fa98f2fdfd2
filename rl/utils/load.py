"""A number of compute threads that follows what else the machine does.

Several threads that work on one small kernel wait for each other at its end. Where other processes
compute too, one of them is always the one that has no core just now, and a step that two threads
share takes longer than with one. `ComputeThreads` notices from the kernel's own counters how long
threads wait for a core, tries one thread, and takes what gets more done:

    threads = ComputeThreads(2, is_safe=lambda: ...)
    with threads.work():        # the calling thread computes with one thread or with two
        engine.step()

Numbers differ between machines and days, so nothing is decided once and for all: a choice of one
thread is tried again after a while, longer and longer apart.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rl.utils.processes import use_threads

logger = logging.getLogger(__name__)

WINDOW_S = 0.5
"""Seconds of work after which the counters are read."""
MOST_WAITING = 0.2
"""Share of their time that threads wait for a core on a machine that has enough of them."""
THREADS_COST = 1.2
"""How much more processor time several threads must get than one to be worth it, where nobody tells
what they got done: a part of it goes into waiting for each other."""
SHORTEST_PAUSE, LONGEST_PAUSE = 8, 32
"""Windows between two trials: the first pause, and the longest, after trials without gain."""
STRETCH_S = 0.1
"""Seconds of work between two readings, each of which takes up to half a millisecond."""
LONGEST_GAP_S = 0.02
"""Pause in the work after which the counters are read anew: what was counted meanwhile is not of
the work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clocks:
    """Nanoseconds since the start of this process, of all its threads together."""

    running: int
    waiting: int
    """Ready to run, without a core."""


def read_clocks() -> Clocks | None:
    """Return what the threads of this process got of the machine; None where no file tells."""
    running = waiting = num_files = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        # A thread may end between the listing and the reading.
        with contextlib.suppress(OSError, ValueError):
            of_thread = file.read_text("ascii").split()
            running += int(of_thread[0])
            waiting += int(of_thread[1])
            num_files += 1
    return Clocks(running=running, waiting=waiting) if num_files else None


@dataclass(kw_only=True, slots=True)
class Window:
    """What the threads got, and got done, in some work."""

    worked_s: float = 0.0
    running: int = 0
    """Nanoseconds of all threads, as in `Clocks`."""
    waiting: int = 0
    amount: float = 0.0
    """What was done in work whose caller told how much it was."""
    amount_s: float = 0.0
    """Seconds of that work."""

    def add_time(self, *, worked_s: float, running: int, waiting: int) -> None:
        self.worked_s += worked_s
        self.running += running
        self.waiting += waiting

    @property
    def cores(self) -> float:
        """Processor time per time."""
        return self.running / 1e9 / self.worked_s

    @property
    def waiting_share(self) -> float:
        """Share of their time that the threads waited for a core."""
        return self.waiting / (self.running + self.waiting)


def are_several_better(several: Window, *, one: Window) -> bool:
    """Return whether several threads got more done than one."""
    if several.amount and one.amount:
        return several.amount / several.amount_s > one.amount / one.amount_s
    return several.cores > THREADS_COST * one.cores


class ThreadChoice:
    """Decides on one thread or several from what each got done in the last windows."""

    def __init__(self, num_threads: int) -> None:
        self._several = num_threads
        self.count = num_threads
        self._before: Window | None = None
        """While the other number is tried: the window with the number before."""
        self._was_crowded = False
        """Whether threads waited for a core in the last window."""
        self._pause = 0
        """Windows until the next trial."""
        self._next_pause = SHORTEST_PAUSE

    def end_window(self, window: Window) -> None:
        """Choose the number for the next window.

        Args:
            window: the last one, with the present number.
        """
        was_crowded = self._was_crowded
        self._was_crowded = window.waiting_share > MOST_WAITING
        if self._before is not None:
            self._end_trial(window, before=self._before)
        elif self._pause:
            self._pause -= 1
        # A window in which the other work has begun says nothing about several threads beside it.
        elif self.count == 1 or (self._was_crowded and was_crowded):
            self._before = window
            self._switch()

    def _end_trial(self, window: Window, *, before: Window) -> None:
        one, several = (window, before) if self.count == 1 else (before, window)
        best = self._several if are_several_better(several, one=one) else 1
        if best == self.count:
            self._next_pause = SHORTEST_PAUSE
        else:
            self._switch()
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
        self._before, self._pause = None, self._next_pause

    def _switch(self) -> None:
        self.count = self._several if self.count == 1 else 1


class ComputeThreads:
    """Number of threads of the thread that computes, one or several by the load."""

    def __init__(
        self,
        num_threads: int,
        *,
        is_safe: Callable[[], bool] | None,
        read_clocks: Callable[[], Clocks | None] = read_clocks,
    ) -> None:
        """`is_safe` tells whether results are the same with one thread, and is asked once, before
        the number changes first. None: it never changes.
        """
        self.num_threads = num_threads
        self._choice = ThreadChoice(num_threads)
        self._is_safe = is_safe
        self._read_clocks = read_clocks
        self._follows = num_threads > 1 and is_safe is not None
        self._began: Clocks | None = None
        """Counters at the beginning of this stretch of work."""
        self._stretch_s = 0.0
        self._ended_s = 0.0
        """When the last work ended."""
        self._window = Window()

    @contextlib.contextmanager
    def work(self, amount: float = 0.0) -> Iterator[None]:
        """Compute in the block with the chosen number of threads; afterwards with all of them.

        Args:
            amount: of work in the block, in the caller's unit; 0 if it cannot be told.
        """
        if not self._follows:
            yield
            return
        count, start_s = self._choice.count, time.perf_counter()
        if self._began is None or start_s - self._ended_s > LONGEST_GAP_S:
            self._began, self._stretch_s = self._read_clocks(), 0.0
        if count != self.num_threads:
            use_threads(count)
        try:
            yield
        finally:
            if count != self.num_threads:
                use_threads(self.num_threads)
            self._ended_s = time.perf_counter()
            self._stretch_s += self._ended_s - start_s
        # Only after work that has succeeded: nothing here may change what an error says.
        if amount:
            self._window.amount += amount
            self._window.amount_s += self._ended_s - start_s
        if self._stretch_s >= STRETCH_S:
            self._end_stretch()

    def _end_stretch(self) -> None:
        before, now = self._began, self._read_clocks()
        stretch_s, self._stretch_s = self._stretch_s, 0.0
        self._began = now
        if before is None or now is None:
            self._follows = False
            return
        running, waiting = now.running - before.running, now.waiting - before.waiting
        # A thread that has ended is missing in the second sum.
        if running > 0 and waiting >= 0:
            self._window.add_time(worked_s=stretch_s, running=running, waiting=waiting)
        if self._window.worked_s >= WINDOW_S:
            self._end_window()

    def _end_window(self) -> None:
        window, self._window = self._window, Window()
        old = self._choice.count
        self._choice.end_window(window)
        if self._choice.count == old:
            return
        if self._is_safe is not None:
            if not self._ask():
                return
            self._is_safe = None
        logger.debug("computes with %d of %d threads", self._choice.count, self.num_threads)

    def _ask(self) -> bool:
        """Return whether the number may change; it never does after a no."""
        assert self._is_safe is not None
        reason = "with one, results have other bits"
        try:
            self._follows = self._is_safe()
        except Exception as error:  # noqa: BLE001  (the work itself has succeeded)
            self._follows, reason = False, f"one was not tried: {error!r}"
        if not self._follows:
            logger.info("computes with %d threads, whatever the load: %s", self.num_threads, reason)
        return self._follows
