"""What a person sees while a run goes: a line a step, and progress of what takes long.

On a terminal, progress is a bar that goes away when done. Anywhere else (a file, a pipe) it is
a plain line now and then, without control characters.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TextIO

from rl.observability.metrics import Record, reduced

ROWS_PER_HEADER = 20


def say(text: str, *, stream: TextIO | None = None) -> None:
    """Print a line at once; None is standard output.

    A line that nobody can read (a file on a full disk, a pipe whose reader left) ends no run.
    """
    with contextlib.suppress(OSError):
        print(text, file=stream or sys.stdout, flush=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One number of a step's line."""

    title: str
    name: str
    """Of the metric."""
    form: str
    """Format specification, without width."""

    @property
    def width(self) -> int:
        return max(len(self.title), 7)

    def cell(self, record: Record) -> str:
        value = reduced(record.get(self.name))
        if value is None:
            return "-".rjust(self.width)
        return format(value, self.form if math.isfinite(value) else "").rjust(self.width)


COLUMNS = (
    Column(title="step", name="step", form=".0f"),
    Column(title="reward", name="reward/mean", form=".3f"),
    Column(title="correct", name="reward/correct", form=".3f"),
    Column(title="loss", name="loss/mean", form=".4f"),
    Column(title="logprob diff", name="logprob_diff/mean", form=".1e"),
    Column(title="gen tok/s", name="perf/generated_tokens_per_s", form=",.0f"),
    Column(title="train tok/s", name="perf/trained_tokens_per_s", form=",.0f"),
    Column(title="step s", name="time/step_s", form=".2f"),
    Column(title="version", name="policy_version", form=".0f"),
)


def is_terminal(stream: TextIO | None = None) -> bool:
    """Whether what was printed can be changed there; None is standard output."""
    stream = stream or sys.stdout
    if not stream.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return False
    from rich.console import Console

    # It draws, and asks the environment too: where it would draw nothing, lines are printed.
    return Console(file=stream).is_interactive


class Console(Protocol):
    """What shows a run to a person."""

    def shown(self, records: Sequence[Mapping[str, float]]) -> AbstractContextManager[object]:
        """Around a loop that runs and goes on from these records."""
        ...

    def write(self, record: Record) -> None:
        """A step's record, or an evaluation's (it has the key `eval/correct`)."""
        ...

    def watch(self, title: str, /) -> AbstractContextManager[object]:
        """Around something long."""
        ...


class NoConsole:
    """Shows no step."""

    def shown(self, records: Sequence[Mapping[str, float]]) -> AbstractContextManager[object]:
        return nullcontext()

    def write(self, record: Record) -> None:
        """Is left out."""

    def watch(self, title: str, /) -> AbstractContextManager[object]:
        return nullcontext()


class ConsoleSink:
    """Prints a line a step under a header that comes back, and a sentence an evaluation."""

    def __init__(self, *, stream: TextIO | None = None) -> None:
        """`stream` None is standard output."""
        self._stream = stream
        self._num_rows = 0

    def shown(self, records: Sequence[Mapping[str, float]]) -> AbstractContextManager[object]:
        return nullcontext()

    def watch(self, title: str, /) -> AbstractContextManager[object]:
        return progress(title, stream=self._stream)

    def write(self, record: Record) -> None:
        """A step's record, or an evaluation's (it has the key `eval/correct`)."""
        if "eval/correct" in record:
            self._print(_evaluation_line(record))
            return
        if self._num_rows % ROWS_PER_HEADER == 0:
            self._print("  ".join(column.title.rjust(column.width) for column in COLUMNS))
        self._num_rows += 1
        self._print("  ".join(column.cell(record) for column in COLUMNS))

    def _print(self, line: str) -> None:
        say(line, stream=self._stream)


def _evaluation_line(record: Record) -> str:
    step, correct, num_problems = (
        reduced(record.get(name)) for name in ("step", "eval/correct", "eval/num_problems")
    )
    line = f"evaluation at step {step}: correct {math.nan if correct is None else correct:.3f}"
    return line if num_problems is None else f"{line} of {num_problems:.0f} problems"


class Advance(Protocol):
    """Moves a progress bar on; `note` is shown beside it until the next."""

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
    """Show how far something is.

        with progress("warm-up", total=150) as advance:
            for loss in ...:
                advance(note=f"loss {loss:.3f}")

    Args:
        total: What the advances add up to; None where it is not known (a compilation): a moving
            bar with the time passed.
        stream: None is standard output.
        interval_s: Shortest time between two lines where there is no terminal.
        clock: Seconds.
    """
    stream = stream or sys.stdout
    if is_terminal(stream):
        with _bar(title, total=total, stream=stream) as advance:
            yield advance
    else:
        lines = _Lines(title, total=total, stream=stream, interval_s=interval_s, clock=clock)
        try:
            yield lines
        except BaseException:
            lines.end("stopped")
            raise
        lines.end("done")


class _Lines:
    """Progress where there is no terminal: a line at the start, at most one an interval, one at the end."""

    def __init__(
        self, title: str, *, total: int | None, stream: TextIO, interval_s: float, clock: Callable[[], float]
    ) -> None:
        self.title = title
        self.total = total
        self.stream = stream
        self.interval_s = interval_s
        self.clock = clock
        self.started = self.printed = clock()
        self.num_done = 0
        self.note = ""
        self._print("started")

    def __call__(self, num: int = 1, *, note: str = "") -> None:
        self.num_done += num
        self.note = note
        if self.clock() - self.printed >= self.interval_s:
            self.printed = self.clock()
            self._print(self._count())

    def end(self, how: str) -> None:
        count = f"{self._count()}, " if self.num_done else ""
        self._print(f"{count}{how} after {self.clock() - self.started:.1f} s")

    def _count(self) -> str:
        count = f"{self.num_done:,}" + (f"/{self.total:,}" if self.total is not None else "")
        return f"{count} ({self.note})" if self.note else count

    def _print(self, text: str) -> None:
        say(f"{self.title}: {text}", stream=self.stream)


@contextlib.contextmanager
def _bar(title: str, *, total: int | None, stream: TextIO) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    count = [MofNCompleteColumn(), TimeRemainingColumn()] if total is not None else []
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *count,
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", style="dim"),
        console=Console(file=stream),
        transient=True,
        # Lines printed meanwhile go above the bar; but what is sent to a file must arrive there.
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(title, total=total, note="")

        def advance(num: int = 1, *, note: str = "") -> None:
            bar.update(task, advance=num, note=note)

        yield advance
