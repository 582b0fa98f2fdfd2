"""Reward functions that the processes of a reward actor import."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path

from rl.rollouts.rubric import Criterion, GroupCriterion, Rubric
from rl.types import Rollout


def alone() -> Rubric:
    """Return the sample's number with weight 1, and the scoring process and a random number with
    weight 0.
    """
    criteria = (
        Criterion(name="sample", function=_sample),
        Criterion(name="process", function=_process, weight=0.0),
        Criterion(name="chance", function=_chance, weight=0.0),
    )
    return Rubric(criteria=criteria, correct=_is_even)


def together() -> Rubric:
    """Return `alone` with the number of rollouts that a group function saw."""
    count = GroupCriterion(name="count", function=_count, weight=0.0)
    return Rubric(criteria=(*alone().criteria, count), correct=_is_even)


def _sample(rollout: Rollout) -> float:
    """Return the sample's number; the first call for the reply "hang FOLDER" writes to FOLDER/fifo
    and hangs.
    """
    what, _, folder = rollout.text.partition(" ")
    if what == "hang":
        try:
            os.close(os.open(f"{folder}/began", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            pass  # an earlier call hung, and its process was killed
        else:
            Path(f"{folder}/fifo").write_text("began")
            signal.pause()
    return float(rollout.sample)


def _process(rollout: Rollout) -> float:
    return float(os.getpid())


def _chance(rollout: Rollout) -> float:
    return random.random()


def _count(rollouts: Sequence[Rollout]) -> list[float]:
    return [float(len(rollouts))] * len(rollouts)


def _is_even(rollout: Rollout) -> bool:
    return rollout.sample % 2 == 0
