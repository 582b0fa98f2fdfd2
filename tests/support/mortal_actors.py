"""Actors that kill themselves with SIGKILL at a chosen moment of their work."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from losses.policy import GRPOLoss
from losses.types import LossInputs, LossOutput
from rl.distributed.process_group import World
from rl.rollouts.rubric import Criterion, Rubric
from rl.types import Rollout


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadlyLoss:
    """Loss that kills the rank that computes it; other ranks compute a usual one."""

    rank: int

    def __call__(self, inputs: LossInputs) -> LossOutput:
        if World.from_env().rank == self.rank:
            die()
        return GRPOLoss()(inputs)


def rubric() -> Rubric:
    """Reward a rollout with its sample number; the first call for the reply "hang FOLDER" never returns."""
    return Rubric(criteria=(Criterion(name="sample", function=_sample),), correct=_is_even)


def _sample(rollout: Rollout) -> float:
    """Write to FOLDER/fifo before hanging."""
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


def _is_even(rollout: Rollout) -> bool:
    return rollout.sample % 2 == 0
