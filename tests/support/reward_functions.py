"""Reward functions that the processes of a reward actor import."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

from rl.rollouts.rubric import Criterion, GroupCriterion, Rubric
from rl.types import Rollout


def alone() -> Rubric:
    """Return the sample's number with weight 1, and the scoring process and a random number with weight 0."""
    criteria = (
        Criterion(name="sample", function=_sample),
        Criterion(name="process", function=_process, weight=0.0),
        Criterion(name="meet", function=_meet, weight=0.0),
        Criterion(name="chance", function=_chance, weight=0.0),
    )
    return Rubric(criteria=criteria, correct=_is_even)


def together() -> Rubric:
    """Return `alone` with the number of rollouts that a group function saw."""
    count = GroupCriterion(name="count", function=_count, weight=0.0)
    return Rubric(criteria=(*alone().criteria, count), correct=_is_even)


def _sample(rollout: Rollout) -> float:
    """Return the sample's number, after the file exists that the reply names, if any."""
    while rollout.text.startswith("/") and not Path(rollout.text).exists():
        time.sleep(0.01)
    return float(rollout.sample)


def _process(rollout: Rollout) -> float:
    return float(os.getpid())


def _chance(rollout: Rollout) -> float:
    return random.random()


_num_met = 0


async def _meet(rollout: Rollout) -> float:
    """For the reply "meet", wait until two such calls are running in this process."""
    global _num_met
    if rollout.text == "meet":
        _num_met += 1
        while _num_met % 2:
            await asyncio.sleep(0.01)
    return 0.0


def _count(rollouts: Sequence[Rollout]) -> list[float]:
    return [float(len(rollouts))] * len(rollouts)


def _is_even(rollout: Rollout) -> bool:
    return rollout.sample % 2 == 0
