"""A run on a terminal: the last steps as a table, evaluations, time left, what each process is doing.

Drawn anew every second in place, by a thread of rich's; lines that are printed meanwhile go above it. At
the end the table stays.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rl.observability.activity import STATE_FOLDER
from rl.observability.console import COLUMNS, Column
from rl.observability.metrics import Record, reduced
from rl.observability.process_state import read_states
from rl.observability.process_summary import summarise
from rl.observability.summary import duration

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

REFRESH_PER_S = 1.0
NUM_PACE = 20
"""Last steps that the time left is told from."""
MAX_PROCESS_LINES = 12
DROPPED_FIRST = ("version", "train tok/s", "gen tok/s", "logprob diff", "loss", "step s", "correct")
"""Titles of columns that a narrow terminal does without, in this order."""
GAP = 2
"""Between two columns."""
FEWEST_ROWS = 3
"""Steps that a low terminal shows, whatever else there is."""


class LiveConsole:
    """A `Console` for a terminal."""

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
        """
        Args:
            title: of the run.
            num_steps: of the whole run.
            num_rows: last steps that are shown.
            logs: of the run, where its processes say what they do.
            stream: None is standard output.
            clock: seconds, monotonic.
        """
        self._title = title
        self._num_steps = num_steps
        self._num_rows = num_rows
        self._states = logs / STATE_FOLDER
        self._stream = stream
        self._clock = clock
        self._progress = _Progress(num_steps=num_steps)
        # The thread that draws reads these while the loop writes them: each is replaced, never changed.
        self._rows: tuple[Record, ...] = ()
        self._phases: tuple[str, ...] = ()
        self._evaluations: tuple[Record, ...] = ()
        self._runs = False

    @contextmanager
    def shown(self, records: Sequence[Mapping[str, float]]) -> Iterator[None]:
        """Around a loop that runs and goes on from these records."""
        from rich.console import Console
        from rich.live import Live

        self._rows, self._evaluations = (), ()
        for record in records:
            self._take(record)
        self._progress = _Progress(num_steps=self._num_steps, num_done=self._num_done)
        self._progress.mark(self._clock(), self._num_done)
        self._runs = True
        live = Live(
            get_renderable=self._draw,
            console=Console(file=_Forgiving(self._stream or sys.stdout)),  # type: ignore[arg-type]
            refresh_per_second=REFRESH_PER_S,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        with live:
            try:
                yield
            finally:
                self._runs = False

    def write(self, record: Record) -> None:
        """A step's record, or an evaluation's."""
        self._take(record)
        if "eval/correct" not in record:
            self._progress.mark(self._clock(), self._num_done)

    @contextmanager
    def watch(self, title: str, /) -> Iterator[None]:
        """Around something long, which is named meanwhile."""
        before = self._phases
        self._phases = (*before, title)
        try:
            yield
        finally:
            self._phases = before

    @property
    def _num_done(self) -> int:
        return int(reduced(self._rows[-1]["step"]) or 0) if self._rows else 0

    def _take(self, record: Record) -> None:
        if "eval/correct" in record:
            self._evaluations = (*self._evaluations, record)
        else:
            self._rows = (*self._rows, record)[-self._num_rows :]

    # Drawing

    def _draw(self) -> RenderableType:
        try:
            return self._view()
        except Exception as error:  # noqa: BLE001  (a sink never stops training, nor the thread that draws it)
            return f"the run cannot be shown: {error!r}"

    def _view(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        parts: list[RenderableType] = []
        if line := evaluation_line(self._evaluations):
            parts.append(Text(line))
        parts.append(self._progress.view(self._clock()))
        num_beside = None
        if self._runs:
            parts += [Text(f"now: {phase}", style="cyan") for phase in self._phases[-1:]]
            processes = self._processes()
            num_beside = 1 + len(parts) + processes.row_count
            parts.append(processes)
        table = _StepTable(self._rows, num_beside=num_beside)
        return Group(Text(self._title, style="bold"), table, *parts)

    def _processes(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        lines = summarise(read_states(self._states))
        table = Table.grid(padding=(0, GAP, 0, 0))
        for line in lines[:MAX_PROCESS_LINES]:
            table.add_row(
                Text(line.who, style="dim"), Text(line.does, style="dim" if line.is_idle else ""), line.for_
            )
        if num_more := len(lines[MAX_PROCESS_LINES:]):
            table.add_row(Text(f"and {num_more} more", style="dim"))
        return table


def evaluation_line(evaluations: Sequence[Record]) -> str:
    """First, last and best; empty where there is none."""
    known = [
        (int(reduced(record["step"]) or 0), correct, reduced(record.get("eval/num_problems")))
        for record in evaluations
        if (correct := reduced(record.get("eval/correct"))) is not None
    ]
    if not known:
        return ""
    (first_step, first, _), (step, last, num_problems) = known[0], known[-1]
    line = f"evaluation: correct {last:.3f} at step {step}"
    if len(known) > 1:
        best_step, best, _ = max(known, key=lambda entry: entry[1])
        line += f", {first:.3f} at step {first_step}"
        if best_step not in (first_step, step):
            line += f", best {best:.3f} at step {best_step}"
    return line if num_problems is None else f"{line}, of {num_problems:.0f} problems"


def fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """As many as a terminal of this width has room for."""
    kept = list(columns)
    for title in DROPPED_FIRST:
        if sum(column.width + GAP for column in kept) - GAP <= width:
            break
        kept = [column for column in kept if column.title != title]
    return kept


class _StepTable:
    """Of the last steps, as wide and as many as there is room."""

    def __init__(self, rows: Sequence[Record], *, num_beside: int | None) -> None:
        """`num_beside`: lines that the terminal is to have room for beside the table; None: it may scroll."""
        self._rows = rows
        self._num_beside = num_beside

    def __rich_console__(self, console: Any, options: Any) -> Iterator[RenderableType]:
        from rich.table import Table
        from rich.text import Text

        columns = fitting(COLUMNS, options.max_width)
        table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
        for column in columns:
            table.add_column(column.title.rjust(column.width), justify="right", no_wrap=True)
        rows = self._rows
        if self._num_beside is not None:  # what is below the last line is not seen: the newest step would be
            rows = rows[-max(FEWEST_ROWS, options.size.height - self._num_beside - 1) :]
        for row in rows:
            table.add_row(*(Text(column.cell(row)) for column in columns))
        yield table


class _Progress:
    """How far a run is, and how long it will take."""

    def __init__(self, *, num_steps: int, num_done: int = 0) -> None:
        self._num_steps = num_steps
        self._num_done = num_done
        self._began_s: float | None = None
        self._marks: tuple[tuple[float, int], ...] = ()
        """Of the last steps: when, and how many were done."""

    def mark(self, now_s: float, num_done: int) -> None:
        """So many are done now."""
        if self._began_s is None:
            self._began_s = now_s
        self._num_done = num_done
        self._marks = (*self._marks, (now_s, num_done))[-NUM_PACE - 1 :]

    def left_s(self, now_s: float) -> float | None:
        """By the pace of the last steps, evaluations between them included; None before there was one."""
        if not self._marks:
            return None
        (first_s, first), (last_s, last) = self._marks[0], self._marks[-1]
        if last == first:
            return None
        step_s = (last_s - first_s) / (last - first)
        return max(0.0, step_s * (self._num_steps - last) - (now_s - last_s))

    def view(self, now_s: float) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        left_s = self.left_s(now_s)
        passed = duration(now_s - (now_s if self._began_s is None else self._began_s))
        is_done = self._num_done >= self._num_steps
        left = "" if left_s is None or is_done else f", about {duration(left_s)} left"
        line = Table.grid(padding=(0, GAP, 0, 0))
        line.add_row(
            ProgressBar(total=max(1, self._num_steps), completed=self._num_done, width=30),
            Text(f"{self._num_done:,}/{self._num_steps:,} steps, {passed} passed{left}"),
        )
        return line


class _Forgiving:
    """A stream that nobody may be left to read, or that has not all letters."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # ValueError: closed, or of letters
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
