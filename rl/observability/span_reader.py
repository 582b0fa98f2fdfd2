"""Read what `rl.observability.spans` recorded: the open and the ended spans of a run's processes."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rl.observability.spans import SPANS_FOLDER, STATE_FOLDER
from rl.utils.files import previous_file
from rl.utils.processes import ProcessId

WAITS = "waits for "
"""Prefix of the names of spans that wait for another process."""
MAX_BYTES = 1 << 27
"""Bytes of ended spans that are read: about a million spans."""
_KINDS = {
    "wait": WAITS,
    "generate": "generate",
    "reward": "score",
    "pack": "pack",
    "forward_backward": "forward|compute_|drop_gradient",
    "optim": "optim_step",
    "push": "push",
    "pull": "pull",
    "checkpoint": "save|finish_saving|load|export",
    "step": r"step \d+",
    "evaluate": "evaluat|greedy",
    "setup": "setup|start|warm|sleep|wake|close|import",
}
"""Kinds of spans, for colours and sums, with the pattern that their names begin with."""
_ROLES = ("controller", "trainer", "generator", "reward")
_READ_ATTEMPTS = 20
"""Attempts to read a state file that is being written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenSpan:
    """The open spans of one name in one process."""

    name: str
    num: int
    version: int | None
    """Policy version of the oldest span."""
    since_s: float
    """Start of the oldest span, in seconds since 1970."""

    def __str__(self) -> str:
        times = "" if self.num == 1 else f" ({self.num} times)"
        return f"{self.name}{times}{'' if self.version is None else f' of version {self.version}'}"


class FailedSpan(NamedTuple):
    """The last span that ended with an error."""

    name: str
    error: str
    """Class and beginning of the message."""
    at_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessState:
    """Open spans of one process. Times are in seconds since 1970, by the clock of the process."""

    role: str
    rank: int
    host: str
    process: ProcessId
    clock_offset_s: float
    """Difference between the clock of the process and the monotonic clock of its machine."""
    policy_version: int | None
    """Policy version of the latest span that had one."""
    open: tuple[OpenSpan, ...]
    """Open spans, oldest first; empty while the process waits for requests."""
    changed_s: float
    """Time at which a span last began or ended."""
    failed: FailedSpan | None

    @property
    def name(self) -> str:
        return f"{self.role}[{self.rank}]"

    @property
    def is_here(self) -> bool:
        """True for a process of this machine."""
        return self.host == socket.gethostname()

    def age_s(self, at_s: float) -> float:
        """Return the seconds since one of this state's times."""
        now_s = time.monotonic() + self.clock_offset_s if self.is_here else time.time()
        return max(0.0, now_s - at_s)

    def describe(self) -> str:
        """Return the open spans and their ages, such as "forward_backward of version 3 for 12.0 s"."""
        text = ", ".join(f"{span} for {self.age_s(span.since_s):.1f} s" for span in self.open)
        text = text or f"idle for {self.age_s(self.changed_s):.1f} s"
        if self.failed is None:
            return text
        age_s = self.age_s(self.failed.at_s)
        return f"{text}; {self.failed.name} failed {age_s:.1f} s ago: {self.failed.error}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A span that has ended, with times in seconds since 1970."""

    role: str
    rank: int
    name: str
    start_s: float
    end_s: float
    version: int | None = None
    """Policy version of the weights that were read or made."""
    error: str | None = None
    """Class and beginning of the message of the error that ended the span."""
    unfinished: bool = False

    @property
    def process(self) -> str:
        return f"{self.role}[{self.rank}]"

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@functools.lru_cache(maxsize=4096)
def kind_of(name: str) -> str:
    """Return the kind of the spans of this name; `other` if no pattern matches."""
    return next((kind for kind, pattern in _KINDS.items() if re.match(pattern, name)), "other")


def role_order(role: str) -> int:
    """Return the place of a role from top to bottom; other roles follow."""
    return next((place for place, name in enumerate(_ROLES) if role.startswith(name)), len(_ROLES))


def read_state(file: Path) -> ProcessState:
    """Read the state file of one process.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a state file.
    """
    for _ in range(_READ_ATTEMPTS):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            record = json.loads(file.read_bytes())
            if record["write"] == record["end"]:
                return _state(record)
    raise ValueError(f"{file} is not the state file of a process")


def read_states(logs: Path) -> Iterator[ProcessState]:
    """Yield the states of all processes of a run by name, without unreadable files."""
    for file in sorted((logs / STATE_FOLDER).glob("*.json")):
        with contextlib.suppress(ValueError, FileNotFoundError):
            yield read_state(file)


def _state(record: dict[str, Any]) -> ProcessState:
    failed = record["failed"]
    names = ("role", "rank", "host", "clock_offset_s", "policy_version", "changed_s")
    return ProcessState(
        **{name: record[name] for name in names},
        process=ProcessId(record["pid"], record["start_ticks"]),
        open=tuple(OpenSpan(**span) for span in record["open"]),
        failed=None if failed is None else FailedSpan(**failed),
    )


def read_spans(logs: Path, *, max_bytes: int = MAX_BYTES) -> list[Span]:
    """Return the ended spans of all processes of a run, by start time.

    Damaged lines are skipped. If there are more than `max_bytes`, each process gets an equal share for its
    newest spans.
    """
    files = [file for file in (logs / SPANS_FOLDER).glob("*.jsonl") if not file.stem.endswith(".1")]
    spans = [span for file in files for span in _newest(file, num_bytes=max_bytes // len(files))]
    return sorted(spans, key=lambda span: (span.start_s, -span.end_s))


def _newest(file: Path, *, num_bytes: int) -> Iterator[Span]:
    """Yield the spans of one process in the last bytes of its files."""
    role, _, rank = file.stem.rpartition("-")
    parts = [part.read_bytes() for part in (previous_file(file), file) if part.exists()]
    for line in b"".join(parts)[-num_bytes:].splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # damaged, or the rest of a line
            yield _span(json.loads(line), role, int(rank))


def _span(event: dict[str, Any], role: str, rank: int) -> Span:
    start_s, args = float(event["ts"]) / 1e6, event["args"]
    return Span(
        role=role,
        rank=rank,
        name=str(event["name"]),
        start_s=start_s,
        end_s=start_s + float(event["dur"]) / 1e6,
        version=args.get("version"),
        error=args.get("error"),
    )
