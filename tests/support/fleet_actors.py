"""The actors of a run that also tell with how many threads they compute, and what a rubric sees."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from monarch.actor import ProcMesh, endpoint

from actors.generator import VLLMGenerator
from actors.trainer import PolicyTrainer
from rl.rollouts.rubric import Criterion, Rubric
from rl.types import Rollout
from rl.weights.store import WeightStore
from rl.weights.volumes import BatchVolume, RankStrategy


class AskedTrainer(PolicyTrainer):
    @dataclass(kw_only=True, slots=True)
    class Config(PolicyTrainer.Config):
        pass

    @endpoint
    async def num_compute_threads(self) -> int:
        return torch.get_num_threads()


class AskedGenerator(VLLMGenerator):
    @dataclass(kw_only=True, slots=True)
    class Config(VLLMGenerator.Config):
        pass

    @endpoint
    async def num_compute_threads(self) -> int:
        return torch.get_num_threads()


class AskedVolume(BatchVolume):
    @endpoint
    async def num_compute_threads(self) -> int:
        return torch.get_num_threads()


class AskedStore(WeightStore):
    """With one more volume in each process, to be asked."""

    @dataclass(kw_only=True, slots=True)
    class Config(WeightStore.Config):
        pass

    asked: Any = None

    async def start(self, mesh: ProcMesh) -> None:
        await super().start(mesh)
        self.asked = mesh.spawn("asked_volume", AskedVolume, RankStrategy.get_volume_id)


def rubric() -> Rubric:
    """The sample's number, weighing 1, and the process that scored, weighing 0."""
    criteria = (
        Criterion(name="sample", function=_sample),
        Criterion(name="process", function=_process, weight=0.0),
    )
    return Rubric(criteria=criteria, correct=_is_even)


def _sample(rollout: Rollout) -> float:
    return float(rollout.sample)


def _process(rollout: Rollout) -> float:
    return float(os.getpid())


def _is_even(rollout: Rollout) -> bool:
    return rollout.sample % 2 == 0
