"""A run on standard output: a live table on a terminal, a line for each step elsewhere."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TextIO

from rl.config.effect import only_if
from rl.config.tree import check_bounds
from rl.observability.metrics import Record, reduced
from rl.observability.progress import format_duration, is_terminal, print_line, progress
from rl.observability.span_reader import read_states

if TYPE_CHECKING:
    from rich.console import RenderableType

ROWS_PER_HEADER = 20
MAX_PROCESS_LINES = 12
MIN_ROWS = 3
"""Steps that a low terminal shows at least."""
GAP = 2
"""Blanks between two columns."""


@dataclass(kw_only=True, slots=True)
class ConsoleConfig:
    """Output on the console during a run."""

    style: Literal["auto", "lines", "off"] = "auto"
    """auto: a live table on a terminal and a line for each step elsewhere; lines: a line for each step; off: no
    steps."""
    num_rows: int = field(default=12, metadata=only_if("style", "auto"))
    """Number of latest steps in the live table."""

    def __post_init__(self) -> None:
        check_bounds(self, "num_rows", at_least=1)


class Column(NamedTuple):
    """One metric of a step's line."""

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
        """Return the metric as text of the column's width."""
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
    if config.style == "auto" and is_terminal(stream):
        return LiveConsole(
            title=title, num_steps=num_steps, num_rows=config.num_rows, logs=logs, stream=stream
        )
    return LineConsole(stream=stream)


class LineConsole(Console):
    """Console that prints a line for each step under a repeated header, and a sentence for each evaluation."""

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
            print_line("  ".join(column.header for column in COLUMNS), stream=self._stream)
        self._num_rows += 1
        print_line("  ".join(column.cell(record) for column in COLUMNS), stream=self._stream)


class LiveConsole(Console):
    """Table of the latest steps on a terminal, with evaluations, the time left, and what each process does.

    A thread of rich redraws the table every second. Lines printed meanwhile appear above it.
    """

    def __init__(
        self,
        *,
        title: str,
        num_steps: int,
        num_rows: int,
        logs: Path,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title = title
        self._num_rows = num_rows
        self._logs = logs
        self._stream = stream
        self._clock = clock
        self._num_steps = num_steps
        # The drawing thread reads these while the loop writes them: they are replaced, never changed.
        self._rows: tuple[Record, ...] = ()
        self._phases: tuple[str, ...] = ()
        self._evaluations: tuple[Record, ...] = ()
        self._start_s = self._last_s = 0.0
        self._first_step = 0
        self._is_running = False

    @contextlib.contextmanager
    def shown(self, records: Sequence[Mapping[str, float]]) -> Iterator[None]:
        from rich.console import Console as RichConsole
        from rich.live import Live

        self._rows, self._evaluations = (), ()
        for record in records:
            self.write(record)
        self._start_s = self._last_s = self._clock()
        self._first_step = self._num_done
        self._is_running = True
        console = RichConsole(file=_TolerantStream(self._stream or sys.stdout))  # type: ignore[arg-type]
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
            self._evaluations = (*self._evaluations, record)
        else:
            self._rows = (*self._rows, record)[-self._num_rows :]
            self._last_s = self._clock()

    @contextlib.contextmanager
    def watch(self, title: str, /) -> Iterator[None]:
        before = self._phases
        self._phases = (*before, title)
        try:
            yield
        finally:
            self._phases = before

    @property
    def _num_done(self) -> int:
        return int(reduced(self._rows[-1]["step"]) or 0) if self._rows else 0

    def _draw(self, *, width: int, height: int) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        try:
            below: list[RenderableType] = []
            if self._evaluations:
                below.append(Text(f"evaluation: {_evaluation(self._evaluations[-1])}", style="bold"))
            below.append(self._progress(self._clock()))
            rows = self._rows
            if self._is_running:
                below += [Text(f"now: {phase}", style="cyan") for phase in self._phases[-1:]]
                below += self._process_lines()
                # Rich cuts a table that is too high at the bottom, where the newest step is.
                rows = rows[-max(MIN_ROWS, height - len(below) - 2) :]
            return Group(Text(self._title, style="bold"), _step_table(rows, width=width), *below)
        except Exception as error:  # noqa: BLE001  (the drawing thread must survive)
            return f"the run cannot be shown: {error!r}"

    def _process_lines(self) -> list[RenderableType]:
        from rich.text import Text

        states = list(read_states(self._logs))
        shown = states[:MAX_PROCESS_LINES]
        width = max((len(state.name) for state in shown), default=0) + GAP
        lines: list[RenderableType] = [
            Text(
                f"{state.name:<{width}}{state.describe()}",
                style="" if state.open else "dim",
                no_wrap=True,
                overflow="ellipsis",
            )
            for state in shown
        ]
        if num_more := len(states) - len(shown):
            lines.append(Text(f"and {num_more} more", style="dim"))
        return lines

    def time_left_s(self, now_s: float) -> float | None:
        """Return the time left at the mean pace so far, or None before the first step."""
        num_new = self._num_done - self._first_step
        if num_new <= 0:
            return None
        step_s = (self._last_s - self._start_s) / num_new
        return max(0.0, step_s * (self._num_steps - self._num_done) - (now_s - self._last_s))

    def _progress(self, now_s: float) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        left_s, num_done = self.time_left_s(now_s), self._num_done
        is_over = left_s is None or num_done >= self._num_steps
        left = "" if left_s is None or is_over else f", about {format_duration(left_s)} left"
        passed = format_duration(now_s - self._start_s)
        line = Table.grid(padding=(0, GAP, 0, 0))
        line.add_row(
            ProgressBar(total=max(1, self._num_steps), completed=num_done, width=30),
            f"{num_done:,}/{self._num_steps:,} steps, {passed} passed{left}",
        )
        return line


def _evaluation(record: Record) -> str:
    step, correct, num_problems = (
        reduced(record.get(name)) for name in ("step", "eval/correct", "eval/num_problems")
    )
    line = f"step {step}: correct {math.nan if correct is None else correct:.3f}"
    return line if num_problems is None else f"{line} of {num_problems:.0f} problems"


def fitting_columns(width: int) -> list[Column]:
    """Return the first columns, as many as fit into the width."""
    ends = [sum(column.width + GAP for column in COLUMNS[: i + 1]) - GAP for i in range(len(COLUMNS))]
    return [column for column, end in zip(COLUMNS, ends, strict=True) if end <= width]


def _step_table(rows: Sequence[Record], *, width: int) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    columns = fitting_columns(width)
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.header, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(column.cell(row)) for column in columns))
    return table


class _TolerantStream:
    """Stream that ignores errors, such as those of a terminal that was closed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
