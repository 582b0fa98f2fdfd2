"""The bottleneck of a run, and the setting that would move it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.config.json import value_at

NUM_FIRST = 2
"""First steps of a run, which allocate and compile; ignored if there are enough others."""
OVERLAP = 0.2
"""Share of a step that generation and training must each take for an overlap to pay."""
_LARGEST = 1e15
"""Bound on the numbers of a config, which may come from anybody."""
NEAR = 0.5
"""Share of the machine's limit from which on more hardware is the advice."""

Config = Mapping[str, Any]
"""Values of a run's config.json."""
Advice = tuple[str, str]
"""Reason, and the option that would move the bottleneck."""

_PARTS = {
    "generate": ("generation", "limit/decode"),
    "score": ("scoring", None),
    "train": ("training", "limit/train"),
    "publish": ("the sync of the weights", "limit/sync"),
}
"""Parts of a step: name, and metric of the share of the limit. The time is in `time/<part>_s`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bottleneck:
    """Part of a step that takes the most time."""

    sentence: str
    setting: str
    """Command-line option that would move the bottleneck, with a value if one is known."""


def typical(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each metric over the steps of a run, without its first steps."""
    steps = [record for record in records if "time/step_s" in record]
    steps = steps[NUM_FIRST:] if len(steps) > 2 * NUM_FIRST else steps
    names = {name for record in steps for name in record}
    values = {
        name: [r[name] for r in steps if math.isfinite(r.get(name, math.nan))] for name in names
    }
    return {name: statistics.median(of_name) for name, of_name in values.items() if of_name}


def bottleneck(record: Mapping[str, float], config: Config | None = None) -> Bottleneck | None:
    """Return the bottleneck of a step's record, or of `typical`; None if the record has no times.

    Without the run's config the advice may be a setting that the run has.
    """
    config, step_s = config or {}, record.get("time/step_s", 0.0)
    names = {part: f"time/{part}_s" for part in _PARTS}
    shares = {
        part: record[name] / step_s for part, name in names.items() if name in record and step_s > 0
    }
    if not shares:
        return None
    generating = shares.get("generate", 0.0) + shares.get("score", 0.0)
    training = shares.get("train", 0.0) + shares.get("publish", 0.0)
    if _could_overlap(record, config) and min(generating, training) >= OVERLAP:
        idle = record.get("limit/idle")
        told = "" if idle is None else f", and devices are idle for {_percent(idle)} of it"
        found = (
            f"generation ({_percent(generating)} of a step) and training "
            f"({_percent(training)}) take turns{told}"
        )
        because, setting = _overlap(config)
    else:
        part = max(shares, key=lambda name: shares[name])
        name, limit = _PARTS[part]
        reached = record.get(limit) if limit is not None else None
        reaches = (
            ""
            if reached is None
            else f" and reaches {_percent(reached)} of what the machine can do"
        )
        found = f"{name} takes {_percent(shares[part])} of a step{reaches}"
        because, setting = _advice(
            part, record, config, is_near=reached is not None and reached >= NEAR
        )
    return Bottleneck(sentence=f"{found[0].upper()}{found[1:]}: {because}", setting=setting)


def _could_overlap(record: Mapping[str, float], config: Config) -> bool:
    """Return whether generation and training take turns on devices of their own."""
    steps = _number(config, "loop.max_off_policy_steps") or record.get("staleness/max", 0.0)
    return not steps and not value_at(config, "launch.share_gpus")


def _overlap(config: Config) -> Advice:
    """Advise to overlap generation and training. On one CPU each gets half the threads.

    With all threads twice, threads wait for each other: steps of `tiny` took several times as long.
    """
    ahead = "--loop.max_off_policy_steps 1"
    threads = {role: _number(config, f"{role}.num_threads") for role in ("trainer", "generator")}
    halves = "".join(
        f" --{role}.num_threads {num // 2:.0f}" for role, num in threads.items() if num >= 2
    )
    if _on_gpu(config) or not halves:
        return "at the same time, a step would take as long as the longer of the two", ahead
    return "at the same time, each with half its threads, they use the cores better", ahead + halves


def _advice(part: str, record: Mapping[str, float], config: Config, *, is_near: bool) -> Advice:
    """Advise for the largest part of a step; `is_near` is whether the part is near the machine's
    limit.
    """
    if part == "score":
        doubled = _doubled(config, "reward.num_procs")
        return "reward functions are slow; more processes score in parallel", doubled
    if part == "publish":
        if _could_overlap(record, config):
            because = (
                "with generation one step ahead, weights are transferred during the next gradient"
            )
            return because, "--loop.max_off_policy_steps 1"
        return "more threads copy more at once", _doubled(config, "weights.num_threads")
    if part == "train":
        if is_near:
            return "more of it needs more ranks", _doubled(config, "trainer.num_procs")
        if record.get("packing/num_micro_batches", 1.0) > 1:
            because = "fewer, larger micro-batches use the machine better, if they fit into memory"
            return because, _doubled(config, "trainer.training.max_tokens_per_microbatch")
        if _on_gpu(config) and value_at(config, "trainer.compile.enable") is False:
            return "compiled blocks do more in fewer kernels", "--trainer.compile.enable True"
        because = "its matrix products are small for the machine, and a larger batch uses it better"
        return because, "--loop.groups_per_batch"
    num_replicas = max(1.0, _number(config, "generator.num_replicas"))
    requests = (
        _number(config, "loop.groups_per_batch") * _number(config, "loop.group_size") / num_replicas
    )
    if not is_near and requests > _number(config, "generator.max_num_seqs") > 0:
        because = (
            f"a step has {requests:.0f} completions for each generator, and more at once "
            "cost little more"
        )
        return because, f"--generator.max_num_seqs {math.ceil(requests)}"
    return "more completions at a time need more generators", _doubled(
        config, "generator.num_replicas"
    )


def _doubled(config: Config, path: str) -> str:
    value = _number(config, path)
    return f"--{path} {2 * value:.0f}" if value else f"--{path}"


def _number(config: Config, path: str) -> float:
    value = value_at(config, path)
    return float(value) if isinstance(value, int | float) and abs(value) < _LARGEST else 0.0


def _on_gpu(config: Config) -> bool:
    """Return whether the generator has half precision, which only GPU runs use."""
    return value_at(config, "generator.dtype") in ("bfloat16", "float16")


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share >= 0.01 else f"{100 * share:.1f}%"
