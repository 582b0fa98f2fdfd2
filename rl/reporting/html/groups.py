"""Runs that differ only by seed, and their curves as a band.

    group_runs([config_of_a, config_of_b, config_of_c])    # [[0, 2], [1]]

A band has the mean of the runs at each step, and the smallest and the largest value.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rl.config.json import LOCATION, get_value_at, walk_leaves
from rl.reporting.html.overview import MAX_POINTS, Records
from rl.reporting.html.rollouts import shorten

SEED = "seed"
NOT_COMPARED = (*LOCATION, "description", SEED)
"""Options by which the runs of a group may differ."""
DIGITS = 6


def group_runs(configs: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return the numbers of the runs that belong together, in the order of the first of each.

    Args:
        configs: config.json of each run; a run without one stands alone.
    """
    groups: dict[str, list[int]] = {}
    for number, config in enumerate(configs):
        groups.setdefault(_identify(config) or str(number), []).append(number)
    return list(groups.values())


def _identify(config: Mapping[str, Any]) -> str | None:
    """Return a text that is equal for configs of one group; None for an unknown config."""
    values = config.get("values")
    if not isinstance(values, Mapping) or not values:
        return None
    compared = []
    for path, value in walk_leaves(values):
        if path not in NOT_COMPARED:
            compared.append((path, value))
    return json.dumps([config.get("module"), config.get("config"), sorted(compared)], default=str)


def name_group(names: Sequence[str], configs: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of a group in legends.

    Example:
        >>> name_group(["try-seed_0", "try-seed_1"], configs)
        'try (seeds 0, 1)'
    """
    common = _find_common_start(names)
    # Of seed_1 and seed_10 the digit belongs to the seeds.
    if any(name[len(common) : len(common) + 1].isdigit() for name in names):
        common = common.rstrip("0123456789")
    # Names of sweeps end in the seed: try-lr_1e-5-seed_0.
    common = re.sub(r"[-_. ]*(seed)?[-_.= ]*$", "", common) or names[0]
    seeds = [get_value_at(config.get("values") or {}, SEED) for config in configs]
    if len({*map(str, seeds)}) == len(seeds) and all(isinstance(s, int) for s in seeds):
        return f"{common} (seeds {', '.join(map(str, sorted(seeds)))})"
    return f"{common} ({len(names)} runs)"


def _find_common_start(names: Sequence[str]) -> str:
    first, last = min(names), max(names)
    length = 0
    while length < len(first) and first[length] == last[length]:
        length += 1
    return first[:length]


# Bands


def pack_bands(*sources: Sequence[Records], max_points: int = MAX_POINTS) -> dict[str, Any]:
    """Return the bands of every metric, as `rl.reporting.html.overview.pack_curves` packs curves.

    `y` is the mean of the runs at a step, `low` and `high` are their extremes, and `num` is the
    number of runs that have the step, where it is not the same everywhere.

    Args:
        sources: the records of each run: of steps, and of evaluations; a metric is taken from the
            first source that has it.
    """
    columns: dict[str, dict[float, list[float]]] = {}
    for runs in sources:
        of_source: dict[str, dict[float, list[float]]] = {}
        for records in runs:
            _collect(records, of_source, known=columns)
        columns |= of_source

    xs: dict[tuple[float, ...], int] = {}
    series = {}
    for name, values_of in columns.items():
        x, band = _pack_band(values_of, max_points=max_points)
        series[name] = {"x": xs.setdefault(tuple(x), len(xs)), **band}
    return {"xs": [list(x) for x in xs], "series": series}


def _collect(
    records: Records, columns: dict[str, dict[float, list[float]]], *, known: Iterable[str]
) -> None:
    """Add the finite values of one run to the columns: metric, step, values of the runs."""
    for record in records:
        for name, value in record.items():
            if name == "step" or name in known or not math.isfinite(value):
                continue
            columns.setdefault(name, {}).setdefault(record["step"], []).append(value)


def _pack_band(
    values_of: Mapping[float, Sequence[float]], *, max_points: int
) -> tuple[list[float], dict[str, Any]]:
    steps = sorted(values_of)
    width = math.ceil(len(steps) / max_points)
    x: list[float] = []
    columns: dict[str, list[Any]] = {"y": [], "low": [], "high": [], "num": []}
    for start in range(0, len(steps), width):
        part = steps[start : start + width]
        values = [values_of[step] for step in part]
        x.append(part[(len(part) - 1) // 2])
        # A mean of means: where a run has ended, the others keep their weight.
        columns["y"].append(shorten(np.mean([np.mean(v) for v in values]), DIGITS))
        columns["low"].append(shorten(min(map(min, values)), DIGITS))
        columns["high"].append(shorten(max(map(max, values)), DIGITS))
        columns["num"].append(min(map(len, values)))
    if len(set(columns["num"])) == 1:
        del columns["num"]
    return x, columns
