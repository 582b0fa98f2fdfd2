"""A run's timeline in Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A track a process, from logs/spans, in lanes (`rl.observability.lanes`). What a process has not ended is in it
too, up to the last moment that any process told of. Counters are how many activities of one name go on at
once, the policy version that a process pushed or pulled last and, where metrics.jsonl lies beside the logs, a
step's numbers at its end; events.jsonl are marks across all tracks.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.atomic_file import replacing
from rl.observability.activity import STATE_FOLDER
from rl.observability.events import read_events
from rl.observability.lanes import MAIN, lanes_of
from rl.observability.process_state import ProcessState, read_states
from rl.observability.spans import Span, read_spans

COUNTERS = (
    "reward/mean",
    "completion/tokens_mean",
    "perf/generated_tokens_per_s",
    "perf/trained_tokens_per_s",
)
"""Of a step's record, and all of `limit/`."""
_FIRST_ROLES = ("controller", "trainer", "generator", "reward")
"""From top to bottom; others come after them."""

Event = dict[str, Any]


class NoSpansError(ValueError):
    """Nothing was kept of what a run's processes did."""


def write_timeline(logs: Path, destination: Path) -> int:
    """Replace `destination`; how many spans are in it. The run may go on meanwhile.

    Args:
        logs: of a run, in whose folder metrics.jsonl and events.jsonl may lie.

    Raises:
        NoSpansError: there are no spans.
        OSError: it cannot be written; what was there stays.
    """
    spans = read_spans(logs)
    if not spans:
        raise NoSpansError(
            f"{logs} holds no spans: the run was made with timeline.enable=False, or by an older version"
        )
    end_s = max(span.end_s for span in spans)
    spans += _under_way(read_states(logs / STATE_FOLDER), until_s=end_s)
    happened = _happened(logs.parent / "events.jsonl")
    origin_s = min([*(span.start_s for span in spans), *(event["time"] for event in happened)])
    by_process: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_process[span.process].append(span)
    events: Iterator[Event] = itertools.chain(
        *(
            _track(pid, by_process[process], origin_s=origin_s)
            for pid, process in enumerate(sorted(by_process, key=_order), start=1)
        ),
        _metrics(logs.parent / "metrics.jsonl", spans, origin_s=origin_s),
        _marks(happened, origin_s=origin_s),
    )
    with replacing(destination) as temporary, temporary.open("w", encoding="utf-8") as file:
        head = {"displayTimeUnit": "ms", "otherData": {"begins_at_s": origin_s}}
        file.write(f'{json.dumps(head)[:-1]}, "traceEvents": [\n')
        for number, event in enumerate(events):
            file.write(",\n" * (number > 0) + json.dumps(event))
        file.write("\n]}\n")
    return len(spans)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Unended(Span):
    """Of which nobody knows the end."""


def _under_way(states: Iterable[ProcessState], *, until_s: float) -> Iterator[Span]:
    for state in states:
        for doing in state.doing:
            yield _Unended(
                role=state.role,
                rank=state.rank,
                name=doing.what,
                start_s=doing.since.since,
                end_s=max(until_s, doing.since.since),
                version=doing.version,
            )


def _order(process: str) -> tuple[int, str]:
    role = process.partition("[")[0]
    places = [i for i, first in enumerate(_FIRST_ROLES) if role == first or role.startswith(f"{first}_")]
    return (places[0] if places else len(_FIRST_ROLES), process)


def _track(pid: int, spans: Sequence[Span], *, origin_s: float) -> Iterator[Event]:
    """Of one process, in lanes."""
    yield _named(pid, 0, "process_name", name=spans[0].process)
    yield _named(pid, 0, "process_sort_index", sort_index=pid)
    lane = 0
    for name, lanes in lanes_of(spans):
        for number, members in enumerate(lanes):
            lane += 1
            yield _named(pid, lane, "thread_name", name=name if number == 0 else f"{name} {number + 1}")
            yield _named(pid, lane, "thread_sort_index", sort_index=lane)
            for span in members:
                yield _slice(pid, lane, span, origin_s=origin_s)
        if name != MAIN:
            yield from _at_once(pid, name, itertools.chain(*lanes), origin_s=origin_s)
    for span in spans:
        if span.kind in ("push", "pull") and span.version is not None:
            yield _counter(pid, "policy version", span.version, _us(span.end_s, origin_s))


def _at_once(pid: int, name: str, spans: Iterable[Span], *, origin_s: float) -> Iterator[Event]:
    moments = [(at_s, change) for s in spans for at_s, change in ((s.start_s, 1), (s.end_s, -1))]
    num = 0
    for at_s, change in sorted(moments):
        num += change
        yield _counter(pid, f"{name} at once", num, _us(at_s, origin_s))


def _metrics(file: Path, spans: Iterable[Span], *, origin_s: float) -> Iterator[Event]:
    """Numbers of steps, at the end of each; of a step that was done again, as it is in the file."""
    ends = {s.name: s.end_s for s in spans if s.role == "controller" and s.name.startswith("step ")}
    for record in _records(file):
        end_s = ends.get(f"step {record.get('step')}")
        if end_s is None or "time/step_s" not in record:
            continue
        for name, value in record.items():
            if (name in COUNTERS or name.startswith("limit/")) and isinstance(value, float | int):
                yield _counter(1, name, value, _us(end_s, origin_s))


def _records(file: Path) -> Iterator[Mapping[str, Any]]:
    """As far as they can be read: whoever looks at a timeline has other questions than the metrics'."""
    if not file.exists():
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    yield record


def _happened(file: Path) -> list[Event]:
    """What can be read of it; the first is before the first span has begun."""
    try:
        found = read_events(file)
    except ValueError:  # it is no text
        return []
    return [
        e for e in found if isinstance(e, dict) and isinstance(e.get("time"), int | float) and "event" in e
    ]


def _marks(happened: Iterable[Event], *, origin_s: float) -> Iterator[Event]:
    for event in happened:
        said = {name: value for name, value in event.items() if name not in ("time", "event")}
        yield {
            "ph": "i", "s": "g", "pid": 1, "tid": 0, "name": event["event"], "args": said,
            "ts": _us(event["time"], origin_s),
        }  # fmt: skip


def _slice(pid: int, lane: int, span: Span, *, origin_s: float) -> Event:
    said: dict[str, Any] = {}
    if span.version is not None:
        said["version"] = span.version
    if span.error is not None:
        said["error"] = span.error
    if isinstance(span, _Unended):
        said["unfinished"] = True
    return {
        "ph": "X", "pid": pid, "tid": lane, "name": span.name, "cat": span.kind, "args": said,
        "ts": _us(span.start_s, origin_s), "dur": _us(span.end_s, span.start_s),
    }  # fmt: skip


def _counter(pid: int, name: str, value: float, ts: float) -> Event:
    return {"ph": "C", "pid": pid, "tid": 0, "name": name, "ts": ts, "args": {"value": value}}


def _named(pid: int, tid: int, what: str, **said: str | int) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": said}


def _us(at_s: float, origin_s: float) -> float:
    """Microseconds since the origin, as far as the clock has them."""
    return round((at_s - origin_s) * 1e6, 1)
