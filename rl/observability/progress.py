"""Lines and progress bars on standard output."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from rl.utils.errors import optional_write

if TYPE_CHECKING:
    from rich.progress import Progress

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


def format_duration(seconds: float) -> str:
    """Return the duration in its two largest units: 48 s, 4 min 12 s, 2 h 5 min."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def is_terminal(stream: TextIO | None = None) -> bool:
    """Return whether the stream, by default standard output, can show a live table."""
    stream = stream or sys.stdout
    if not stream.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return False
    from rich.console import Console

    return Console(file=stream).is_interactive


class Advance(Protocol):
    """Callback that advances a progress bar; the note is shown beside the bar until the next call."""

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
    """Show the progress of an operation: a transient bar on a terminal, a line now and then elsewhere.

        with progress("warm-up", total=150) as advance:
            for loss in ...:
                advance(note=f"loss {loss:.3f}")

    Args:
        total: number of items, if known.
        stream: standard output if None.
        interval_s: least time between two lines.
    """
    stream = stream or sys.stdout
    if is_terminal(stream):
        with _bar(stream) as bar:
            task = bar.add_task(title, total=total, note="")
            yield lambda num=1, *, note="": bar.update(task, advance=num, note=note)
        return
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


def _bar(stream: TextIO) -> Progress:
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn

    return Progress(
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", style="dim"),
        console=Console(file=TolerantStream(stream)),  # type: ignore[arg-type]
        transient=True,
        # Lines printed meanwhile appear above the bar, unless their stream is a file.
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=sys.stderr.isatty(),
    )
