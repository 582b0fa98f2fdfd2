"""The ended spans of a run, and its timeline as a Chrome trace.

Perfetto (ui.perfetto.dev) and chrome://tracing show the trace. Each process is a track with one
async event for each span, so that spans may overlap. Open spans reach to the last moment at which
any process ended a span. The events of events.jsonl are marks across all tracks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.observability.events import read_events
from rl.observability.run_folder import EVENTS
from rl.observability.spans import MAX_TIME_S, SPANS_FOLDER, WAITS, read_states
from rl.utils.files import get_previous_file, open_regular, parse_json, replace_file

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

Event = dict[str, Any]


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


# A run has up to a million spans, of few names.
@functools.lru_cache(maxsize=4096)
def find_kind(name: str) -> str:
    """Return the kind of the spans of this name; `other` if no pattern matches.

    Example:
        >>> find_kind("optim_step")
        'optim'
    """
    for kind, pattern in _KINDS.items():
        if re.match(pattern, name):
            return kind
    return "other"


def rank_role(role: str) -> int:
    """Return the place of a role from top to bottom; other roles follow."""
    for place, name in enumerate(_ROLES):
        if role.startswith(name):
            return place
    return len(_ROLES)


# Reading


def read_spans(logs: Path, *, max_bytes: int = MAX_BYTES) -> list[Span]:
    """Return the ended spans of all processes of a run, by start time.

    Damaged lines are skipped. If there are more than `max_bytes`, each process gets an equal share
    for its newest spans.
    """
    files = [file for file in (logs / SPANS_FOLDER).glob("*.jsonl") if not file.stem.endswith(".1")]
    spans: list[Span] = []
    for file in files:
        spans += _read_newest(file, num_bytes=max_bytes // len(files))
    # Of spans that begin together the longer one is first, as it holds the others.
    return sorted(spans, key=lambda span: (span.start_s, -span.end_s))


def _read_newest(file: Path, *, num_bytes: int) -> Iterator[Span]:
    """Yield the spans of one process in the last bytes of its files."""
    role, _, rank = file.stem.rpartition("-")
    older = _read_tail(get_previous_file(file), num_bytes=num_bytes)
    newer = _read_tail(file, num_bytes=num_bytes)
    for line in (older + newer)[-num_bytes:].splitlines():
        # The first line may be the rest of a line, and a killed process leaves its last line cut.
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            yield _parse_span(parse_json(line), role, int(rank))


def _read_tail(file: Path, *, num_bytes: int) -> bytes:
    """Return the last bytes of a file; nothing if there is none."""
    with contextlib.suppress(FileNotFoundError), open_regular(file) as content:
        content.seek(max(0, content.seek(0, os.SEEK_END) - num_bytes))
        return content.read(num_bytes)
    return b""


def _parse_span(event: dict[str, Any], role: str, rank: int) -> Span:
    start_s, args = float(event["ts"]) / 1e6, event["args"]
    end_s = start_s + float(event["dur"]) / 1e6
    if not (abs(start_s) <= MAX_TIME_S and abs(end_s) <= MAX_TIME_S):
        raise ValueError(f"a span from {start_s} to {end_s}")
    return Span(
        role=role,
        rank=rank,
        name=str(event["name"]),
        start_s=start_s,
        end_s=end_s,
        version=args.get("version"),
        error=args.get("error"),
    )


# Writing


def write_timeline(logs: Path, destination: Path) -> int:
    """Replace `destination` by the timeline of a run, which may still go on.

    Returns the number of spans. Raises ValueError if no spans were recorded; after an OSError an
    earlier file stays.
    """
    spans = read_spans(logs)
    if not spans:
        raise ValueError(
            f"{logs} holds no spans: the run was made with timeline.enable=False, or by an older "
            "version"
        )
    spans += _read_open_spans(logs, end_s=max(span.end_s for span in spans))
    marks = read_events(logs.parent / EVENTS)

    origin_s = min(span.start_s for span in spans)
    origin_s = min([origin_s, *(mark["time"] for mark in marks)])
    processes = sorted({(rank_role(span.role), span.process) for span in spans})
    pids = {process: pid for pid, (_, process) in enumerate(processes, start=1)}
    events = itertools.chain(
        _make_names(pids),
        _make_span_events(spans, pids, origin_s=origin_s),
        (_make_mark(mark, origin_s) for mark in marks),
    )

    # Event by event: the text of a million spans would take some hundred megabytes.
    with replace_file(destination) as temporary, temporary.open("w", encoding="utf-8") as file:
        head = {"displayTimeUnit": "ms", "otherData": {"begins_at_s": origin_s}}
        file.write(f'{json.dumps(head)[:-1]}, "traceEvents": [\n')
        separator = ""
        for event in events:
            file.write(f"{separator}{json.dumps(event)}")
            separator = ",\n"
        file.write("\n]}\n")
    return len(spans)


def _read_open_spans(logs: Path, *, end_s: float) -> list[Span]:
    """Return the open spans as if they ended at `end_s`, or when they began if that is later."""
    spans: list[Span] = []
    for state in read_states(logs):
        for span in state.open:
            unfinished = Span(
                role=state.role,
                rank=state.rank,
                name=span.name,
                start_s=span.since_s,
                end_s=max(end_s, span.since_s),
                version=span.version,
                unfinished=True,
            )
            spans.append(unfinished)
    return spans


def _make_names(pids: dict[str, int]) -> Iterator[Event]:
    for name, pid in pids.items():
        head: Event = {"ph": "M", "pid": pid, "tid": 0}
        yield {**head, "name": "process_name", "args": {"name": name}}
        yield {**head, "name": "process_sort_index", "args": {"sort_index": pid}}


def _make_mark(event: Event, origin_s: float) -> Event:
    args = dict(event)
    del args["time"], args["event"]
    place = {"ph": "i", "s": "g", "pid": 1, "tid": 0}
    return {**place, "name": event["event"], "ts": _to_us(event["time"], origin_s), "args": args}


def _make_span_events(
    spans: Iterable[Span], pids: dict[str, int], *, origin_s: float
) -> Iterator[Event]:
    for number, span in enumerate(spans):
        args: dict[str, object] = {}
        if span.version is not None:
            args["version"] = span.version
        if span.error is not None:
            args["error"] = span.error
        if span.unfinished:
            args["unfinished"] = True

        # Async events, as spans of one process may overlap without one holding the other.
        event = {
            "pid": pids[span.process],
            "tid": 0,
            "id": number,
            "cat": find_kind(span.name),
            "name": span.name,
        }
        yield {"ph": "b", **event, "ts": _to_us(span.start_s, origin_s), "args": args}
        yield {"ph": "e", **event, "ts": _to_us(span.end_s, origin_s)}


def _to_us(at_s: float, origin_s: float) -> float:
    """Return the microseconds since the origin, to the clock's precision."""
    return round((at_s - origin_s) * 1e6, 1)
