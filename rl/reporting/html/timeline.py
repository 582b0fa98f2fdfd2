"""Spans of each process as a report draws them; in long runs, spans closer than a pixel are merged.

pack_timeline(run.spans, run.events) -> {"start_s": ..., "length_s": ..., "names": [...], "lanes":
[...]}
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from rl.observability.timeline import Span, kind_of, role_order

MAX_BLOCKS = 40_000
"""Blocks of a page; timeline.json has every span, for Perfetto."""
_FIRST_SHARE = 2e-5
"""First gap that is closed, as a share of the run's length; it doubles until the blocks fit."""
_MAX_ROWS = 8
"""Rows of a process; further overlapping spans share the last row."""
_STEP = re.compile(r"step (\d+)")


@dataclass(slots=True)
class _Block:
    """One span, or `num` merged spans of one name."""

    name: str
    start_s: float
    end_s: float
    version: int | None
    error: str | None
    num: int = 1
    busy_s: float = 0.0


def pack_timeline(
    spans: Sequence[Span], events: Iterable[Mapping[str, Any]], *, max_blocks: int = MAX_BLOCKS
) -> dict[str, Any]:
    """Return one lane for each process, with times in seconds since `start_s` of the wall clock.

    A lane has columns of blocks: `at` and `for` in seconds, `name` (an index into `names`), `row`,
    `version`, `num` (merged spans), `busy` (their seconds), and `error` by the block's number.
    `steps` are [step, at, for]. `gap_s` is the largest gap between merged spans, 0 if none are
    merged.
    """
    times = [event["time"] for event in events]
    if not spans:
        return {"lanes": [], "names": [], "steps": [], "events": [], "gap_s": 0, "length_s": 0}
    start_s = min([span.start_s for span in spans] + times)
    length_s = max([span.end_s for span in spans] + times) - start_s
    steps = sorted(_steps(spans, start_s))
    lanes = _lanes(span for span in spans if kind_of(span.name) != "step")
    gap_s = 0.0
    while True:
        blocks = {lane: _blocks(of, gap_s=gap_s) for lane, of in lanes.items()}
        if sum(map(len, blocks.values())) <= max_blocks or gap_s > length_s:
            break
        gap_s = 2 * gap_s or _FIRST_SHARE * length_s
    names: dict[str, int] = {}
    return {
        "start_s": round(start_s, 3),
        "length_s": round(length_s, 4),
        "gap_s": round(gap_s, 4),
        "steps": [[step, round(at, 4), round(took, 4)] for step, at, took in steps],
        "events": [_event(event, start_s) for event in events],
        "lanes": [_lane(lane, of, names, start_s) for lane, of in blocks.items()],
        "names": [[name, kind_of(name)] for name in names],
    }


def _event(event: Mapping[str, Any], start_s: float) -> dict[str, Any]:
    fields = {name: value for name, value in event.items() if name != "time"}
    return {"at": round(event["time"] - start_s, 3), **fields}


def _steps(spans: Iterable[Span], start_s: float) -> Iterable[tuple[int, float, float]]:
    for span in spans:
        if span.role == "controller" and (found := _STEP.fullmatch(span.name)):
            yield int(found[1]), span.start_s - start_s, span.duration_s


def _lanes(spans: Iterable[Span]) -> dict[tuple[str, int], list[Span]]:
    """Return the spans by role and rank, in a fixed order of the roles, each by time."""
    lanes: dict[tuple[str, int], list[Span]] = defaultdict(list)
    for span in spans:
        lanes[span.role, span.rank].append(span)
    ordered = sorted(lanes, key=lambda lane: (role_order(lane[0]), *lane))
    return {lane: sorted(lanes[lane], key=attrgetter("start_s", "end_s")) for lane in ordered}


def _blocks(spans: Iterable[Span], *, gap_s: float) -> list[_Block]:
    """Return the blocks of one lane by time.

    A span is merged into the block before it of the same name if they overlap, or if both are
    shorter than the gap and follow within it. A span with an error stands alone.
    """
    done: list[_Block] = []
    open_of: dict[str, _Block] = {}
    for span in spans:
        last = open_of.get(span.name)
        if (
            span.error is None
            and last is not None
            and (span.start_s < last.end_s or _is_one(last, span, gap_s))
        ):
            last.end_s = max(last.end_s, span.end_s)
            last.busy_s += span.duration_s
            last.num += 1
            last.version = span.version if span.version is not None else last.version
            continue
        done.append(
            _Block(
                span.name,
                span.start_s,
                span.end_s,
                span.version,
                span.error,
                busy_s=span.duration_s,
            )
        )
        if span.error is None:
            open_of[span.name] = done[-1]
    return done


def _is_one(last: _Block, span: Span, gap_s: float) -> bool:
    """Return whether block and span are too small and close to tell apart."""
    is_small = span.duration_s < gap_s and (last.num > 1 or last.end_s - last.start_s < gap_s)
    return is_small and span.start_s - last.end_s <= gap_s


def _lane(
    lane: tuple[str, int], blocks: list[_Block], names: dict[str, int], start_s: float
) -> dict[str, Any]:
    rows = _rows(blocks)
    return {
        "role": lane[0],
        "rank": lane[1],
        "num_rows": max(rows, default=0) + 1,
        "at": [round(b.start_s - start_s, 4) for b in blocks],
        "for": [round(b.end_s - b.start_s, 4) for b in blocks],
        "name": [names.setdefault(b.name, len(names)) for b in blocks],
        "row": rows,
        "version": [b.version for b in blocks],
        "num": [b.num for b in blocks],
        "busy": {i: round(b.busy_s, 4) for i, b in enumerate(blocks) if b.num > 1},
        "error": {i: b.error for i, b in enumerate(blocks) if b.error is not None},
    }


def _rows(blocks: Sequence[_Block]) -> list[int]:
    """Return the first free row for each block, so that nested spans are below outer ones."""
    ends: list[float] = []
    rows = []
    for block in blocks:
        row = next((r for r, end in enumerate(ends) if end <= block.start_s + 1e-6), len(ends))
        row = min(row, _MAX_ROWS - 1)
        if row == len(ends):
            ends.append(block.end_s)
        else:
            ends[row] = max(ends[row], block.end_s)
        rows.append(row)
    return rows
