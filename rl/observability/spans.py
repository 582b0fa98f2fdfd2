"""What the processes of a run did, read from logs/spans (`rl.observability.span_file` writes it)."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from rl.observability.span_file import SPANS_FOLDER

Kind = Literal[
    "generate", "reward", "pack", "forward_backward", "optim", "push", "pull", "wait", "checkpoint", "other"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAX_BYTES = 1 << 27
"""That are read: about a million spans."""
WAITS = "waits for "
"""Begins the names of activities that are waits."""
_KIND_OF: dict[str, Kind] = {
    "generate": "generate",
    "score": "reward",
    "pack": "pack",
    "forward_backward": "forward_backward",
    "optim_step": "optim",
    "push": "push",
    "pull": "pull",
    "save": "checkpoint",
    "finish_saving": "checkpoint",
    "load": "checkpoint",
    "export": "checkpoint",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Something that a process did from a moment to another, in seconds since 1970."""

    role: str
    rank: int
    name: str
    start_s: float
    end_s: float
    version: int | None = None
    """Policy version of the weights that were read or made."""
    error: str | None = None
    """That it ended with: its class and the beginning of its message."""

    @property
    def process(self) -> str:
        """Such as "trainer[0]"."""
        return f"{self.role}[{self.rank}]"

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def kind(self) -> Kind:
        return kind_of(self.name)


def kind_of(name: str) -> Kind:
    """What an activity of this name is, for colours and sums."""
    return "wait" if name.startswith(WAITS) else _KIND_OF.get(name, "other")


def read_spans(logs: Path, *, max_bytes: int = MAX_BYTES) -> list[Span]:
    """Of all processes of a run, by their starts; none where nothing was written.

    A line that was cut short is left out, as is what follows no header. Of more than `max_bytes` each process
    has its newest spans, as many as its part has room for.
    """
    files: dict[str, list[Path]] = defaultdict(list)
    for file in sorted((logs / SPANS_FOLDER).glob("*.jsonl"), reverse=True):  # x-0.jsonl, then x-0.1.jsonl
        files[file.name.removesuffix(".jsonl").removesuffix(".1")].append(file)
    room = max_bytes // max(1, len(files))
    spans = [span for of_process in files.values() for span in _newest(of_process, num_bytes=room)]
    return sorted(spans, key=lambda span: (span.start_s, -span.end_s))


def _newest(files: Sequence[Path], *, num_bytes: int) -> Iterator[Span]:
    """Of one process; its newest file first."""
    for file in files:
        with suppress(FileNotFoundError):  # the process has just renamed it
            num_left = num_bytes - file.stat().st_size
            if num_bytes > 0:
                yield from _read_file(file, num_bytes=num_bytes)
            num_bytes = num_left


def _read_file(file: Path, *, num_bytes: int) -> Iterator[Span]:
    """So many bytes at its end, under the header that it begins with."""
    header: dict[str, Any] | None = None
    with file.open("rb") as lines:
        num_skipped = os.fstat(lines.fileno()).st_size - num_bytes
        for line in lines:
            try:
                said = json.loads(line)
                if "role" in said:
                    header = {"role": str(said["role"]), "rank": int(said["rank"])}
                elif header is not None:
                    yield _span(said, header)
            except (ValueError, KeyError, TypeError):
                continue
            if num_skipped > 0:
                if num_skipped > lines.tell():
                    lines.seek(num_skipped)
                    lines.readline()  # the rest of one
                num_skipped = 0


def _span(said: dict[str, Any], header: dict[str, Any]) -> Span:
    return Span(
        name=str(said["name"]),
        start_s=float(said["start_s"]),
        end_s=float(said["end_s"]),
        version=said.get("version"),
        error=said.get("error"),
        **header,
    )
