"""Progress of a run in another process: on a terminal, in a notebook, or as lines."""

from __future__ import annotations

import datetime
import html
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl.observability.metrics import read_metrics
from rl.observability.run_folder import METRICS
from rl.utils.printing import replace_controls

NUM_LINES = 14
"""Latest lines of a run that a notebook shows."""
BAR_WIDTH = 30


class View:
    """View of a run; this one shows nothing."""

    is_terminal = False
    """True if the run writes to the caller's own output."""

    def add(self, line: str) -> None:
        """Show a line of the run."""

    def refresh(self) -> None:
        """Show what has changed; called about twice a second."""

    def close(self) -> None:
        """Show the last state."""


class TerminalView(View):
    """The run draws its own live table."""

    is_terminal = True

    def add(self, line: str) -> None:
        print(line, flush=True)


class LineView(View):
    """Each line of the run, printed by this process, so that it can be redirected."""

    def add(self, line: str) -> None:
        print(replace_controls(line), flush=True)


class NotebookView(View):
    """One cell's output, which changes: a bar with the time left, and the latest lines."""

    def __init__(self, *, folder: Path, num_steps: int) -> None:
        from IPython.display import HTML, display

        self._make: Any = HTML
        self._folder = folder
        self._num_steps = num_steps
        self._lines: deque[str] = deque(maxlen=NUM_LINES)
        self._lock = threading.Lock()
        self._start_s = time.monotonic()
        self._steps_done_s: tuple[int, float] | None = None
        self._metrics_size, self._num_done = -1, 0
        self._shown = ""
        self._handle: Any = display(self._make(""), display_id=True)

    def add(self, line: str) -> None:
        with self._lock:
            self._lines.append(line)

    def refresh(self) -> None:
        with self._lock:
            lines = "\n".join(self._lines)
        content = html.escape("\n".join([self._describe_progress(), lines]))
        text = f"<pre>{content}</pre>"
        # Each update travels to the browser and is kept in the notebook's file.
        if text != self._shown:
            self._shown = text
            self._handle.update(self._make(text))

    def close(self) -> None:
        self.refresh()

    def _describe_progress(self) -> str:
        """Return the bar, the steps, and the time that has passed and is left."""
        num_done, passed_s = self._count_steps(), time.monotonic() - self._start_s
        filled = round(BAR_WIDTH * num_done / max(1, self._num_steps))
        bar = f"{'#' * filled}{'.' * (BAR_WIDTH - filled)} {num_done}/{self._num_steps} steps"
        text = f"{bar}, {_format_time(passed_s)} passed"
        if self._steps_done_s is None and num_done:
            # The start and the first step take longer than the others.
            self._steps_done_s = num_done, passed_s
        if self._steps_done_s is not None and num_done > self._steps_done_s[0]:
            first, first_s = self._steps_done_s
            left_s = (passed_s - first_s) / (num_done - first) * (self._num_steps - num_done)
            text = f"{text}, {_format_time(left_s)} left"
        return text

    def _count_steps(self) -> int:
        file = self._folder / METRICS
        with suppress(OSError, ValueError):
            # A thousand steps take a third of a second to read, twice in each second.
            size = file.stat().st_size
            if size != self._metrics_size:
                records = read_metrics(file)
                self._num_done = max((int(record["step"]) for record in records), default=0)
                self._metrics_size = size
        return self._num_done


def make_view(*, folder: Path, num_steps: int, quiet: bool) -> View:
    """Return the view that suits this process."""
    if quiet:
        return View()
    if is_notebook():
        return NotebookView(folder=folder, num_steps=num_steps)
    return TerminalView() if _is_own_output() else LineView()


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


def _is_own_output() -> bool:
    """Return whether `print` writes where a child of this process would write."""
    with suppress(OSError, ValueError, AttributeError):
        # pytest and notebooks put objects without a descriptor, or with another one, in its place.
        return sys.stdout.fileno() == 1
    return False


def _format_time(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))
