"""Parts of a report that are shown at once: facts, curves, the config's differences, findings."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rl.config.json import walk_leaves
from rl.observability.machine import compute_typical_step
from rl.observability.run_folder import DEFAULTS
from rl.reporting.data import RunData
from rl.reporting.evidence import Finding, RolloutEvidence
from rl.reporting.html.rollouts import shorten

_OUTSIDE_STEP = ("step", "push", "pull", "parity", "eval")
"""Times that do not add up to the step."""
_IDLE = "_idle"
LIMITS = ("decode", "train", "sync", "idle")
MAX_POINTS = 1000
MAX_BAD_STEPS = 100
"""Listed steps of a curve whose value is not finite."""
_DIGITS = 6

Records = Sequence[Mapping[str, float]]


# Facts


def collect_facts(run: RunData, *, is_alive: bool | None) -> dict[str, Any]:
    """Return the numbers at the top of a run's page; unknown ones are None.

    Args:
        is_alive: whether the run's controller is alive, if known.
    """
    values = run.config.get("values") or {}
    last = run.steps[-1] if run.steps else {}
    usual = compute_typical_step(run.steps)
    names = [event["event"] for event in run.events]
    num_problems = _select_finite(run.evaluations, "eval/num_problems")
    # A resumed process goes back to its checkpoint too, without a loss.
    num_went_back = 0
    for before, name in pairwise(names):
        num_went_back += name == "went_back" and before != "resumed"
    return {
        "description": values.get("description"),
        "config": ".".join(
            str(run.config[key]) for key in ("module", "config") if key in run.config
        ),
        "model": values.get("model"),
        "state": describe_state(run, is_alive=is_alive),
        "started": run.events[0]["time"] if run.events else None,
        "step": last.get("step"),
        "num_recorded": len(run.steps),
        "num_steps": run.get_setting("loop.num_steps"),
        "reward": _find_ends(run.steps, "reward/mean"),
        "evaluation": _find_ends(run.evaluations, "eval/correct"),
        "num_problems": num_problems[-1] if num_problems else None,
        "step_s": usual.get("time/step_s"),
        "training_s": sum(_select_finite(run.steps, "time/step_s")),
        "samples_per_s": usual.get("perf/samples_per_s"),
        "generated_tokens_per_s": usual.get("perf/generated_tokens_per_s"),
        "trained_tokens_per_s": usual.get("perf/trained_tokens_per_s"),
        "logprob_diff_max": max(_select_finite(run.steps, "logprob_diff/max"), default=None),
        "num_lost": names.count("lost"),
        "num_recovered": names.count("recovered"),
        "num_went_back": num_went_back,
    }


def describe_state(run: RunData, *, is_alive: bool | None) -> str:
    """Return running, finished, stopped (with an event), ended (without one), or unknown."""
    # The status file says "running" also of a run that was killed.
    if run.status == "finished":
        return "finished"
    if run.events and run.events[-1].get("event") == "stopped":
        return "stopped"
    if is_alive is False:
        return "ended"
    return "unknown" if run.status is None else "running"


def break_down(run: RunData) -> dict[str, Any]:
    """Return the time of a step by parts, and the use of the machine.

    `parts` are mean seconds that the loop waited, which add up to the step, largest first; `beside`
    are those of overlapping work; `idle` is the idle share of the steps by role; `limits` are mean
    shares of the machine's measured limits.
    """
    times = _average(run.steps, "time/", "_s")
    evaluation = _average(run.evaluations, "time/", "_s")
    step_s = times.get("step", math.nan)
    parts, idle, beside = {}, {}, {}
    for name, seconds in times.items():
        if name.endswith(_IDLE):
            if step_s > 0:
                idle[name.removesuffix(_IDLE)] = min(1.0, seconds / step_s)
        elif name not in _OUTSIDE_STEP:
            parts[name] = seconds
    for name, seconds in (times | evaluation).items():
        if name in _OUTSIDE_STEP and name != "step":
            beside[name] = seconds
    limits = _average(run.steps, "limit/", "")
    return {
        "step_s": None if math.isnan(step_s) else step_s,
        "parts": dict(sorted(parts.items(), key=lambda part: -part[1])),
        "beside": beside,
        "idle": idle,
        "limits": {name: limits[name] for name in LIMITS if name in limits},
    }


def _average(records: Records, prefix: str, suffix: str) -> dict[str, float]:
    """Return the means of the metrics with this prefix and suffix, by what is between them."""
    names: dict[str, None] = {}  # a set in the order of the records
    for record in records:
        for name in record:
            if name.startswith(prefix) and name.endswith(suffix):
                names[name] = None
    means = {}
    for name in names:
        values = _select_finite(records, name)
        if values:
            means[name[len(prefix) : -len(suffix) or None]] = sum(values) / len(values)
    return means


def _select_finite(records: Iterable[Mapping[str, float]], name: str) -> list[float]:
    return [record[name] for record in records if name in record and math.isfinite(record[name])]


def _find_ends(records: Records, name: str) -> list[float] | None:
    """Return the first and the last value, a single one where there are no others, or None."""
    values = _select_finite(records, name)
    if len(values) > 1:
        return [values[0], values[-1]]
    return values or None


# Curves


def pack_curves(*sources: Records, max_points: int = MAX_POINTS) -> dict[str, Any]:
    """Return every metric of the records as a curve over `step`.

        {
            "xs": [[1, 2]],
            "series": {"reward/mean": {"x": 0, "y": [0.1, null], "bad": [2], "num_bad": 1}},
        }

    `x` is an index into `xs`, which curves share. In a curve with more than `max_points` steps,
    neighbours are merged: x is the middle step, y the mean, `low` and `high` the smallest and
    largest value. `bad` are the first steps whose value is not finite.

    Args:
        sources: records of steps and of evaluations; a metric is taken from the first source that
            has it.
    """
    columns: dict[str, tuple[list[float], list[float]]] = {}
    for records in sources:
        columns_of_source: dict[str, tuple[list[float], list[float]]] = {}
        for record in records:
            for name, value in record.items():
                if name != "step" and name not in columns:
                    steps, values = columns_of_source.setdefault(name, ([], []))
                    steps.append(record["step"])
                    values.append(value)
        columns |= columns_of_source

    # Most metrics have the same steps, which are half of what a page would hold.
    xs: dict[tuple[float, ...], int] = {}
    series = {}
    for name, (steps, values) in columns.items():
        x, curve = _pack_curve(np.asarray(steps), np.asarray(values, float), max_points=max_points)
        series[name] = {"x": xs.setdefault(tuple(x), len(xs)), **curve}
    return {"xs": [list(x) for x in xs], "series": series}


def _pack_curve(
    steps_N: np.ndarray, values_N: np.ndarray, *, max_points: int
) -> tuple[list[float], dict[str, Any]]:
    finite_N = np.isfinite(values_N)
    bad = steps_N[~finite_N].tolist()
    listed = {"bad": bad[:MAX_BAD_STEPS], "num_bad": len(bad)} if bad else {}
    if len(steps_N) <= max_points:
        return steps_N.tolist(), {"y": [shorten(v, _DIGITS) for v in values_N], **listed}

    # Neighbours are merged with their extremes: a spike of one step stays visible.
    width = math.ceil(len(steps_N) / max_points)
    x: list[float] = []
    columns: dict[str, list[float | None]] = {"y": [], "low": [], "high": []}
    for start in range(0, len(steps_N), width):
        part, is_finite = slice(start, start + width), finite_N[start : start + width]
        values = values_N[part][is_finite]
        x.append(steps_N[part][(len(is_finite) - 1) // 2].item())
        for name, merge in (("y", np.mean), ("low", np.min), ("high", np.max)):
            columns[name].append(shorten(merge(values), _DIGITS) if len(values) else None)
    return x, {**columns, **listed}


# Config


def list_config(
    config: Mapping[str, Any], *, defaults: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], str | None]:
    """Return the options of a config.json, and a sentence if their defaults are unknown.

    A row has `path`, `value` and, where it differs, `default`, as JSON texts. The config function
    is not called, since that would run code which the folder names.
    """
    # An empty config would be a leaf itself.
    given = config.get("values")
    values = dict(walk_leaves(given)) if given else {}
    base = dict(walk_leaves(defaults))
    rows = []
    for path, value in values.items():
        row = {"path": path, "value": json.dumps(value)}
        if defaults:
            default = json.dumps(base[path]) if path in base else "absent"
            if default != row["value"]:
                row["default"] = default
        rows.append(row)
    if not rows or defaults:
        return rows, None
    return rows, (
        f"what differs from {config.get('module')}.{config.get('config')} is unknown: the folder "
        f"has no {DEFAULTS}, as the run was made by a script or an older version"
    )


def compare_configs(configs: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the options whose values differ between runs; None stands for a missing option."""
    values_of_runs = [{row["path"]: row["value"] for row in rows} for rows in configs]
    paths: dict[str, None] = {}  # a set in the order of the configs
    for values in values_of_runs:
        paths |= dict.fromkeys(values)
    differences = []
    for path in paths:
        row = [values.get(path) for values in values_of_runs]
        if len(set(row)) > 1:
            differences.append({"path": path, "values": row})
    return differences


# Findings


def find_evidence_lines(
    findings: Iterable[Finding], lines: Sequence[Mapping[str, Any]]
) -> frozenset[int]:
    """Return the numbers of the recorded rollouts that are evidence of a finding."""
    rollouts = set()
    for finding in findings:
        for evidence in finding.evidence:
            if isinstance(evidence, RolloutEvidence):
                rollouts.add((evidence.step, evidence.problem, evidence.sample))
    if not rollouts:
        return frozenset()
    numbers = []
    for number, line in enumerate(lines):
        if (line.get("step"), line.get("problem"), line.get("sample")) in rollouts:
            numbers.append(number)
    return frozenset(numbers)
