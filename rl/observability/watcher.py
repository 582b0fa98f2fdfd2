"""Watcher of a run: looks for what is wrong in it while it goes on, and has it shown.

The rules themselves are handed down as a function (`rl.reporting.live.follow_run`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rl.observability.loggers import MetricsLogger

MAX_SHARE = 0.005
"""Share of a run's time that the watcher may take."""

FindNow = Callable[[], Mapping[str, str]]
"""Function that returns a text for each kind of finding."""


class FindingsWatcher(MetricsLogger):
    """Logger that looks for findings after a step, as often as its share of the time allows.

    Example:
        >>> watcher = FindingsWatcher(follow=lambda: follow_run(folder), show=console.show_findings)
    """

    name = "findings"

    def __init__(
        self,
        *,
        follow: Callable[[], FindNow],
        show: Callable[[Mapping[str, str]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`follow` returns the function for a run that begins or goes on."""
        self._follow = follow
        self._show = show
        self._clock = clock
        self._find_now: FindNow | None = None
        self._next_s = 0.0
        self._is_first = True
        self._has_news = False
        """True if a step was written after the last look."""
        self._texts: Mapping[str, str] = {}

    def open(self, last_step: int | None) -> None:
        # The files of a run that went back are shorter than those that were read.
        self._find_now = self._follow()
        self._next_s = self._clock()
        self._is_first = True

    def write(self, step: int, values: Mapping[str, float], *, row: int) -> None:
        self._has_news = True
        if self._clock() >= self._next_s:
            self._look()

    def close(self, *, failed: bool) -> None:
        # The last steps before an error may be those that explain it.
        if self._has_news and self._find_now is not None:
            self._look()

    def _look(self) -> None:
        assert self._find_now is not None
        self._has_news = False
        start_s = self._clock()
        texts = self._find_now()
        end_s = self._clock()
        # The first look reads all that a resumed run has written before, which is done once.
        self._next_s = end_s + (0.0 if self._is_first else (end_s - start_s) / MAX_SHARE)
        self._is_first = False
        if texts != self._texts:
            self._texts = texts
            self._show(texts)
