"""Trainer actor that only pushes weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from monarch.actor import Actor, endpoint

from losses.cross_entropy import CrossEntropyLoss
from rl.distributed.process_group import World
from rl.models.decoder import find_persistent_buffers
from rl.models.lora import LoRA
from rl.models.spec import ModelSpec
from rl.training.engine import TrainingEngine
from rl.training.optimizer import Optimizer
from rl.types import TrainingSample
from rl.weights.store import Shard, WeightStore
from tests.support.policies import random_model


class PolicyPusher(Actor):
    """Actor that pushes the random model of a seed, or a model in training with LoRA."""

    def __init__(self, spec: ModelSpec, store: WeightStore) -> None:
        self._spec = spec
        self._store = store

    @endpoint
    async def push(self, version: int, seed: int) -> Shard:
        model = random_model(self._spec, seed=seed)
        buffers = find_persistent_buffers(model)
        weights = dict(model.named_parameters()) | buffers
        return await self._store.push(
            version=version, state_dict=weights, buffer_names=buffers.keys()
        )

    @endpoint
    async def push_adapted(self, version: int, samples: list[TrainingSample]) -> Shard:
        """Push a random model after a few large steps of its adapters."""
        spec = replace(self._spec, model=replace(self._spec.model, init_std=0.2))
        config = TrainingEngine.Config(
            optimizer=Optimizer.Config(lr=3e-2), converters=(LoRA.Config(rank=4),)
        )
        self._engine: TrainingEngine = config.build(
            model_spec=spec, hf_assets_path=None, device="cpu", world=World()
        )
        for _ in range(3):
            self._engine.forward_backward(samples, loss=CrossEntropyLoss())
            self._engine.optim_step()
        weights, buffers = self._engine.model_state_dict(), self._engine.buffer_names()
        return await self._store.push(version=version, state_dict=weights, buffer_names=buffers)

    @endpoint
    async def logprobs(self, samples: list[TrainingSample]) -> list[np.ndarray]:
        """Return logprobs of the model that `push_adapted` trained, with unmerged adapters."""
        return self._engine.compute_logprobs(samples)
