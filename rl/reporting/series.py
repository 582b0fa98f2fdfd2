"""Numbers by step, and where they leave what they were: what the rules of the findings share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

USUAL = 200
"""The latest values by which is judged what is usual."""
MAX_SPLITS = 400
"""Places that a knee is looked for at: of longer series the neighbours are taken together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Finite numbers of one name, by step."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]

    def __len__(self) -> int:
        return len(self.steps)

    def since(self, step: int) -> Series:
        """Of this step and later ones."""
        kept = [i for i, s in enumerate(self.steps) if s >= step]
        return self._of(kept)

    def before(self, step: int) -> Series:
        kept = [i for i, s in enumerate(self.steps) if s < step]
        return self._of(kept)

    def _of(self, places: Sequence[int]) -> Series:
        return Series(
            name=self.name,
            steps=[self.steps[i] for i in places],
            values=[self.values[i] for i in places],
        )


def metric(records: Iterable[Mapping[str, float]], name: str) -> Series:
    """Of the records that have it as a finite number."""
    pairs = [(int(r["step"]), r[name]) for r in records if math.isfinite(r.get(name, math.nan))]
    return Series(name=name, steps=[step for step, _ in pairs], values=[value for _, value in pairs])


def edge(num: int, *, share: float = 0.2, least: int = 3) -> int:
    """Steps at the beginning, or the end, of so many whose median is the level there."""
    return max(1, min(max(least, round(share * num)), num // 2 or 1))


def first_level(values: Sequence[float]) -> float:
    """Median of the first fifth."""
    return median(values[: edge(len(values))])


def last_level(values: Sequence[float]) -> float:
    """Median of the last fifth."""
    return median(values[-edge(len(values)) :])


def first_lasting(flags: Sequence[bool], *, hold: int = 3, share: float = 0.8) -> int | None:
    """Where a state begins that lasts: true at `hold` places in a row, and at this share of all places from
    there to the end; None where there is no such place."""
    num_true = 0
    held = 0
    found = None
    for place in range(len(flags) - 1, -1, -1):
        num_true += flags[place]
        held = held + 1 if flags[place] else 0
        if held >= min(hold, len(flags)) and num_true >= share * (len(flags) - place):
            found = place
    return found


def onset(values: Sequence[float], *, times: float, least: float, hold: int = 3) -> int | None:
    """Where values rise to `times` the median of those before them, and to `least`, and stay up.

    From there it is gone back over values that are already beyond what is usual before. None where that
    is nowhere; the first value is never one that rose.
    """
    flags = [False] * len(values)
    before: list[float] = []
    for i, value in enumerate(values):
        flags[i] = bool(before) and value >= max(least, times * median(before[-USUAL:]))
        if not flags[i]:
            before.append(value)
    place = first_lasting(flags, hold=hold)
    if place is None:
        return None
    while place > 1:
        earlier = values[max(0, place - 1 - USUAL) : place - 1]
        center = median(earlier)
        spread = median(abs(value - center) for value in earlier)
        if values[place - 1] <= center + max(4 * spread, 0.05 * abs(center), least / 100):
            break
        place -= 1
    return place


def step_up(values: Sequence[float], *, times: float, width: int = 20, ahead: int = 50) -> int | None:
    """Where noisy values go up to `times` the median of the `width` ones before, and stay there for the next
    `ahead`: their median, and nine tenths of them half of the way. None where that is nowhere."""
    least = 5
    for place in range(least, len(values) - least + 1):
        base = median(values[max(0, place - width) : place])
        after = values[place : place + ahead]
        up = base * (1 + times) / 2
        if median(after) >= times * base and sum(value >= up for value in after) >= 0.9 * len(after):
            return next(i for i in range(place, len(values)) if values[i] >= up)
    return None


def knee(values: Sequence[float]) -> int:
    """Place from which a series that was level goes on in a straight line, by least squares; looked for until
    it has come four fifths of its way, for it may be level again at its end."""
    start, end = first_level(values), last_level(values)
    way = (i for i, value in enumerate(values) if (value - start) * (end - start) >= 0.8 * (end - start) ** 2)
    values = values[: max(4, next(way, len(values)) + 1)]
    width = max(1, -(-len(values) // MAX_SPLITS))
    parts = [values[i : i + width] for i in range(0, len(values), width)]
    means = [sum(part) / len(part) for part in parts]
    errors = [_error_of_knee(means, place) for place in range(len(means))]
    return errors.index(min(errors)) * width


def _error_of_knee(values: Sequence[float], place: int) -> float:
    """Squared error of the best line that is level up to `place` and has any slope after it."""
    xs = [max(0, i - place) for i in range(len(values))]
    mean_x, mean_y = sum(xs) / len(xs), sum(values) / len(values)
    var = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, values, strict=True)) / var if var else 0.0
    return sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in zip(xs, values, strict=True))
