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
    """Finite values by step.

    Example:
        >>> rewards = Series(name="reward/mean", steps=[1, 2, 3, 4], values=[0.1, 0.2, 0.8, 0.9])
        >>> rewards.select_from(3).values
        [0.8, 0.9]
    """

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
        # A fifth, but at least three values against noise, and never more than half of them.
        return max(1, min(max(3, round(0.2 * len(self))), len(self) // 2))

    def select_from(self, step: int) -> Series:
        """Return the part from a step on."""
        return self._select(i for i, s in enumerate(self.steps) if s >= step)

    def select_before(self, step: int) -> Series:
        """Return the part before a step."""
        return self._select(i for i, s in enumerate(self.steps) if s < step)

    def thin(self) -> Series:
        """Return at most `MAX_POINTS`, evenly spaced, with the last point."""
        every = max(1, -(-len(self) // MAX_POINTS))
        return self._select(range((len(self) - 1) % every, len(self), every))

    def find_lasting(
        self, is_bad: Callable[[float], bool], *, hold: int = 5, share: float = 0.8
    ) -> int | None:
        """Return the first step from which the values are bad for good, or None."""
        place = find_lasting([is_bad(value) for value in self.values], hold=hold, share=share)
        return None if place is None else self.steps[place]

    def _select(self, places: Iterable[int]) -> Series:
        steps, values = [], []
        for place in places:
            steps.append(self.steps[place])
            values.append(self.values[place])
        return Series(name=self.name, steps=steps, values=values)


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


def read_series(records: Iterable[Mapping[str, float]], name: str) -> Series:
    """Return the finite values of a metric."""
    value_of_step = {}
    for record in records:
        value = record.get(name, math.nan)
        if math.isfinite(value):
            value_of_step[int(record["step"])] = value
    return make_series(name, value_of_step)


def make_series(name: str, value_of_step: Mapping[int, float]) -> Series:
    steps = sorted(value_of_step)
    return Series(name=name, steps=steps, values=[value_of_step[step] for step in steps])


def find_lasting(flags: Sequence[bool], *, hold: int = 3, share: float = 0.8) -> int | None:
    """Return the first place from which a flag lasts, or None.

    The flag must be true at `hold` places in a row, and at the given share of all places up to the
    end.
    """
    num_true = in_a_row = 0
    first = None
    # From the end, so that each place is judged with everything after it in one pass.
    for place in range(len(flags) - 1, -1, -1):
        num_true += flags[place]
        in_a_row = in_a_row + 1 if flags[place] else 0
        if in_a_row >= min(hold, len(flags)) and num_true >= share * (len(flags) - place):
            first = place
    return first


def show(*evidence: Series, rollouts: Iterable[RolloutEvidence] = ()) -> tuple[Evidence, ...]:
    """Return the evidence of a finding: series that are not empty, thinned, and rollouts."""
    series = [one.thin() for one in evidence if len(one)]
    return (*series, *rollouts)


def show_rollout(rollout: dict[str, Any], *, note: str = "") -> RolloutEvidence:
    """Return a line of rollouts.jsonl as evidence."""
    text = get_reply(rollout)
    if len(text) > MAX_EXCERPT_CHARACTERS:
        # Replies begin with the problem and end with the answer: both ends matter.
        half = (MAX_EXCERPT_CHARACTERS - 5) // 2
        text = f"{text[:half]} ... {text[-half:]}"
    problem, sample = str(rollout.get("problem", "")), int(rollout.get("sample", 0))
    return RolloutEvidence(
        step=rollout["step"], problem=problem, sample=sample, text=text, note=note
    )


def get_reply(rollout: dict[str, Any]) -> str:
    """Return the replies of all turns."""
    return "\n".join(str(turn.get("reply", "")) for turn in rollout["turns"])


def get_reward(rollout: dict[str, Any]) -> float | None:
    """Return the reward, or None if scoring failed or the reward is not finite."""
    reward = rollout.get("reward")
    is_number = isinstance(reward, int | float) and math.isfinite(reward)
    return reward if is_number and "failure" not in rollout else None


def select_kind(rollouts: Iterable[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    """Return the recorded rollouts of some kinds, such as `train` and `dropped`."""
    return [rollout for rollout in rollouts if rollout["kind"] in kinds]


def pick_evenly(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` items, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
