"""A trainer of which only the weights matter."""

from __future__ import annotations

from monarch.actor import Actor, endpoint

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
        weights = dict(random_model(self._spec, seed=seed).named_parameters())
        await self._store.push(version=version, state_dict=weights)
