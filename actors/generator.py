"""The generator: endpoints over the vLLM engine, one actor a tensor-parallel rank.

Extend it by subclassing: a subclass with its own `Config(VLLMGenerator.Config)` is what a run
spawns when its root config holds one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from monarch.actor import Actor, concurrent_endpoint, endpoint
from torch import Tensor

from actors.vllm.engine import ENVIRONMENT, GeneratorEngine
from rl.config.configurable import Configurable
from rl.distributed.process_group import World
from rl.distributed.threads import use_threads
from rl.models.spec import ModelSpec
from rl.types import Completion, PullResult, SamplingParams
from rl.weights.store import WeightStore


class VLLMGenerator(Actor, Configurable):
    """Every endpoint is called on all ranks with the same arguments; rank 0 answers `generate`."""

    @dataclass(kw_only=True, slots=True)
    class Config(GeneratorEngine.Config):
        """The engine's settings."""

    def __init__(self, *, config: Config, model_spec: ModelSpec, store: WeightStore) -> None:
        """`model_spec` says what family the model is of; its sizes come from the served folder."""
        use_threads(1)  # This is not the thread that computes: the engine has its own.
        self.config = config
        self.model_spec = model_spec
        self.store = store
        self.engine: GeneratorEngine | None = None

    @endpoint
    async def setup(self, hf_assets_path: str) -> None:
        """Start the engine on a folder with config.json; under several ranks, as `World.from_env` says."""
        engine = GeneratorEngine(
            config=self.config,
            model_spec=self.model_spec,
            hf_assets_path=hf_assets_path,
            world=World.from_env(),
        )
        await engine.start()
        self.engine = engine

    @concurrent_endpoint
    async def generate(
        self, prompts: Sequence[np.ndarray], sampling: SamplingParams
    ) -> list[list[Completion]]:
        """Completions of each prompt, in order; calls overlap. Ranks other than 0 answer nothing."""
        return await self._running().generate(prompts, sampling=sampling)

    @concurrent_endpoint
    async def pull_model_state_dict(self, version: int) -> PullResult:
        """Take this version's weights from the store, in place, when no request is running.

        The time includes the wait for running requests.
        """
        started = time.perf_counter()

        async def pull(state_dict: dict[str, Tensor]) -> None:
            await self.store.pull(version=version, state_dict=state_dict)

        await self._running().update_weights(pull, version=version)
        return PullResult(policy_version=version, time_s=time.perf_counter() - started)

    @endpoint
    async def close(self) -> None:
        """End the engine; calls that wait fail. Idempotent."""
        if self.engine is not None:
            await self.engine.close()

    async def __cleanup__(self, exc: Exception | None) -> None:
        if self.engine is not None:
            await self.engine.close()

    def _running(self) -> GeneratorEngine:
        if self.engine is None:
            raise RuntimeError("the generator is not set up: call setup first")
        return self.engine


def generator_env(config: VLLMGenerator.Config) -> dict[str, str]:
    """Environment of the generator's processes; vllm reads it when it is imported."""
    # vLLM takes as many threads as this says, and one where it says nothing.
    return ENVIRONMENT | {"OMP_NUM_THREADS": str(config.num_threads)}
