"""Events of a run besides its steps: events.jsonl, one JSON object a line.

    {"time": 1764000000.123, "event": "lost", "role": "generator_0", "reason": "rank 0 of 1 is
    dead"} {"time": 1764000012.457, "event": "recovered", "role": "generator_0", "after_s": 12.3}

`time` is the wall clock in seconds since 1970, for readers only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from rl.observability.metrics import to_json
from rl.observability.spans import MAX_TIME_S
from rl.utils.errors import optional_write
from rl.utils.files import AppendFile, json_lines

EventName = Literal[
    "started",
    "resumed",
    "lost",
    "recovered",
    "went_back",
    "checkpoint_damaged",
    "stopped",
    "finished",
]
"""started; resumed (step); lost (role, reason); recovered (role, after_s); went_back (to_step);
checkpoint_damaged (set_aside: new name of its folder); stopped (reason); finished."""


class Events:
    """Writer of events.jsonl. Thread-safe; a write error is a warning."""

    def __init__(self, file: Path, *, wall_clock: Callable[[], float] = time.time) -> None:
        self.file = file
        self._wall_clock = wall_clock
        self._lock = threading.Lock()

    def add(self, event: EventName, **fields: object) -> None:
        line = to_json({"time": round(self._wall_clock(), 3), "event": event} | fields) + "\n"
        with self._lock, optional_write(self.file), closing(AppendFile(self.file)) as file:
            file.append(line)


def read_events(file: Path) -> list[dict[str, Any]]:
    """Return the events, oldest first, without damaged lines; nothing if the file does not
    exist.
    """
    return [event for _, event in json_lines(file) if event is not None and is_event(event)]


def is_event(line: Mapping[str, Any]) -> bool:
    """Return whether an object of the file has the fields that every event has."""
    time_s = line.get("time")
    return (
        isinstance(line.get("event"), str)
        and isinstance(time_s, int | float)
        and abs(time_s) <= MAX_TIME_S
    )
