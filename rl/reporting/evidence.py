"""Findings and their evidence: series of numbers by step, and recorded rollouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

MAX_POINTS = 400
MAX_EXCERPT_CHARACTERS = 240


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Finite values by step."""

    name: str
    """Name of the metric as in metrics.jsonl, or of what else was counted."""
    steps: Sequence[int]
    values: Sequence[float]

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def first_level(self) -> float:
        """Median of the first fifth."""
        return median(self.values[: self._edge])

    @property
    def last_level(self) -> float:
        """Median of the last fifth."""
        return median(self.values[-self._edge :])

    @property
    def _edge(self) -> int:
        return max(1, min(max(3, round(0.2 * len(self))), len(self) // 2))

    def since(self, step: int) -> Series:
        return self._of(i for i, s in enumerate(self.steps) if s >= step)

    def before(self, step: int) -> Series:
        return self._of(i for i, s in enumerate(self.steps) if s < step)

    def thinned(self) -> Series:
        """Return at most `MAX_POINTS`, evenly spaced, with the last point."""
        every = max(1, -(-len(self) // MAX_POINTS))
        return self._of(range((len(self) - 1) % every, len(self), every))

    def lasting(
        self, is_bad: Callable[[float], bool], *, hold: int = 5, share: float = 0.8
    ) -> int | None:
        """Return the first step from which the values are bad for good, or None."""
        place = first_lasting([is_bad(value) for value in self.values], hold=hold, share=share)
        return None if place is None else self.steps[place]

    def _of(self, places: Iterable[int]) -> Series:
        kept = list(places)
        return Series(
            name=self.name,
            steps=[self.steps[i] for i in kept],
            values=[self.values[i] for i in kept],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutEvidence:
    """Recorded rollout. Step, problem and sample identify its line of rollouts.jsonl."""

    step: int
    problem: str
    sample: int
    text: str
    """Reply, shortened in the middle."""
    note: str = ""


Evidence = Series | RolloutEvidence


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something that looks wrong in a run."""

    kind: str
    """One of `rl.reporting.findings.KINDS`."""
    title: str
    since_step: int
    """First step that shows the problem."""
    sentence: str
    advice: str
    """First thing to look at or change; docs/troubleshooting.md says more."""
    evidence: tuple[Evidence, ...]


def metric(records: Iterable[Mapping[str, float]], name: str) -> Series:
    return series(
        name, {int(r["step"]): r[name] for r in records if math.isfinite(r.get(name, math.nan))}
    )


def series(name: str, value_of_step: Mapping[int, float]) -> Series:
    steps = sorted(value_of_step)
    return Series(name=name, steps=steps, values=[value_of_step[step] for step in steps])


def first_lasting(flags: Sequence[bool], *, hold: int = 3, share: float = 0.8) -> int | None:
    """Return the first place from which a flag lasts, or None.

    The flag must be true at `hold` places in a row, and at the given share of all places up to the
    end.
    """
    num_true = held = 0
    found = None
    for place in range(len(flags) - 1, -1, -1):
        num_true += flags[place]
        held = held + 1 if flags[place] else 0
        if held >= min(hold, len(flags)) and num_true >= share * (len(flags) - place):
            found = place
    return found


def shown(*evidence: Series, rollouts: Iterable[RolloutEvidence] = ()) -> tuple[Evidence, ...]:
    """Return series that are not empty, thinned, and rollouts."""
    return (*(one.thinned() for one in evidence if len(one)), *rollouts)


def rollout_evidence(rollout: dict[str, Any], *, note: str = "") -> RolloutEvidence:
    """Return a line of rollouts.jsonl as evidence."""
    text = reply_of(rollout)
    if len(text) > MAX_EXCERPT_CHARACTERS:
        half = (MAX_EXCERPT_CHARACTERS - 5) // 2
        text = f"{text[:half]} ... {text[-half:]}"
    problem, sample = str(rollout.get("problem", "")), int(rollout.get("sample", 0))
    return RolloutEvidence(
        step=rollout["step"], problem=problem, sample=sample, text=text, note=note
    )


def reply_of(rollout: dict[str, Any]) -> str:
    return "\n".join(str(turn.get("reply", "")) for turn in rollout["turns"])


def reward_of(rollout: dict[str, Any]) -> float | None:
    """Return the reward, or None if scoring failed or the reward is not finite."""
    reward = rollout.get("reward")
    is_number = isinstance(reward, int | float) and math.isfinite(reward)
    return reward if is_number and "failure" not in rollout else None


def evenly(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` items, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
