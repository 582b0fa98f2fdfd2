"""Standard output of a run: lines, progress, a live table on a terminal, and the summary."""

from __future__ import annotations

import contextlib
import datetime
import math
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TextIO

from rl.config.configurable import only_if
from rl.config.tree import check_bounds
from rl.observability.machine import compute_typical_step, find_bottleneck
from rl.observability.metrics import Record, reduce_metric
from rl.observability.run_folder import RunFolder
from rl.observability.spans import read_states
from rl.utils.errors import warn_unwritten
from rl.utils.extras import describe_program
from rl.utils.printing import encode_visible, replace_controls

if TYPE_CHECKING:
    from rich.console import RenderableType

CONSOLE = Path("the console")
ROWS_PER_HEADER = 20
MAX_PROCESS_LINES = 12
MIN_ROWS = 3
"""Steps that a low terminal shows at least."""
MAX_FINDINGS, MAX_FINDING_LINES = 3, 3
"""Findings below the live table, and lines of each."""
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
    """Stream on which a failed write is a warning, such as to a terminal that was closed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        # A ValueError is of a closed stream, or of one without the characters.
        with warn_unwritten(CONSOLE), contextlib.suppress(ValueError):
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
    # The process may have been started without a standard output.
    if stream is not None:
        TolerantStream(stream).write(f"{encode_visible(text, stream=stream)}\n")


@contextlib.contextmanager
def show_progress(
    title: str,
    *,
    total: int | None = None,
    stream: TextIO | None = None,
    interval_s: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Callable[..., None]]:
    """Print the progress of an operation, at most one line every `interval_s`.

        with show_progress("warm-up", total=150) as advance:
            for loss in ...:
                advance(note=f"loss {loss:.3f}")

    The note is shown until the next call. `advance(n)` counts n items as done.
    """
    start_s = printed_s = clock()
    num_done, count = 0, ""

    def advance(num: int = 1, *, note: str = "") -> None:
        nonlocal num_done, printed_s, count
        num_done += num
        count = f"{num_done:,}"
        if total is not None:
            count += f"/{total:,}"
        if note:
            count += f" ({note})"
        # A log file keeps every line, so there are few of them.
        if clock() - printed_s >= interval_s:
            printed_s = clock()
            print_line(f"{title}: {count}", stream=stream)

    print_line(f"{title}: started", stream=stream)
    outcome = "stopped"
    try:
        yield advance
        outcome = "done"
    finally:
        end = f"{outcome} after {clock() - start_s:.1f} s"
        print_line(f"{title}: {count}, {end}" if count else f"{title}: {end}", stream=stream)


class Column(NamedTuple):
    """Column of the table of steps.

    Example:
        >>> Column("loss", "loss/mean", ".4f").format_cell({"loss/mean": 0.03125})
        ' 0.0312'
    """

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

    def format_cell(self, record: Record) -> str:
        value = reduce_metric(record.get(self.metric))
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

    def show(self, records: Sequence[Mapping[str, float]]) -> AbstractContextManager[object]:
        """Show the run while its loop runs, continuing after the records of earlier steps."""
        return nullcontext()

    def write(self, record: Record) -> None:
        """Show the record of a step, or of an evaluation (with the key `eval/correct`)."""

    def watch(self, title: str, /) -> AbstractContextManager[object]:
        """Show the title of a long operation while it runs."""
        return nullcontext()

    def show_findings(self, texts: Mapping[str, str]) -> None:
        """Show what looks wrong now: a text for each kind of finding. From any thread."""


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
    """Console that prints a line for each step, and a sentence for each evaluation."""

    def __init__(self, *, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._num_rows = 0
        self._kinds: set[str] = set()
        """Kinds of the findings that were printed."""

    def show_findings(self, texts: Mapping[str, str]) -> None:
        for kind, text in texts.items():
            # Its figures change with every step.
            if kind not in self._kinds:
                self._kinds.add(kind)
                print_line(f"finding: {text}", stream=self._stream)

    def watch(self, title: str, /) -> AbstractContextManager[object]:
        return show_progress(title, stream=self._stream)

    def write(self, record: Record) -> None:
        if "eval/correct" in record:
            print_line(f"evaluation at {_format_evaluation(record)}", stream=self._stream)
            return

        # The header is repeated, as it scrolls out of sight.
        if self._num_rows % ROWS_PER_HEADER == 0:
            print_line(_join_headers(COLUMNS), stream=self._stream)
        self._num_rows += 1
        print_line(_join_cells(COLUMNS, record), stream=self._stream)


class LiveConsole(Console):
    """Table of the latest steps on a terminal, with evaluations, the time left, and open spans.

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
        self._findings: tuple[str, ...] = ()
        self._is_running = False
        # `inf`: the time left is estimated from all steps, not from the last seconds.
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
    def show(self, records: Sequence[Mapping[str, float]]) -> Iterator[None]:
        from rich.console import Console as RichConsole
        from rich.live import Live

        self._rows, self._evaluation = (), None
        for record in records:
            self.write(record)
        self._progress.reset(self._steps, completed=int(records[-1]["step"]) if records else 0)
        self._is_running = True
        stream: Any = TolerantStream(self._stream or sys.stdout)
        console = RichConsole(file=stream)
        # Lines of other code are redirected to above the table only where they go to a terminal.
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
            self._progress.update(self._steps, completed=reduce_metric(record["step"]))

    def show_findings(self, texts: Mapping[str, str]) -> None:
        self._findings = tuple(texts.values())

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
                below.append(
                    Text(f"evaluation: {_format_evaluation(self._evaluation)}", style="bold")
                )
            below.append(self._progress)
            below += self._list_findings(width=width)
            rows = self._rows

            # After the run the table stays on the terminal, without what was going on.
            if self._is_running:
                if self._phase is not None:
                    below.append(Text(f"now: {self._phase}", style="cyan"))
                below += self._list_processes()
                # Rich cuts a table that is too high at the bottom, where the newest step is.
                rows = rows[-max(MIN_ROWS, height - len(below) - 2) :]

            columns = fit_columns(width)
            table = [Text(_join_cells(columns, row)) for row in rows]
            header = Text(_join_headers(columns), style="bold")
            return Group(Text(self._title, style="bold"), header, *table, *below)
        except Exception as error:  # noqa: BLE001  (the drawing thread must survive)
            return f"the run cannot be shown: {error!r}"

    def _list_findings(self, *, width: int) -> list[RenderableType]:
        from rich.text import Text

        lines: list[RenderableType] = []
        for text in self._findings[:MAX_FINDINGS]:
            # Wrapped here, as the height of what is below the table must be known.
            wrapped = textwrap.wrap(
                replace_controls(f"finding: {text}"),
                width=max(20, width),
                max_lines=MAX_FINDING_LINES,
                placeholder=" ...",
                subsequent_indent=GAP,
            )
            lines += [Text(line, style="red", no_wrap=True) for line in wrapped]
        return lines

    def _list_processes(self) -> list[RenderableType]:
        from rich.text import Text

        states = list(read_states(self._logs))
        lines: list[RenderableType] = []
        for state in states[:MAX_PROCESS_LINES]:
            line = Text(
                replace_controls(f"{state.name:<14}{GAP}{state.describe()}"),
                style="" if state.open else "dim",
                no_wrap=True,
                overflow="ellipsis",
            )
            lines.append(line)
        if len(states) > MAX_PROCESS_LINES:
            lines.append(Text(f"and {len(states) - MAX_PROCESS_LINES} more", style="dim"))
        return lines


def _join_headers(columns: Sequence[Column]) -> str:
    return GAP.join(column.header for column in columns)


def _join_cells(columns: Sequence[Column], record: Record) -> str:
    return GAP.join(column.format_cell(record) for column in columns)


def _format_evaluation(record: Record) -> str:
    step, correct = reduce_metric(record.get("step")), reduce_metric(record.get("eval/correct"))
    num_problems = reduce_metric(record.get("eval/num_problems"))
    # No problem of the evaluation could be scored.
    line = f"step {step}: correct {math.nan if correct is None else correct:.3f}"
    return line if num_problems is None else f"{line} of {num_problems:.0f} problems"


def fit_columns(width: int) -> list[Column]:
    """Return the first columns, as many as fit into the width."""
    columns: list[Column] = []
    end = 0
    for column in COLUMNS:
        end += column.width
        if end > width:
            break
        columns.append(column)
        end += len(GAP)
    return columns


# The end of a run


def describe_results(
    records: Sequence[Mapping[str, float]],
    *,
    folder: RunFolder,
    run_s: float,
    config: Mapping[str, Any] | None = None,
    findings: Mapping[str, str] | None = None,
) -> str:
    """Return the last lines of a run: steps, time, evaluations, results, findings, bottleneck.

    finished: 80 steps in 0:04:12
      evaluation      correct 0.375 -> 0.979 of 512 problems
      checkpoint      outputs/x/checkpoints/step-80
      Hugging Face    outputs/x/checkpoints/hf
      LoRA adapter    outputs/x/checkpoints/adapter
      learning curve  outputs/x/learning_curve.png
      report          python -m rl.report outputs/x
      finding         Replies are cut off. Since step 1 100% of the replies are cut off at 16 ...
      bottleneck      generation takes 61% of a step and reaches 8% of what the machine can do: ...
      would move it   --loop.max_off_policy_steps 1
    """
    num_steps = round(max((record["step"] for record in records), default=0))
    lines = [f"finished: {num_steps} steps in {datetime.timedelta(seconds=round(run_s))}"]

    evaluations = [record for record in records if "eval/correct" in record]
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        start = f"{first['eval/correct']:.3f} -> " if len(evaluations) > 1 else ""
        end = f"{last['eval/correct']:.3f} of {last['eval/num_problems']:.0f} problems"
        lines.append(f"  evaluation      correct {start}{end}")

    # Exports are optional, and a run of no steps has no checkpoint.
    results = {
        "checkpoint": folder.checkpoints / f"step-{num_steps}",
        "Hugging Face": folder.checkpoints / "hf",
        "LoRA adapter": folder.checkpoints / "adapter",
        "learning curve": folder.learning_curve,
    }
    for title, path in results.items():
        if path.exists():
            lines.append(f"  {title:<14}  {path}")
    if num_steps:
        lines.append(f"  report          {describe_program('report')} {folder.path}")
    for text in (findings or {}).values():
        lines.append(f"  finding         {text}")

    limit = find_bottleneck(compute_typical_step(records), config)
    if limit is not None:
        lines += [f"  bottleneck      {limit.sentence}", f"  would move it   {limit.setting}"]
    return "\n".join(lines)
