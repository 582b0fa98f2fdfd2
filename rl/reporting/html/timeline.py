"""Spans of each process as a report draws them; in long runs, spans closer than a pixel are merged.

pack_timeline(run.spans, run.events)
# {"start_s": ..., "length_s": ..., "names": [...], "lanes": [...], ...}
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from rl.observability.timeline import Span, find_kind, rank_role

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
    lanes = _sort_into_lanes(span for span in spans if find_kind(span.name) != "step")
    # Doubling needs 17 rounds at most, each of which is linear in the spans.
    gap_s = 0.0
    while True:
        blocks = {lane: _merge(spans_of_lane, gap_s) for lane, spans_of_lane in lanes.items()}
        if sum(map(len, blocks.values())) <= max_blocks or gap_s > length_s:
            break
        gap_s = 2 * gap_s or _FIRST_SHARE * length_s
    # Blocks refer to names by number: a long run has thousands of blocks of a dozen names.
    names: dict[str, int] = {}
    return {
        "start_s": round(start_s, 3),
        "length_s": round(length_s, 4),
        "gap_s": round(gap_s, 4),
        "steps": _list_steps(spans, start_s),
        "events": [_pack_event(event, start_s) for event in events],
        "lanes": [_pack_lane(lane, of_lane, names, start_s) for lane, of_lane in blocks.items()],
        "names": [[name, find_kind(name)] for name in names],
    }


def _pack_event(event: Mapping[str, Any], start_s: float) -> dict[str, Any]:
    fields = dict(event)
    return {"at": round(fields.pop("time") - start_s, 3), **fields}


def _list_steps(spans: Iterable[Span], start_s: float) -> list[list[float]]:
    """Return [step, at, for] of each step, in seconds, by step."""
    steps = []
    for span in spans:
        match = _STEP.fullmatch(span.name)
        if span.role == "controller" and match:
            steps.append((int(match[1]), span.start_s - start_s, span.duration_s))
    return [[step, round(at, 4), round(took, 4)] for step, at, took in sorted(steps)]


def _sort_into_lanes(spans: Iterable[Span]) -> dict[tuple[str, int], list[Span]]:
    """Return the spans by role and rank, in a fixed order of the roles, each by time."""
    lanes: dict[tuple[str, int], list[Span]] = defaultdict(list)
    for span in spans:
        lanes[span.role, span.rank].append(span)
    ordered = sorted(lanes, key=lambda lane: (rank_role(lane[0]), *lane))
    return {lane: sorted(lanes[lane], key=attrgetter("start_s", "end_s")) for lane in ordered}


def _merge(spans: Iterable[Span], gap_s: float) -> list[_Block]:
    """Return the blocks of one lane by time.

    A span is merged into the block before it of the same name if they overlap, or if both are
    shorter than the gap and follow within it. A span with an error stands alone.
    """
    done: list[_Block] = []
    open_of: dict[str, _Block] = {}
    for span in spans:
        last = open_of.get(span.name)
        if span.error is None and last is not None and _belongs_to(last, span, gap_s):
            last.end_s = max(last.end_s, span.end_s)
            last.busy_s += span.duration_s
            last.num += 1
            last.version = span.version if span.version is not None else last.version
            continue
        block = _Block(
            span.name, span.start_s, span.end_s, span.version, span.error, busy_s=span.duration_s
        )
        done.append(block)
        # Spans that failed are few, and each of them is worth a look.
        if span.error is None:
            open_of[span.name] = block
    return done


def _belongs_to(last: _Block, span: Span, gap_s: float) -> bool:
    return span.start_s < last.end_s or _is_too_close(last, span, gap_s)


def _is_too_close(last: _Block, span: Span, gap_s: float) -> bool:
    """Return whether block and span are too small and close to tell apart."""
    is_small = span.duration_s < gap_s and (last.num > 1 or last.end_s - last.start_s < gap_s)
    return is_small and span.start_s - last.end_s <= gap_s


def _pack_lane(
    lane: tuple[str, int], blocks: list[_Block], names: dict[str, int], start_s: float
) -> dict[str, Any]:
    rows = _assign_rows(blocks)
    busy, errors = {}, {}
    for number, block in enumerate(blocks):
        if block.num > 1:
            busy[number] = round(block.busy_s, 4)
        if block.error is not None:
            errors[number] = block.error
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
        "busy": busy,
        "error": errors,
    }


def _assign_rows(blocks: Sequence[_Block]) -> list[int]:
    """Return the first free row for each block, so that nested spans are below outer ones."""
    ends: list[float] = []
    rows = []
    for block in blocks:
        row = 0
        # A span that begins where another one ends may begin a rounding error earlier.
        while row < len(ends) and ends[row] > block.start_s + 1e-6:
            row += 1
        row = min(row, _MAX_ROWS - 1)
        if row == len(ends):
            ends.append(block.end_s)
        else:
            ends[row] = max(ends[row], block.end_s)
        rows.append(row)
    return rows
