"""A time limit on what the main thread does, whatever that does with alarms of its own.

`signal.alarm` and `signal.setitimer` share one timer for a process, and libraries use it: math-verify sets
and clears it at each parse and comparison. So the limit here is kept by a thread, which sends the main thread
another signal.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

from rl.rollouts.rubric import Rubric, RubricCall, score_here
from rl.rollouts.rubric_functions import CallResult, named, too_long
from rl.types import Rollout, Score

T = TypeVar("T")

SIGNAL = signal.SIGRTMIN + 5
"""The first few of the real-time signals are used by C libraries here and there."""
SHORTEST_LOOK_S = 0.005
AGAIN_S = 0.25
"""What is overdue is interrupted again after so long: an exception is lost where Python calls a `__del__`."""

logger = logging.getLogger(__name__)


class TimeLimitError(BaseException):
    """Raised in what takes too long; not an Exception, so that a reward's own `except` cannot swallow it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Running:
    ends_at: float
    """By `time.monotonic`."""


class MainThreadLimit:
    """Interrupts what the main thread runs; made, used and closed by the main thread.

    A thread looks after `time_limit_s` at the latest whether something is overdue, so that nobody has to wake
    it at each call. A function that stays in C sees the interruption when it is back in Python.
    """

    def __init__(self, time_limit_s: float) -> None:
        self._look_after_s = time_limit_s
        self._running: _Running | None = None
        self._overdue: _Running | None = None
        self._closed = threading.Event()
        self._previous = signal.signal(SIGNAL, self._interrupt)
        self._watch = threading.Thread(target=self._look, name="time limit", daemon=True)
        self._watch.start()

    def call(self, function: Callable[[], T], *, limit_s: float) -> T:
        """Its result.

        Raises:
            TimeLimitError: after `limit_s`.
        """
        try:
            try:
                self._running = _Running(ends_at=time.monotonic() + limit_s)
                return function()
            finally:
                self._running = None
        finally:  # The interruption may come within the lines above.
            self._running = None

    def close(self) -> None:
        self._closed.set()
        self._watch.join()
        signal.signal(SIGNAL, self._previous)

    def _look(self) -> None:
        wait_s = self._look_after_s
        again_at = 0.0
        while not self._closed.wait(wait_s):
            wait_s = self._look_after_s
            running, now = self._running, time.monotonic()
            if running is None:
                continue
            due_at = again_at if running is self._overdue else running.ends_at
            if now < due_at:
                wait_s = max(SHORTEST_LOOK_S, min(due_at - now, self._look_after_s))
                continue
            self._overdue, again_at = running, now + AGAIN_S
            wait_s = min(AGAIN_S, self._look_after_s)
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, SIGNAL)

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        # What it was sent for may have ended meanwhile.
        if self._running is not None and self._running is self._overdue:
            raise TimeLimitError


def result_within(
    rubric: Rubric, call: RubricCall, *, limits: MainThreadLimit, time_limit_s: float
) -> CallResult:
    """Call sync functions for at most `time_limit_s`, for each of the call's rollouts; in the main thread."""
    started = time.monotonic()
    limit_s = time_limit_s * len(call.rollouts)
    with _alarm_taken_back(call):
        try:
            return limits.call(lambda: rubric.result(call), limit_s=limit_s)
        except TimeLimitError:
            took_s = time.monotonic() - started
    reason = too_long(call.names, limit_s, len(call.rollouts))
    return CallResult(failure=f"{reason} (stopped after {took_s:.1f} s)")


def score_within(rubric: Rubric, rollout: Rollout, time_limit_s: float) -> Score:
    """As `score_group_within`; functions of a group are given this rollout alone."""
    (score,) = score_group_within(rubric, [rollout], time_limit_s)
    return score


def score_group_within(rubric: Rubric, group: Sequence[Rollout], time_limit_s: float) -> list[Score]:
    """Scores of a problem's rollouts, failed ones where it took too long; for a process's main thread alone
    (a signal)."""
    limits = MainThreadLimit(time_limit_s)
    try:
        return score_here(
            rubric,
            group,
            sync=lambda call: result_within(rubric, call, limits=limits, time_limit_s=time_limit_s),
            time_limit_s=time_limit_s,
        )
    finally:
        limits.close()


@contextmanager
def _alarm_taken_back(call: RubricCall) -> Iterator[None]:
    """An alarm that a reward function leaves behind does not hit what comes next; an earlier one stays."""
    handler = signal.getsignal(signal.SIGALRM)
    before_s, interval_s = signal.getitimer(signal.ITIMER_REAL)
    started = time.monotonic()
    try:
        yield
    finally:
        after_s, _ = signal.getitimer(signal.ITIMER_REAL)
        if before_s:
            left_s = before_s - (time.monotonic() - started)
            signal.setitimer(signal.ITIMER_REAL, max(left_s, SHORTEST_LOOK_S), interval_s)
        elif after_s:
            signal.setitimer(signal.ITIMER_REAL, 0)
        changed = signal.getsignal(signal.SIGALRM) is not handler
        if changed and handler is not None:
            signal.signal(signal.SIGALRM, handler)
        if changed or (after_s and not before_s):
            logger.warning(
                "%s left %s behind; it is taken back, so that it cannot hit another function",
                named(call.names),
                "a handler of SIGALRM" if changed else f"an alarm in {after_s:.1f} s",
            )
