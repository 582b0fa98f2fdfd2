"""What the processes of a run did, read from logs/spans (`rl.observability.span_file` writes it)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from rl.observability.span_file import SPANS_FOLDER

Kind = Literal[
    "generate", "reward", "pack", "forward_backward", "optim", "push", "pull", "wait", "checkpoint", "other"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
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


def read_spans(logs: Path) -> list[Span]:
    """Of all processes of a run, by their starts; none where nothing was written.

    A line that was cut short is left out, as is what follows no header.
    """
    folder = logs / SPANS_FOLDER
    spans = [span for file in sorted(folder.glob("*.jsonl")) for span in _read_file(file)]
    return sorted(spans, key=lambda span: (span.start_s, -span.end_s))


def _read_file(file: Path) -> Iterator[Span]:
    header: dict[str, Any] | None = None
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                said = json.loads(line)
                if "role" in said:
                    header = {"role": str(said["role"]), "rank": int(said["rank"])}
                elif header is not None:
                    yield _span(said, header)
            except (ValueError, KeyError, TypeError):
                continue


def _span(said: dict[str, Any], header: dict[str, Any]) -> Span:
    return Span(
        name=str(said["name"]),
        start_s=float(said["start_s"]),
        end_s=float(said["end_s"]),
        version=said.get("version"),
        error=said.get("error"),
        **header,
    )
