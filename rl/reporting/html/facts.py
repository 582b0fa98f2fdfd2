"""A run in a few numbers: what stands at the top of its page, and where the time of its steps went."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from rl.reporting.run_data import RunData

_NOT_OF_STEP = ("step", "push", "pull", "canary", "eval")
"""Times that are none of the parts whose sum is the step."""
_IDLE = "_idle"
LIMITS = ("decode", "train", "sync", "idle")


def facts(run: RunData, *, is_alive: bool | None) -> dict[str, Any]:
    """Numbers of the whole run; what is not known is missing or None.

    Args:
        is_alive: whether its controller is; None where that cannot be told.
    """
    values = run.config.get("values") or {}
    last = run.steps[-1] if run.steps else {}
    return {
        "description": values.get("description"),
        "config": ".".join(str(run.config[key]) for key in ("module", "config") if key in run.config),
        "model": values.get("model"),
        "state": state(run, is_alive=is_alive),
        "started": _time_of(run.events[:1]),
        "last_event": _time_of(run.events[-1:]),
        "step": last.get("step"),
        "num_steps": run.setting("loop.num_steps"),
        "policy_version": last.get("policy_version"),
        "reward": _first_and_last(run.steps, "reward/mean"),
        "evaluation": _first_and_last(run.evaluations, "eval/correct"),
        "num_problems": _last(run.evaluations, "eval/num_problems"),
        "step_s": _median(run.steps, "time/step_s"),
        "training_s": sum(_finite(run.steps, "time/step_s")),
        "samples_per_s": _median(run.steps, "perf/samples_per_s"),
        "generated_tokens_per_s": _median(run.steps, "perf/generated_tokens_per_s"),
        "trained_tokens_per_s": _median(run.steps, "perf/trained_tokens_per_s"),
        "completion_tokens": _last(run.steps, "completion/tokens_mean"),
        "logprob_diff_max": max(_finite(run.steps, "logprob_diff/max"), default=None),
        "num_lost": sum(event.get("event") == "lost" for event in run.events),
        "num_recovered": sum(event.get("event") == "recovered" for event in run.events),
        "num_went_back": len(run.went_back),
    }


def state(run: RunData, *, is_alive: bool | None) -> str:
    """running, finished, stopped (in order), ended (without a word), or unknown."""
    if run.status == "finished":
        return "finished"
    if run.events and run.events[-1].get("event") == "stopped":
        return "stopped"
    if is_alive is False:
        return "ended"
    return "unknown" if run.status is None else "running"


def breakdown(run: RunData) -> dict[str, Any]:
    """Where the time of a step went, and how much of the machine was used.

    `parts`: mean seconds of what the loop waited for, which together are the step, largest first; `beside`:
    of what happened beside it; `idle`: by role, the share of the steps in which it did nothing; `limits`:
    mean shares of the machine's measured limits. Empty where a run does not tell.
    """
    times = _means(run.steps, "time/", "_s")
    evaluation = _means(run.evaluations, "time/", "_s")
    step_s = times.get("step", math.nan)
    parts = {n: s for n, s in times.items() if n not in _NOT_OF_STEP and not n.endswith(_IDLE)}
    idle = {n.removesuffix(_IDLE): s / step_s for n, s in times.items() if n.endswith(_IDLE) and step_s > 0}
    limits = _means(run.steps, "limit/", "")
    return {
        "step_s": None if math.isnan(step_s) else step_s,
        "parts": dict(sorted(parts.items(), key=lambda part: -part[1])),
        "beside": {n: s for n, s in (times | evaluation).items() if n in _NOT_OF_STEP and n != "step"},
        "idle": {role: min(1.0, share) for role, share in idle.items()},
        "limits": {name: limits[name] for name in LIMITS if name in limits},
    }


def _means(records: Sequence[Mapping[str, float]], prefix: str, suffix: str) -> dict[str, float]:
    names = dict.fromkeys(
        name for r in records for name in r if name.startswith(prefix) and name.endswith(suffix)
    )
    found = {name: _finite(records, name) for name in names}
    inner = slice(len(prefix), -len(suffix) or None)
    return {name[inner]: sum(of) / len(of) for name, of in found.items() if of}


def _finite(records: Iterable[Mapping[str, float]], name: str) -> list[float]:
    return [record[name] for record in records if name in record and math.isfinite(record[name])]


def _median(records: Iterable[Mapping[str, float]], name: str) -> float | None:
    values = _finite(records, name)
    return median(values) if values else None


def _last(records: Sequence[Mapping[str, float]], name: str) -> float | None:
    return next(reversed(_finite(records, name)), None)


def _first_and_last(records: Sequence[Mapping[str, float]], name: str) -> list[float] | None:
    values = _finite(records, name)
    return [values[0], values[-1]] if values else None


def _time_of(events: Sequence[Mapping[str, Any]]) -> float | None:
    return next((float(e["time"]) for e in events if isinstance(e.get("time"), int | float)), None)
