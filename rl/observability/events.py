"""What happened to a run beside its steps: events.jsonl, one JSON object an event.

    {"time": 1764000000.123, "event": "lost", "role": "generator_0", "reason": "rank 0 of 1 is dead"}
    {"time": 1764000012.457, "event": "recovered", "role": "generator_0", "after_s": 12.3}

`time` is the wall clock's, in seconds since 1970; it is there to be read, and decides nothing.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

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
checkpoint_damaged (set_aside: the name that its folder has now); stopped (reason); finished."""
NAMES: tuple[str, ...] = get_args(EventName)

logger = logging.getLogger(__name__)


class Events:
    """Appends to a file; used from any thread. What cannot be written is said once, and the run goes on."""

    def __init__(self, file: Path, *, wall_clock: Callable[[], float] = time.time) -> None:
        self.file = file
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._failed = False

    def add(self, event: EventName, **fields: object) -> None:
        """Write one line, whole and at once.

        Raises:
            ValueError: there is no such event, or a field is called as one that every event has.
        """
        if event not in NAMES:
            raise ValueError(f"event={event!r}: must be one of {', '.join(NAMES)}")
        if "time" in fields:
            raise ValueError("time=...: every event gets the time at which it is added")
        told = {"time": round(self._wall_clock(), 3), "event": event} | fields
        line = json.dumps({name: _plain(value) for name, value in told.items()}) + "\n"
        with self._lock:
            try:
                self._append(line.encode())
            except OSError as error:
                if not self._failed:
                    logger.warning("%s: events are not written: %s", self.file, error)
                self._failed = True

    def _append(self, line: bytes) -> None:
        descriptor = os.open(self.file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            end = os.lseek(descriptor, 0, os.SEEK_END)
            # The last line of a process that was killed, or of a full disk, may have no end.
            if end and os.pread(descriptor, 1, end - 1) != b"\n":
                line = b"\n" + line
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


def read_events(file: Path) -> list[dict[str, Any]]:
    """The events, oldest first; a line that was cut short is left out. None of a file that is not there."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            found.append(event)
    return found


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has none
    return value if isinstance(value, str | int | float | bool | None) else str(value)
