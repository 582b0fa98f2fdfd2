"""Summaries of runs, and the table of them that `relay runs` and `relay sweep` print.

    summaries = [summarize_run(folder) for folder in find_runs(Path("outputs"))]
    print(format_table(summaries))

Of each run only what the table needs is read: a thousand runs of ten thousand steps take seconds.
Nothing in a folder is followed or believed, and a file that is damaged leaves its columns empty.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from rl.config.json import get_value_at
from rl.observability.events import read_events
from rl.observability.metrics import read_record
from rl.observability.run_folder import (
    CONFIG,
    EVENTS,
    LOGS,
    METRICS,
    STARTING_POINTS,
    is_run,
    read_status,
)
from rl.observability.spans import STATE_FOLDER, read_state
from rl.utils.files import is_regular, open_regular, parse_json, read_regular
from rl.utils.processes import is_alive

EVALUATION, REWARD = "eval/correct", "reward/mean"
MAX_LEVELS = 3
"""Levels of folders below the given one in which runs are looked for."""
MAX_LINE = 1 << 20
"""Longest line of a metrics file, in bytes."""
HEAD_BYTES = 1 << 18
"""Beginning of a metrics file that is searched for the first evaluation."""
TAIL_BYTES, MAX_TAIL_BYTES = 1 << 15, 1 << 26
"""End of a metrics file that is searched for the last records: it grows until they are found."""

State = Literal["running", "finished", "stopped", "killed", "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """A row of the table. What the folder does not tell is None."""

    name: str
    """Path of the run below the folder that was searched."""
    folder: Path
    task: str | None
    """Origin of the config, such as sum_digits.tiny."""
    num_done: int
    """Last step that is done."""
    num_planned: int | None
    state: State
    """unknown: the controller ran on another machine, or left no record of its process."""
    first_evaluation: float | None
    last_evaluation: float | None
    last_reward: float | None
    duration_s: float | None
    """Time from start to end, without the time between an end and a resumption."""
    started_s: float | None
    """Start in seconds since 1970."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            "name": self.name,
            "folder": str(self.folder),
            "task": self.task,
            "steps": self.num_done,
            "planned_steps": self.num_planned,
            "state": self.state,
            "first_evaluation": self.first_evaluation,
            "last_evaluation": self.last_evaluation,
            "last_reward": self.last_reward,
            "duration_s": self.duration_s,
            "started": self.started_s,
        }


# Folders


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the folder if it is a run's, or else the runs below it; each run once."""
    seen: set[Path] = set()
    for path in _search(folder, levels=MAX_LEVELS):
        # A link such as `latest` is another name of a run beside it.
        place = path.resolve()
        if place not in seen:
            seen.add(place)
            yield path


def _search(folder: Path, *, levels: int) -> Iterator[Path]:
    if _looks_like_run(folder):
        yield folder
        return
    if not levels:
        return
    # Links come last, so that a run is shown under its own name. Runs behind a link are found, but
    # no folder behind a link is searched.
    with suppress(OSError):
        entries = sorted(os.scandir(folder), key=lambda entry: (entry.is_symlink(), entry.name))
        for entry in entries:
            if entry.name.startswith(".") or entry.name == STARTING_POINTS:
                continue
            with suppress(OSError):
                if entry.is_dir():
                    is_link = entry.is_symlink()
                    yield from _search(Path(entry.path), levels=0 if is_link else levels - 1)


def _looks_like_run(folder: Path) -> bool:
    """Return whether a folder is a run's; runs of older versions have no status file."""
    with suppress(OSError):
        if is_run(folder):
            return True
    return is_regular(folder / METRICS) and is_regular(folder / CONFIG)


# A row


def summarize_run(
    folder: Path, *, base: Path | None = None, wall_clock_s: float | None = None
) -> RunSummary:
    """Return the summary of a run's folder.

    Args:
        base: folder that the run's name leaves out; None: the name is that of the run's folder.
        wall_clock_s: present time in seconds since 1970.
    """
    wall_clock_s = time.time() if wall_clock_s is None else wall_clock_s
    # Each part stands for itself: a damaged file costs its own columns only.
    config = _read_config(folder / CONFIG)
    events = _read_events(folder / EVENTS)
    first, last, step = _read_metrics(folder / METRICS)
    state = _find_state(folder, events)
    origin = [str(config[key]) for key in ("module", "config") if key in config]
    num_planned = get_value_at(config.get("values") or {}, "loop.num_steps")
    name = folder.name or str(folder)
    if base is not None and folder != base:
        name = str(folder.relative_to(base))
    changed_s = _find_change(folder / METRICS)
    end_s = wall_clock_s if state == "running" else changed_s
    return RunSummary(
        name=name,
        folder=folder,
        task=".".join(origin) or None,
        num_done=int(step.get("step", last.get("step", 0))),
        num_planned=num_planned if isinstance(num_planned, int) else None,
        state=state,
        first_evaluation=first.get(EVALUATION),
        last_evaluation=last.get(EVALUATION),
        last_reward=step.get(REWARD),
        duration_s=_measure(events, end_s=end_s),
        started_s=events[0]["time"] if events else changed_s,
    )


def _read_config(file: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        config = parse_json(read_regular(file))
        if isinstance(config, dict) and isinstance(config.get("values"), dict):
            return config
    return {}


def _read_events(file: Path) -> list[dict[str, Any]]:
    with suppress(OSError):
        return read_events(file)
    return []


def _find_change(file: Path) -> float | None:
    with suppress(OSError):
        return file.lstat().st_mtime
    return None


def _find_state(folder: Path, events: Sequence[Mapping[str, Any]]) -> State:
    status = None
    with suppress(OSError, ValueError):
        status = read_status(folder)
    if status == "finished":
        return "finished"
    if events and events[-1]["event"] in ("stopped", "finished"):
        return "stopped" if events[-1]["event"] == "stopped" else "finished"
    # The status file says "running" also of a run that was killed.
    with suppress(OSError, ValueError):
        controller = read_state(folder / LOGS / STATE_FOLDER / "controller-0.json")
        if controller.is_here:
            return "running" if is_alive(controller.process) else "killed"
    return "unknown"


def _measure(events: Sequence[Mapping[str, Any]], *, end_s: float | None) -> float | None:
    """Return the seconds of all attempts; the last one ends at `end_s` unless an event says so."""
    if not events:
        return None
    total_s, begin_s, last_s = 0.0, None, 0.0
    for event in events:
        if event["event"] in ("started", "resumed"):
            # A killed attempt has no end: it lasted until its last event at least.
            if begin_s is not None:
                total_s += max(0.0, last_s - begin_s)
            begin_s = event["time"]
        elif event["event"] in ("stopped", "finished") and begin_s is not None:
            total_s += max(0.0, event["time"] - begin_s)
            begin_s = None
        last_s = event["time"]
    if begin_s is not None:
        total_s += max(0.0, (last_s if end_s is None else max(end_s, last_s)) - begin_s)
    return total_s


# The metrics file


Values = Mapping[str, float]


def _read_metrics(file: Path) -> tuple[Values, Values, Values]:
    """Return the first and the last evaluation, and the last step; empty where there is none."""
    first: Values = {}
    last: Values = {}
    step: Values = {}
    with suppress(OSError), open_regular(file) as content:
        first = _find_first_evaluation(content)
        last, step = _find_last_records(content)
    return first or last, last or first, step


def _find_first_evaluation(content: BinaryIO) -> Values:
    content.seek(0)
    while content.tell() < HEAD_BYTES and (line := content.readline(MAX_LINE)):
        record = _parse(line)
        if EVALUATION in record:
            return record
    return {}


def _find_last_records(content: BinaryIO) -> tuple[Values, Values]:
    """Return the last evaluation and the last step."""
    size = content.seek(0, os.SEEK_END)
    num_bytes = min(size, TAIL_BYTES)
    while True:
        start = size - num_bytes
        content.seek(start)
        lines = content.read(num_bytes).split(b"\n")
        if start:
            del lines[0]  # its beginning is missing
        evaluation = _find_last(lines, is_evaluation=True)
        step = _find_last(lines, is_evaluation=False)
        # Most runs evaluate every few steps, so that the first piece is enough.
        if (evaluation and step) or not start or num_bytes >= MAX_TAIL_BYTES:
            return evaluation, step
        num_bytes = min(size, 4 * num_bytes)


def _find_last(lines: Sequence[bytes], *, is_evaluation: bool) -> Values:
    mark = f'"{EVALUATION}"'.encode()
    for line in reversed(lines):
        # To parse every line of a long file would take most of the time.
        if (mark in line) == is_evaluation and (record := _parse(line)):
            return record
    return {}


def _parse(line: bytes) -> Values:
    """Return the values of a line; empty for a damaged line."""
    with suppress(ValueError):
        value = parse_json(line)
        if isinstance(value, dict):
            return read_record(value) or {}
    return {}


# The table

HEADS = ("run", "task", "steps", "state", "eval first", "eval last", "reward", "time", "started")
NUM_TEXTS = 2
"""Columns from the left that hold texts; the others hold numbers, but for the state."""


def format_table(summaries: Iterable[RunSummary]) -> str:
    """Return the table as lines, one for each run."""
    rows = [HEADS, *map(_format_row, summaries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for number, (cell, width) in enumerate(zip(row, widths, strict=True)):
            is_text = number < NUM_TEXTS or HEADS[number] == "state"
            cells.append(cell.ljust(width) if is_text else cell.rjust(width))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _format_row(run: RunSummary) -> tuple[str, ...]:
    planned = "" if run.num_planned is None else f"/{run.num_planned}"
    started = ""
    if run.started_s is not None:
        with suppress(OverflowError, ValueError, OSError):
            started = f"{datetime.datetime.fromtimestamp(run.started_s):%Y-%m-%d %H:%M}"
    return (
        # A name with a line break would be two rows.
        " ".join(run.name.split("\n")),
        run.task or "?",
        f"{run.num_done}{planned}",
        run.state,
        _format_number(run.first_evaluation),
        _format_number(run.last_evaluation),
        _format_number(run.last_reward),
        format_duration(run.duration_s),
        started or "-",
    )


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def format_duration(seconds: float | None) -> str:
    """Return a duration as hours, minutes and seconds, such as 1:05:09."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
