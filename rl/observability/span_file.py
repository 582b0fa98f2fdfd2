"""What a process did, one line an activity that has ended: logs/spans/<role>-<rank>.jsonl.

    {"role": "trainer", "rank": 0, "host": "node-3", "pid": 4711}
    {"name": "forward_backward", "start_s": 1764000000.123456, "end_s": 1764000000.573456, "version": 3}

A header, anew with every process that goes on in the file, and activities in the order of their ends.
Times are seconds since 1970: those of the monotonic clock, put beside the wall clock once, when the process
begins, so that a clock that is set later moves nothing. `rl.observability.spans` reads it.

Lines are kept for a moment and written together, by whoever ends an activity: at once where nothing else goes
on in the process, so that what it did last is on the disk while it waits.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rl.config.effect import only_if
from rl.observability.whole_lines import WholeLines

SPANS_FOLDER = "spans"
"""Within a run's logs."""
KEEP_S = 0.25
KEEP_CHARACTERS = 1 << 14
"""Lines wait for each other that long at most, where something goes on, and until there are as many."""
_FLUSH_BELOW_MEGABYTES = 0.1


@dataclass(kw_only=True, slots=True)
class TimelineConfig:
    """What is kept of what each process did, and when."""

    enable: bool = True
    """Write logs/spans while the run goes on, and timeline.json at its end."""
    max_megabytes: float = field(default=32.0, metadata=only_if("enable", True))
    """Of the spans of one process: the oldest make room."""

    def __post_init__(self) -> None:
        if not _FLUSH_BELOW_MEGABYTES <= self.max_megabytes < math.inf:
            raise ValueError(
                f"max_megabytes={self.max_megabytes}: must be at least {_FLUSH_BELOW_MEGABYTES} and finite"
            )


class SpanFile:
    """Appended to by one process, under a lock of its caller's."""

    def __init__(
        self,
        path: Path,
        *,
        role: str,
        rank: int,
        max_bytes: int,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises OSError where the file cannot be made."""
        self._max_bytes = max_bytes // 2
        """Of this file; the one before it has as many."""
        header = {"role": role, "rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
        self._header = json.dumps(header) + "\n"
        self._offset_s = wall_clock() - time.monotonic()
        self._lines: list[str] = []
        self._num_characters = 0
        self._written_at = -math.inf
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = WholeLines(path)
        self._file.open()
        self._size = path.stat().st_size
        # What was there may be of a process that was killed in the middle of a line.
        self._keep(f"\n{self._header}" if self._size else self._header)

    def add(
        self, name: str, *, began_s: float, ended_s: float, version: int | None, error: str | None, more: bool
    ) -> None:
        """An activity that has ended; times are those of `time.monotonic`.

        Args:
            more: something else goes on in this process, at whose end there will be another call.
        """
        failed = "" if error is None else f', "error": {json.dumps(error)}'
        self._keep(
            f'{{"name": {quoted(name)}, "start_s": {began_s + self._offset_s:.6f}, '
            f'"end_s": {ended_s + self._offset_s:.6f}, '
            f'"version": {"null" if version is None else version}{failed}}}\n'
        )
        if not more or ended_s - self._written_at > KEEP_S or self._num_characters > KEEP_CHARACTERS:
            self.flush()
            self._written_at = ended_s

    def flush(self) -> None:
        """Hand over what is kept; what a full disk does not take is lost, and the process goes on."""
        text = "".join(self._lines)
        self._lines, self._num_characters = [], 0
        if not text:
            return
        if self._size and self._size + len(text) > self._max_bytes:
            text = self._begin_another(text)
        with contextlib.suppress(OSError):
            self._file.append(text)
            self._size += len(text)  # In ASCII: as many bytes as characters.

    def close(self) -> None:
        """What is kept is written first. Idempotent."""
        self.flush()
        self._file.close()

    def _keep(self, line: str) -> None:
        self._lines.append(line)
        self._num_characters += len(line)

    def _begin_another(self, text: str) -> str:
        self._file.close()
        with contextlib.suppress(OSError):
            self._path.replace(self._path.with_suffix(".1.jsonl"))
            self._size = 0
        return self._header + text


@functools.lru_cache(maxsize=1024)
def quoted(name: str) -> str:
    """As JSON; activities have few names."""
    return json.dumps(name)
