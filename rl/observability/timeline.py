"""A run's timeline as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Each process is a track with one async event for each span, so that spans may overlap. Open spans reach to the
last moment at which any process ended a span. The events of events.jsonl are marks across all tracks.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rl.observability.events import read_events
from rl.observability.run_folder import EVENTS
from rl.observability.span_reader import Span, kind_of, read_spans, read_states, role_order
from rl.observability.spans import TimelineConfig
from rl.utils.files import atomic_write

Event = dict[str, Any]

logger = logging.getLogger(__name__)


def write_timeline(logs: Path, destination: Path) -> int:
    """Replace `destination` by the timeline of a run, which may still go on; return the number of spans.

    Raises:
        ValueError: no spans were recorded.
        OSError: the file cannot be written; an earlier file stays.
    """
    spans = read_spans(logs)
    if not spans:
        raise ValueError(
            f"{logs} holds no spans: the run was made with timeline.enable=False, or by an older version"
        )
    end_s = max(span.end_s for span in spans)
    spans += [
        Span(
            role=state.role,
            rank=state.rank,
            name=span.name,
            start_s=span.since_s,
            end_s=max(end_s, span.since_s),
            version=span.version,
            unfinished=True,
        )
        for state in read_states(logs)
        for span in state.open
    ]
    marks = read_events(logs.parent / EVENTS)
    origin_s = min([*(span.start_s for span in spans), *(mark["time"] for mark in marks)])
    processes = sorted({(role_order(span.role), span.process) for span in spans})
    pids = {process: pid for pid, (_, process) in enumerate(processes, start=1)}
    events = itertools.chain(
        _names(pids), _span_events(spans, pids, origin_s=origin_s), (_mark(mark, origin_s) for mark in marks)
    )
    with atomic_write(destination) as temporary, temporary.open("w", encoding="utf-8") as file:
        head = {"displayTimeUnit": "ms", "otherData": {"begins_at_s": origin_s}}
        file.write(f'{json.dumps(head)[:-1]}, "traceEvents": [\n')
        file.writelines(",\n" * (number > 0) + json.dumps(event) for number, event in enumerate(events))
        file.write("\n]}\n")
    return len(spans)


def write_timeline_of_run(logs: Path, destination: Path, *, timeline: TimelineConfig) -> None:
    """Write the timeline at the end of a run, if it is enabled; errors are logged."""
    if not timeline.enable:
        return
    try:
        write_timeline(logs, destination)
    except Exception as error:  # noqa: BLE001  (the run has its results, or an error of its own)
        logger.warning("%s was not written: %s", destination, getattr(error, "strerror", None) or error)


def _names(pids: dict[str, int]) -> Iterator[Event]:
    for name, pid in pids.items():
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}


def _mark(event: Event, origin_s: float) -> Event:
    args = {name: value for name, value in event.items() if name not in ("time", "event")}
    place = {"ph": "i", "s": "g", "pid": 1, "tid": 0}
    return {**place, "name": event["event"], "ts": _us(event["time"], origin_s), "args": args}


def _span_events(spans: Iterable[Span], pids: dict[str, int], *, origin_s: float) -> Iterator[Event]:
    for number, span in enumerate(spans):
        args = {"version": span.version, "error": span.error, "unfinished": span.unfinished or None}
        args = {name: value for name, value in args.items() if value is not None}
        event = {
            "pid": pids[span.process],
            "tid": 0,
            "id": number,
            "cat": kind_of(span.name),
            "name": span.name,
        }
        yield {"ph": "b", **event, "ts": _us(span.start_s, origin_s), "args": args}
        yield {"ph": "e", **event, "ts": _us(span.end_s, origin_s)}


def _us(at_s: float, origin_s: float) -> float:
    """Return the microseconds since the origin, to the clock's precision."""
    return round((at_s - origin_s) * 1e6, 1)
