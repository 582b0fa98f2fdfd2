"""What each process did and when: logs/spans/<role>-<rank>.jsonl, read back.

The first line of a file is a header, every other one an activity that has ended:

    {"role": "trainer", "rank": 0, "host": "node-1", "pid": 4711}
    {"name": "push", "start_s": 1764000000.123, "end_s": 1764000000.456, "version": 3}

Times are of the wall clock, in seconds since 1970.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

SPANS_FOLDER = "spans"
"""Within a run's logs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """An activity that has ended."""

    role: str
    rank: int
    name: str
    start_s: float
    end_s: float
    version: int | None
    """Of the weights that were read or made."""
    error: str | None


def read_spans(logs: Path) -> list[Span]:
    """Of all processes of a run, each file's in its order; a line that is not whole is left out."""
    spans: list[Span] = []
    for file in sorted((logs / SPANS_FOLDER).glob("*.jsonl")):
        role, _, rank = file.stem.rpartition("-")
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                said = json.loads(line)
                span = Span(
                    role=role,
                    rank=int(rank),
                    name=str(said["name"]),
                    start_s=float(said["start_s"]),
                    end_s=float(said["end_s"]),
                    version=said.get("version"),
                    error=said.get("error"),
                )
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # the header, or cut short
            spans.append(span)
    return spans
