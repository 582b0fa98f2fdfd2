"""Reward functions for the processes of a reward actor, which load them from here."""

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
    """The sample's number, weighing 1; the process that scored, and a number by chance, weighing 0."""
    criteria = (
        Criterion(name="sample", function=_sample),
        Criterion(name="process", function=_process, weight=0.0),
        Criterion(name="meet", function=_meet, weight=0.0),
        Criterion(name="chance", function=_chance, weight=0.0),
    )
    return Rubric(criteria=criteria, correct=_is_even)


def together() -> Rubric:
    """Also the number of rollouts that a function of a group saw."""
    count = GroupCriterion(name="count", function=_count, weight=0.0)
    return Rubric(criteria=(*alone().criteria, count), correct=_is_even)


def _sample(rollout: Rollout) -> float:
    """Its number; not before the file is there that the reply names, if it names one."""
    while rollout.text.startswith("/") and not Path(rollout.text).exists():
        time.sleep(0.01)
    return float(rollout.sample)


def _process(rollout: Rollout) -> float:
    return float(os.getpid())


def _chance(rollout: Rollout) -> float:
    return random.random()


_num_met = 0


async def _meet(rollout: Rollout) -> float:
    """Where the reply is "meet", not before two such rollouts are under way in this process."""
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
