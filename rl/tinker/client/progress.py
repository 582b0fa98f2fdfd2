"""A line on standard error that tells what has been running for a while. It goes away when that has ended.

    tinker: forward_backward 3 s; sample (16) 12 s

Drawn in the clients' thread, which has nothing else to do while a backend computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

SHOWN_AFTER_S = 1.0
INTERVAL_S = 0.25
WIDTH = 100


def somebody_looks(stream: TextIO) -> bool:
    """Whether the stream is a terminal, or a notebook's."""
    return stream.isatty() or type(stream).__module__.startswith("ipykernel")


class Progress:
    """All methods in one event loop."""

    def __init__(
        self,
        *,
        shown: bool | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`shown` None: where somebody looks. `stream` None is standard error."""
        self._stream = stream or sys.stderr
        self.shown = somebody_looks(self._stream) if shown is None else shown
        self._clock = clock
        self._running: dict[object, tuple[str, float]] = {}
        self._drawn = ""
        self._next_draw: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def show(self, title: str) -> Iterator[None]:
        if not self.shown:
            yield
            return
        key = object()
        self._running[key] = (title, self._clock())
        self._draw_later()
        try:
            yield
        finally:
            del self._running[key]
            if not self.line():
                self.draw()  # Not with the next interval: what is printed now must not come behind it.

    def line(self) -> str:
        """What of it has been running for `SHOWN_AFTER_S`: titles, counts, and seconds of the longest."""
        now = self._clock()
        ages: dict[str, list[float]] = {}
        for title, began in self._running.values():
            if now - began >= SHOWN_AFTER_S:
                ages.setdefault(title, []).append(now - began)
        parts = [
            f"{title}{f' ({len(seconds)})' if len(seconds) > 1 else ''} {max(seconds):.0f} s"
            for title, seconds in ages.items()
        ]
        return f"tinker: {'; '.join(parts)}"[:WIDTH] if parts else ""

    def draw(self) -> None:
        line = self.line()
        if line == self._drawn:
            return
        covered = " " * max(0, len(self._drawn) - len(line))
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more
            self._stream.write(f"\r{line}{covered}" + ("" if line else "\r"))
            self._stream.flush()
        self._drawn = line

    def _draw_later(self) -> None:
        if self._next_draw is None:
            self._next_draw = asyncio.get_running_loop().call_later(INTERVAL_S, self._draw_again)

    def _draw_again(self) -> None:
        self._next_draw = None
        self.draw()
        if self._running:
            self._draw_later()
