"""Lines and progress on standard output."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TextIO

from rl.utils.errors import optional_write

CONSOLE = Path("the console")


class TolerantStream:
    """Stream on which a failed write is a warning, such as to a terminal that was closed or a full disk."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with optional_write(CONSOLE), contextlib.suppress(ValueError):  # closed, or without the characters
            self._stream.write(text)
            self._stream.flush()
        return len(text)

    def flush(self) -> None:
        """Do nothing: each write is flushed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def print_line(text: str, *, stream: TextIO | None = None) -> None:
    """Print a line at once, by default to standard output; a failure is a warning."""
    TolerantStream(stream or sys.stdout).write(f"{text}\n")


class Advance(Protocol):
    """Callback that counts items as done; the note is shown beside their number until the next call."""

    def __call__(self, num: int = 1, *, note: str = "") -> None: ...


@contextlib.contextmanager
def progress(
    title: str,
    *,
    total: int | None = None,
    stream: TextIO | None = None,
    interval_s: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Advance]:
    """Print the progress of an operation, a line now and then.

        with progress("warm-up", total=150) as advance:
            for loss in ...:
                advance(note=f"loss {loss:.3f}")

    Args:
        total: number of items, if known.
        stream: standard output if None.
        interval_s: least time between two lines.
    """
    start_s = printed_s = clock()
    num_done, count = 0, ""

    def advance_lines(num: int = 1, *, note: str = "") -> None:
        nonlocal num_done, printed_s, count
        num_done += num
        count = (
            f"{num_done:,}" + (f"/{total:,}" if total is not None else "") + (f" ({note})" if note else "")
        )
        if clock() - printed_s >= interval_s:
            printed_s = clock()
            print_line(f"{title}: {count}", stream=stream)

    print_line(f"{title}: started", stream=stream)
    how = "stopped"
    try:
        yield advance_lines
        how = "done"
    finally:
        end = f"{how} after {clock() - start_s:.1f} s"
        print_line(f"{title}: {count}, {end}" if count else f"{title}: {end}", stream=stream)
