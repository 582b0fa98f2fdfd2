"""What each process did when, as a page draws it: of long runs, neighbours that no screen could tell apart
are one block.

    pack_timeline(run.spans, run.events) -> {"start_s": ..., "length_s": ..., "names": [...], "lanes": [...]}
"""

from __future__ import annotations

import functools
import heapq
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from rl.observability.spans import Span, kind_of

MAX_BLOCKS = 40_000
"""Of a page; finer detail is in the run's timeline.json, for Perfetto."""
NUM_DETAILED_STEPS = 5
"""The latest ones are shown as they were, whatever the length of the run."""
_FIRST_SHARE = 2e-5
"""Of the run's length: gaps below it are closed first, then twice as long ones, and so on."""
_MAX_ROWS = 8
"""Activities beside each other in one process that have a row of their own; the rest share the last."""
_MOST_BESIDE = 3
"""Of activities of one name; more at once are one block with their number."""
_STEP = re.compile(r"step (\d+)")

_PATTERNS = (
    (re.compile(r"step \d+"), "step"),
    (re.compile(r"evaluat|greedy"), "evaluate"),
    (re.compile(r"forward|compute_|drop_gradient"), "forward_backward"),
    (re.compile(r"setup|start|warm|sleep|wake|close|import"), "setup"),
)
"""Of what `kind_of` calls other."""


@functools.lru_cache(maxsize=4096)
def category(name: str) -> str:
    """What an activity is drawn as: its kind (`rl.observability.spans`), or step, evaluate, setup."""
    kind = kind_of(name)
    return next((c for pattern, c in _PATTERNS if kind == "other" and pattern.match(name)), kind)


@dataclass(slots=True)
class _Block:
    """One activity, or `num` of one name with less than a gap between them."""

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
    """Lanes, a process each; times are seconds since `start_s`, which is of the wall clock.

    A lane's `blocks` are columns: `at` and `for` in seconds, `name` (counts in `names`), `row`, `version`,
    `num` (activities in it), `busy` (seconds of them), and `error` by the block's number. `steps` are the
    controller's, [step, at, for]. `gap_s` is what neighbours have at most between them to be one block;
    0 where all are shown.
    """
    times = [float(event["time"]) for event in events if _is_time(event.get("time"))]
    if not spans:
        return {"lanes": [], "names": [], "steps": [], "events": [], "gap_s": 0, "length_s": 0}
    start_s = min([span.start_s for span in spans] + times)
    length_s = max([span.end_s for span in spans] + times) - start_s
    steps = sorted(_steps(spans, start_s))
    detailed_s = steps[-NUM_DETAILED_STEPS][1] + start_s if len(steps) > NUM_DETAILED_STEPS else start_s
    lanes = _lanes(span for span in spans if category(span.name) != "step")
    crowded = {lane: _crowded(of) for lane, of in lanes.items()}
    gap_s, until_s = 0.0, start_s
    while True:
        blocks = {
            lane: _blocks(of, gap_s=gap_s, until_s=until_s, crowded=crowded[lane])
            for lane, of in lanes.items()
        }
        if sum(map(len, blocks.values())) <= max_blocks or gap_s > length_s:
            break
        gap_s = 2 * gap_s or _FIRST_SHARE * length_s
        # Where the latest steps alone are too many, they are not spared either.
        until_s = detailed_s if gap_s < length_s / 100 else start_s + length_s
    names: dict[str, int] = {}
    return {
        "start_s": round(start_s, 3),
        "length_s": round(length_s, 4),
        "gap_s": round(gap_s, 4),
        "num_spans": len(spans),
        "steps": [[step, round(at, 4), round(took, 4)] for step, at, took in steps],
        "events": [_event(e, start_s) for e in events if _is_time(e.get("time"))],
        "lanes": [_lane(lane, of, names, start_s) for lane, of in blocks.items()],
        "names": [[name, category(name)] for name in names],
    }


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _event(event: Mapping[str, Any], start_s: float) -> dict[str, Any]:
    told = {name: value for name, value in event.items() if name != "time"}
    return {"at": round(float(event["time"]) - start_s, 3), **told}


def _steps(spans: Iterable[Span], start_s: float) -> Iterable[tuple[int, float, float]]:
    for span in spans:
        if span.role == "controller" and (found := _STEP.fullmatch(span.name)):
            yield int(found[1]), span.start_s - start_s, span.duration_s


_ROLES = ("controller", "trainer", "generator", "reward")


def _lanes(spans: Iterable[Span]) -> dict[tuple[str, int], list[Span]]:
    """By role and rank, in the order in which people think of them; each by time."""
    lanes: dict[tuple[str, int], list[Span]] = defaultdict(list)
    for span in spans:
        lanes[span.role, span.rank].append(span)

    def place(lane: tuple[str, int]) -> tuple[int, str, int]:
        role, rank = lane
        first = [i for i, name in enumerate(_ROLES) if role.startswith(name)]
        return (first[0] if first else len(_ROLES), role, rank)

    return {
        lane: sorted(lanes[lane], key=attrgetter("start_s", "end_s")) for lane in sorted(lanes, key=place)
    }


def _crowded(spans: Iterable[Span]) -> set[str]:
    """Names of which more than `_MOST_BESIDE` are under way at once, as the requests of an engine."""
    found = set()
    ends: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        if span.name not in found:
            under_way = ends[span.name]
            while under_way and under_way[0] <= span.start_s:
                heapq.heappop(under_way)
            heapq.heappush(under_way, span.end_s)
            if len(under_way) > _MOST_BESIDE:
                found.add(span.name)
    return found


def _blocks(spans: Iterable[Span], *, gap_s: float, until_s: float, crowded: Collection[str]) -> list[_Block]:
    """Of one lane, by time. Joined to the one of its name before it is what is crowded and overlaps it, and,
    until a time, what follows within the gap where both are shorter. An error always stands alone."""
    done: list[_Block] = []
    open_of: dict[str, _Block] = {}
    for span in spans:
        last = open_of.get(span.name)
        if span.error is not None:
            done.append(_block(span))
        elif last is not None and (
            (span.name in crowded and span.start_s <= last.end_s)
            or (span.end_s <= until_s and _is_one(last, span, gap_s))
        ):
            last.end_s = max(last.end_s, span.end_s)
            last.busy_s += span.duration_s
            last.num += 1
            last.version = span.version if span.version is not None else last.version
        else:
            done.append(_block(span))
            open_of[span.name] = done[-1]
    return done


def _is_one(last: _Block, span: Span, gap_s: float) -> bool:
    """Whether nobody could tell them apart, where the gap is what a screen shows."""
    is_small = span.duration_s < gap_s and (last.num > 1 or last.end_s - last.start_s < gap_s)
    return is_small and span.start_s - last.end_s <= gap_s


def _block(span: Span) -> _Block:
    return _Block(
        name=span.name,
        start_s=span.start_s,
        end_s=span.end_s,
        version=span.version,
        error=span.error,
        busy_s=span.duration_s,
    )


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
    """The first row that is free; what is inside another is below it, as in a flame graph."""
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
