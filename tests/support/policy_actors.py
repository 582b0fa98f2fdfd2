"""A trainer of which only the weights matter, and a generator that shows its own."""

from __future__ import annotations

from dataclasses import dataclass

from monarch.actor import Actor, endpoint
from torch import Tensor

from actors.generator import VLLMGenerator
from rl.models.buffers import persistent_buffers
from rl.models.spec import ModelSpec
from rl.weights.store import WeightStore
from tests.support.policies import random_model


class PolicyPusher(Actor):
    """Pushes the random model of a seed."""

    def __init__(self, spec: ModelSpec, store: WeightStore) -> None:
        self._spec = spec
        self._store = store

    @endpoint
    async def push(self, version: int, seed: int) -> None:
        model = random_model(self._spec, seed=seed)
        buffers = persistent_buffers(model)
        weights = dict(model.named_parameters()) | buffers
        await self._store.push(version=version, state_dict=weights, buffer_names=buffers.keys())


class OpenGenerator(VLLMGenerator):
    @dataclass(kw_only=True, slots=True)
    class Config(VLLMGenerator.Config):
        pass

    @endpoint
    async def weight(self, name: str) -> Tensor:
        return self._running().model_state_dict()[name]
