"""Standard output of a run: lines, progress of long operations, and a live table on a terminal."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TextIO

from rl.config.configurable import only_if
from rl.config.tree import check_bounds
from rl.observability.metrics import Record, reduced
from rl.observability.spans import read_states
from rl.utils.errors import optional_write
from rl.utils.printing import visible, writable

if TYPE_CHECKING:
    from rich.console import RenderableType

CONSOLE = Path("the console")
ROWS_PER_HEADER = 20
MAX_PROCESS_LINES = 12
MIN_ROWS = 3
"""Steps that a low terminal shows at least."""
GAP = "  "


@dataclass(kw_only=True, slots=True)
class ConsoleConfig:
    """Output on the console during a run."""

    style: Literal["auto", "lines", "off"] = "auto"
    """auto: a live table on a terminal and a line for each step elsewhere; lines: a line for each
    step; off: no steps."""
    num_rows: int = field(default=12, metadata=only_if("style", "auto"))
    """Number of latest steps in the live table."""

    def __post_init__(self) -> None:
        check_bounds(self, "num_rows", at_least=1)


class TolerantStream:
    """Stream on which a failed write is a warning, such as to a terminal that was closed or a full
    disk.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with (
            optional_write(CONSOLE),
            contextlib.suppress(ValueError),
        ):  # closed, or without the characters
            self._stream.write(text)
            self._stream.flush()
        return len(text)

    def flush(self) -> None:
        """Do nothing: each write is flushed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def print_line(text: str, *, stream: TextIO | None = None) -> None:
    """Print a line at once, by default to standard output; a failure is a warning."""
    stream = sys.stdout if stream is None else stream
    if stream is not None:  # the process may have been started without one
        TolerantStream(stream).write(f"{writable(text, stream=stream)}\n")


@contextlib.contextmanager
def progress(
    title: str,
    *,
    total: int | None = None,
    stream: TextIO | None = None,
    interval_s: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Callable[..., None]]:
    """Print the progress of an operation, at most one line every `interval_s`.

        with progress("warm-up", total=150) as advance:
            for loss in ...:
                advance(note=f"loss {loss:.3f}")

    The note is shown until the next call. `advance(n)` counts n items as done.
    """
    start_s = printed_s = clock()
    num_done, count = 0, ""

    def advance_lines(num: int = 1, *, note: str = "") -> None:
        nonlocal num_done, printed_s, count
        num_done += num
        count = (
            f"{num_done:,}"
            + (f"/{total:,}" if total is not None else "")
            + (f" ({note})" if note else "")
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


class Column(NamedTuple):
    title: str
    metric: str
    form: str
    """Format specification without width."""

    @property
    def width(self) -> int:
        return max(len(self.title), 7)

    @property
    def header(self) -> str:
        return self.title.rjust(self.width)

    def cell(self, record: Record) -> str:
        value = reduced(record.get(self.metric))
        if value is None:
            return "-".rjust(self.width)
        return format(value, self.form if math.isfinite(value) else "").rjust(self.width)


COLUMNS = (
    Column("step", "step", ".0f"),
    Column("reward", "reward/mean", ".3f"),
    Column("correct", "reward/correct", ".3f"),
    Column("loss", "loss/mean", ".4f"),
    Column("logprob diff", "logprob_diff/mean", ".1e"),
    Column("gen tok/s", "perf/generated_tokens_per_s", ",.0f"),
    Column("train tok/s", "perf/trained_tokens_per_s", ",.0f"),
    Column("step s", "time/step_s", ".2f"),
    Column("version", "policy_version", ".0f"),
)


class Console:
    """Display of a run; this one shows nothing."""

    def shown(self, records: Sequence[Mapping[str, float]]) -> AbstractContextManager[object]:
        """Show the run while its loop runs, continuing after the records of earlier steps."""
        return nullcontext()

    def write(self, record: Record) -> None:
        """Show the record of a step, or of an evaluation (with the key `eval/correct`)."""

    def watch(self, title: str, /) -> AbstractContextManager[object]:
        """Show the title of a long operation while it runs."""
        return nullcontext()


def make_console(
    config: ConsoleConfig, *, num_steps: int, logs: Path, title: str, stream: TextIO | None = None
) -> Console:
    """Return the console that suits the config and the stream, by default standard output."""
    if config.style == "off":
        return Console()
    if config.style == "auto" and _is_terminal(sys.stdout if stream is None else stream):
        return LiveConsole(
            title=title, num_steps=num_steps, num_rows=config.num_rows, logs=logs, stream=stream
        )
    return LineConsole(stream=stream)


def _is_terminal(stream: TextIO | None) -> bool:
    from rich.console import Console as RichConsole

    return stream is not None and stream.isatty() and RichConsole(file=stream).is_interactive


class LineConsole(Console):
    """Console that prints a line for each step under a repeated header, and a sentence for each
    evaluation.
    """

    def __init__(self, *, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._num_rows = 0

    def watch(self, title: str, /) -> AbstractContextManager[object]:
        return progress(title, stream=self._stream)

    def write(self, record: Record) -> None:
        if "eval/correct" in record:
            print_line(f"evaluation at {_evaluation(record)}", stream=self._stream)
            return
        if self._num_rows % ROWS_PER_HEADER == 0:
            print_line(GAP.join(column.header for column in COLUMNS), stream=self._stream)
        self._num_rows += 1
        print_line(GAP.join(column.cell(record) for column in COLUMNS), stream=self._stream)


class LiveConsole(Console):
    """Table of the latest steps on a terminal, with evaluations, the time left, and what each
    process does.

    A thread of rich redraws the table every second. Lines printed meanwhile appear above it.
    """

    def __init__(
        self, *, title: str, num_steps: int, num_rows: int, logs: Path, stream: TextIO | None = None
    ) -> None:
        from rich.progress import (
            BarColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._title = title
        self._num_rows = num_rows
        self._logs = logs
        self._stream = stream
        # The drawing thread reads these while the loop writes them: they are replaced, never
        # changed.
        self._rows: tuple[Record, ...] = ()
        self._phase: str | None = None
        self._evaluation: Record | None = None
        self._is_running = False
        self._progress = Progress(
            BarColumn(bar_width=30),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} steps,"),
            TimeElapsedColumn(),
            TextColumn("passed,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            speed_estimate_period=math.inf,
        )
        self._steps = self._progress.add_task("", total=num_steps)

    @contextlib.contextmanager
    def shown(self, records: Sequence[Mapping[str, float]]) -> Iterator[None]:
        from rich.console import Console as RichConsole
        from rich.live import Live

        self._rows, self._evaluation = (), None
        for record in records:
            self.write(record)
        self._progress.reset(self._steps, completed=int(records[-1]["step"]) if records else 0)
        self._is_running = True
        console = RichConsole(file=TolerantStream(self._stream or sys.stdout))  # type: ignore[arg-type]
        live = Live(
            get_renderable=lambda: self._draw(width=console.width, height=console.height),
            console=console,
            refresh_per_second=1.0,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        with live:
            try:
                yield
            finally:
                self._is_running = False

    def write(self, record: Record) -> None:
        if "eval/correct" in record:
            self._evaluation = record
        else:
            self._rows = (*self._rows, record)[-self._num_rows :]
            self._progress.update(self._steps, completed=reduced(record["step"]))

    @contextlib.contextmanager
    def watch(self, title: str, /) -> Iterator[None]:
        before, self._phase = self._phase, title
        try:
            yield
        finally:
            self._phase = before

    def _draw(self, *, width: int, height: int) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        try:
            below: list[RenderableType] = []
            if self._evaluation is not None:
                below.append(Text(f"evaluation: {_evaluation(self._evaluation)}", style="bold"))
            below.append(self._progress)
            rows = self._rows
            if self._is_running:
                if self._phase is not None:
                    below.append(Text(f"now: {self._phase}", style="cyan"))
                below += self._process_lines()
                # Rich cuts a table that is too high at the bottom, where the newest step is.
                rows = rows[-max(MIN_ROWS, height - len(below) - 2) :]
            columns = fitting_columns(width)
            table = [Text(GAP.join(column.cell(row) for column in columns)) for row in rows]
            header = Text(GAP.join(column.header for column in columns), style="bold")
            return Group(Text(self._title, style="bold"), header, *table, *below)
        except Exception as error:  # noqa: BLE001  (the drawing thread must survive)
            return f"the run cannot be shown: {error!r}"

    def _process_lines(self) -> list[RenderableType]:
        from rich.text import Text

        states = list(read_states(self._logs))
        texts = [
            (visible(f"{s.name:<14}{GAP}{s.describe()}"), "" if s.open else "dim") for s in states
        ]
        if num_more := len(texts[MAX_PROCESS_LINES:]):
            texts[MAX_PROCESS_LINES:] = [(f"and {num_more} more", "dim")]
        return [Text(text, style=style, no_wrap=True, overflow="ellipsis") for text, style in texts]


def _evaluation(record: Record) -> str:
    step, correct, num_problems = (
        reduced(record.get(name)) for name in ("step", "eval/correct", "eval/num_problems")
    )
    line = f"step {step}: correct {math.nan if correct is None else correct:.3f}"
    return line if num_problems is None else f"{line} of {num_problems:.0f} problems"


def fitting_columns(width: int) -> list[Column]:
    """Return the first columns, as many as fit into the width."""
    ends = itertools.accumulate(column.width + len(GAP) for column in COLUMNS)
    return [column for column, end in zip(COLUMNS, ends, strict=True) if end - len(GAP) <= width]
