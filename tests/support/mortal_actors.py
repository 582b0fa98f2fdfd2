"""A run's actors that die at a chosen moment of their work, by SIGKILL from inside."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from monarch.actor import endpoint
from torch import Tensor

from actors.trainer import PolicyTrainer
from losses.grpo import GRPOLoss
from losses.types import LossInputs, LossOutput
from rl.distributed.process_group import World
from rl.rollouts.rubric import Criterion, Rubric
from rl.types import Rollout
from rl.weights.store import Transfer, WeightStore

Moment = Literal["pull", "push", "hang"]
"""Where it dies, or hangs: in a pull."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class MortalStore(WeightStore):
    """Its next pull or push, where that is its moment, is the end of the process that makes it."""

    @dataclass(kw_only=True, slots=True)
    class Config(WeightStore.Config):
        pass

    moment: Moment | None = None
    rank: int | None = None
    """The only one that dies; None: every one."""

    def deadly(self, moment: Moment, *, rank: int | None = None) -> MortalStore:
        """The same store, in the hands of somebody who dies."""
        store = copy.copy(self)
        store.moment, store.rank, store._local = moment, rank, None
        return store

    async def pull(self, *, version: int, state_dict: Mapping[str, Tensor]) -> Transfer:
        if self.moment == "hang":
            await asyncio.Event().wait()
        self._die_if("pull")
        return await super().pull(version=version, state_dict=state_dict)

    async def push(
        self, *, version: int, state_dict: Mapping[str, Tensor], buffer_names: Collection[str] = ()
    ) -> Transfer:
        self._die_if("push")
        return await super().push(version=version, state_dict=state_dict, buffer_names=buffer_names)

    def _die_if(self, moment: Moment) -> None:
        if self.moment == moment and self.rank in (None, World.from_env().rank):
            die()


class MortalTrainer(PolicyTrainer):
    @dataclass(kw_only=True, slots=True)
    class Config(PolicyTrainer.Config):
        pass

    @endpoint
    async def have_store(self, store: WeightStore) -> None:
        self.store = store


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadlyLoss:
    """The rank that computes it dies in it; the others compute a usual one."""

    rank: int

    def __call__(self, inputs: LossInputs) -> LossOutput:
        if World.from_env().rank == self.rank:
            die()
        return GRPOLoss()(inputs)


def rubric() -> Rubric:
    """The reward is the sample's number; the first who scores the reply "hang FOLDER" never ends."""
    return Rubric(criteria=(Criterion(name="sample", function=_sample),), correct=_is_even)


def _sample(rollout: Rollout) -> float:
    """Says through FOLDER/fifo that it hangs."""
    what, _, folder = rollout.text.partition(" ")
    if what == "hang":
        try:
            os.close(os.open(f"{folder}/began", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            pass  # somebody did, whose process was killed
        else:
            Path(f"{folder}/fifo").write_text("began")
            signal.pause()
    return float(rollout.sample)


def _is_even(rollout: Rollout) -> bool:
    return rollout.sample % 2 == 0
