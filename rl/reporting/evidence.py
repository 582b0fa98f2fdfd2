"""What a finding is made of: what looks wrong, since when, and the numbers and texts that show it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl.reporting.series import Series

MAX_POINTS = 400
MAX_EXCERPT = 240
"""Characters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricEvidence:
    """A series of numbers."""

    name: str
    """Of the metric, as in metrics.jsonl, or what else was counted."""
    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutEvidence:
    """A recorded rollout: step, problem and sample say which line of rollouts.jsonl it is."""

    step: int
    problem: str
    sample: int
    text: str
    """What the model replied, shortened in the middle where it is long."""
    note: str = ""
    """What to look at."""


Evidence = MetricEvidence | RolloutEvidence


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something that looks wrong."""

    kind: str
    """One of `rl.reporting.findings.KINDS`."""
    title: str
    since_step: int
    """The first step that shows it."""
    sentence: str
    """What was seen, with its numbers."""
    advice: str
    """What to look at or change first; docs/troubleshooting.md says more."""
    evidence: tuple[Evidence, ...]


def metric_evidence(series: Series) -> MetricEvidence:
    """At most `MAX_POINTS` of it, evenly over the run, the last included."""
    every = max(1, -(-len(series.steps) // MAX_POINTS))
    places = [i for i in range(len(series.steps)) if (len(series.steps) - 1 - i) % every == 0]
    return MetricEvidence(
        name=series.name,
        steps=tuple(series.steps[i] for i in places),
        values=tuple(series.values[i] for i in places),
    )


def rollout_evidence(rollout: dict[str, Any], *, note: str = "") -> RolloutEvidence:
    """Of a line of rollouts.jsonl."""
    return RolloutEvidence(
        step=rollout["step"],
        problem=str(rollout.get("problem", "")),
        sample=int(rollout.get("sample", 0)),
        text=excerpt(reply_of(rollout)),
        note=note,
    )


def reply_of(rollout: dict[str, Any]) -> str:
    """All that the model said in it, turn by turn."""
    return "\n".join(str(turn.get("reply", "")) for turn in rollout["turns"])


def reward_of(rollout: dict[str, Any]) -> float | None:
    """Of one that was scored; None of others, and where it is not finite."""
    reward = rollout.get("reward")
    is_number = isinstance(reward, int | float) and math.isfinite(reward)
    return reward if is_number and "failure" not in rollout else None


def excerpt(text: str, *, most: int = MAX_EXCERPT) -> str:
    """The text, or its beginning and end."""
    if len(text) <= most:
        return text
    half = (most - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def evenly(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of them, the first and the last included."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
