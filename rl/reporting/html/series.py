"""Curves as a page draws them: of long runs the mean, least and largest of so many steps together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MAX_POINTS = 1000
"""A curve has at most so many: more than a screen shows beside each other."""
MAX_BAD_STEPS = 100
"""Steps of a curve that are named because its value is not finite."""
_DIGITS = 6


def curves(*sources: Sequence[Mapping[str, float]], max_points: int = MAX_POINTS) -> dict[str, Any]:
    """Every number of the records by name, over `step`.

        {"xs": [[1, 2]], "series": {"reward/mean": {"x": 0, "y": [0.1, null], "bad": [2], "num_bad": 1}}}

    `x` counts in `xs`, which curves share. Where steps are taken together, x is the middle one, y the mean of
    what is finite, and `low` and `high` the least and the largest. `bad` are the first steps whose value is
    not finite, `num_bad` says how many there are; both are left out where there is none.

    Args:
        sources: records by step, as of steps and of evaluations; a name belongs to the first that has it.
    """
    found: dict[str, tuple[list[float], list[float]]] = {}
    for records in sources:
        of_source: dict[str, tuple[list[float], list[float]]] = {}
        for record in records:
            for name, value in record.items():
                if name != "step" and name not in found:
                    steps, values = of_source.setdefault(name, ([], []))
                    steps.append(record["step"])
                    values.append(value)
        found |= of_source
    xs: dict[tuple[float | None, ...], int] = {}
    series = {}
    for name, (steps, values) in found.items():
        drawn, curve = _curve(np.asarray(steps, float), np.asarray(values, float), max_points=max_points)
        series[name] = {"x": xs.setdefault(tuple(drawn), len(xs)), **curve}
    return {"xs": [list(x) for x in xs], "series": series}


def _curve(
    steps_N: np.ndarray, values_N: np.ndarray, *, max_points: int
) -> tuple[list[float | None], dict[str, Any]]:
    """Its x, and what belongs to it alone."""
    finite_N = np.isfinite(values_N)
    bad = steps_N[~finite_N]
    told = {"bad": [_number(s) for s in bad[:MAX_BAD_STEPS]], "num_bad": len(bad)} if len(bad) else {}
    if len(steps_N) <= max_points:
        return [_number(s) for s in steps_N], {"y": [_number(v) for v in values_N], **told}
    width = math.ceil(len(steps_N) / max_points)
    x: list[float | None] = []
    y: list[float | None] = []
    low: list[float | None] = []
    high: list[float | None] = []
    for start in range(0, len(steps_N), width):
        part, kept = slice(start, start + width), finite_N[start : start + width]
        good = values_N[part][kept]
        x.append(_number(steps_N[part][(len(kept) - 1) // 2]))
        for column, of in ((y, np.mean), (low, np.min), (high, np.max)):
            column.append(_number(of(good)) if len(good) else None)
    return x, {"y": y, "low": low, "high": high, **told}


def _number(value: float) -> float | None:
    """Short, and an integer where it is one; None for what JSON lacks."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{_DIGITS}g}") if abs(value) < 10**_DIGITS else float(value)
    return int(short) if short.is_integer() else short
