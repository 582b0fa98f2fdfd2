"""How spans of one process are drawn: what nests in time nested, what overlaps side by side."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

from rl.observability.spans import Span

MAIN = "main"
"""Name of the lanes of all that does not overlap with itself."""


def lanes_of(spans: Sequence[Span]) -> Iterator[tuple[str, list[list[Span]]]]:
    """Lanes in which spans nest or follow each other, of the process and then of each name that overlaps with
    itself."""
    ordered = sorted(spans, key=lambda span: (span.start_s, -span.end_s))
    overlapping = _overlapping_names(ordered)
    yield MAIN, _nested([span for span in ordered if span.name not in overlapping])
    for name in sorted(overlapping):
        yield name, _side_by_side([span for span in ordered if span.name == name])


def _overlapping_names(ordered: Sequence[Span]) -> set[str]:
    ends: dict[str, float] = {}
    found = set()
    for span in ordered:
        if span.start_s < ends.get(span.name, -math.inf):
            found.add(span.name)
        ends[span.name] = max(span.end_s, ends.get(span.name, -math.inf))
    return found


def _nested(ordered: Sequence[Span]) -> list[list[Span]]:
    """Each in the first lane where it lies within what goes on there, or nothing does."""
    lanes: list[list[Span]] = []
    open_in: list[list[float]] = []
    """Ends of what goes on in each lane, the innermost last."""
    for span in ordered:
        for ends in open_in:
            while ends and ends[-1] <= span.start_s:
                ends.pop()
        room = (i for i, ends in enumerate(open_in) if not ends or ends[-1] >= span.end_s)
        number = next(room, len(lanes))
        if number == len(lanes):
            lanes.append([])
            open_in.append([])
        lanes[number].append(span)
        open_in[number].append(span.end_s)
    return lanes


def _side_by_side(ordered: Sequence[Span]) -> list[list[Span]]:
    """As few lanes as there are at once."""
    lanes: list[list[Span]] = []
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    for span in ordered:
        while busy and busy[0][0] <= span.start_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            free.append(len(lanes))
            lanes.append([])
        number = heapq.heappop(free)
        lanes[number].append(span)
        heapq.heappush(busy, (span.end_s, number))
    return lanes
