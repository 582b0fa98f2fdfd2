"""Time limits on what the main thread does, which hold whatever that does with alarms of its own."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Self, TypeVar

WATCH_S = 0.02
"""Interval in which time limits are checked."""
AGAIN_S = 0.25
"""Time after which a function is interrupted again; an exception is lost where Python calls a `__del__`."""
SIGNAL = signal.SIGRTMIN + 5
"""Signal that interrupts the main thread; C libraries use the first few real-time signals themselves."""

T = TypeVar("T")


class TimeLimitError(BaseException):
    """Raised in a function that takes too long; not an Exception, which a reward function might swallow."""


class MainThreadLimit:
    """Context in which calls by the main thread have time limits.

    A thread sends the signal, because the process has a single alarm and reward functions use it: math-verify
    sets and clears the alarm at each parse. Code that stays in C is interrupted only when it returns to Python.
    """

    def __init__(self) -> None:
        self._ends_at = math.inf
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="time limit", daemon=True)

    def __enter__(self) -> Self:
        self._handler = signal.signal(SIGNAL, self._interrupt)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        signal.signal(SIGNAL, self._handler)

    def call(self, function: Callable[[], T], *, limit_s: float) -> T:
        """Return the function's result, or raise TimeLimitError after `limit_s`."""
        try:
            try:
                self._ends_at = time.monotonic() + limit_s
                return function()
            finally:
                self._ends_at = math.inf
        finally:  # the signal may arrive within the line above
            self._ends_at = math.inf

    def _watch(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while not self._closed.wait(WATCH_S):
            if time.monotonic() >= self._ends_at:
                signal.pthread_kill(main, SIGNAL)

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now >= self._ends_at:  # not if another call has begun since the signal was sent
            self._ends_at = now + AGAIN_S
            raise TimeLimitError
