"""The actors of a run that also tell with how many threads they compute, and what a rubric sees."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from monarch.actor import ProcMesh, endpoint
from torch import Tensor

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
    async def num_compute_threads(self) -> tuple[int, int]:
        """Of the engine's thread, and of the actor's."""
        return await self._compute(torch.get_num_threads), torch.get_num_threads()


class AskedGenerator(VLLMGenerator):
    @dataclass(kw_only=True, slots=True)
    class Config(VLLMGenerator.Config):
        pass

    @endpoint
    async def num_compute_threads(self) -> int:
        return torch.get_num_threads()

    @endpoint
    async def misuse_next_pull(self, how: str) -> None:
        """stale: pull the version before; aside: pull into tensors that the engine does not use."""
        self.store = _Misused(self, how)  # type: ignore[assignment]


class _Misused:
    """Takes the store's place for one pull."""

    def __init__(self, generator: VLLMGenerator, how: str) -> None:
        self.generator = generator
        self.store = generator.store
        self.how = how

    async def pull(self, *, version: int, state_dict: Mapping[str, Tensor]) -> Any:
        self.generator.store = self.store
        if self.how == "stale":
            return await self.store.pull(version=version - 1, state_dict=state_dict)
        aside = {name: tensor.clone() for name, tensor in state_dict.items()}
        return await self.store.pull(version=version, state_dict=aside)


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
