"""The generator: endpoints over the vLLM engine, one actor a tensor-parallel rank.

Extend it by subclassing: a subclass with its own `Config(VLLMGenerator.Config)` is what a run
spawns when its root config holds one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from monarch.actor import Actor, concurrent_endpoint, current_rank, endpoint
from torch import Tensor

from actors.vllm.engine import ENVIRONMENT, GeneratorEngine
from rl.config.configurable import Configurable
from rl.distributed.process_group import World
from rl.distributed.threads import use_threads
from rl.models.spec import ModelSpec
from rl.types import Completion, PullResult, SamplingParams
from rl.weights.store import Transfer, WeightStore


class VLLMGenerator(Actor, Configurable):
    """Every endpoint is called on all ranks with the same arguments; rank 0 answers `generate`."""

    @dataclass(kw_only=True, slots=True)
    class Config(GeneratorEngine.Config):
        """The engine's settings, and how many engines there are."""

        num_replicas: int = 1
        """Generators, each with processes, devices and a copy of the weights of its own."""

        def __post_init__(self) -> None:
            GeneratorEngine.Config.__post_init__(self)
            if self.num_replicas < 1:
                raise ValueError(f"generator.num_replicas={self.num_replicas}: must be at least 1")

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
        self,
        prompts: Sequence[np.ndarray],
        sampling: SamplingParams,
        call_id: str = "",
        begun: Sequence[Sequence[Completion]] | None = None,
    ) -> list[list[Completion]]:
        """Completions of each prompt, in order; calls overlap. Ranks other than 0 answer nothing.

        A call that its caller gives up goes on here until `abort` of its `call_id` ends it.
        """
        return await self._running().generate(prompts, sampling=sampling, call_id=call_id, begun=begun)

    @concurrent_endpoint
    async def abort(self, call_ids: Sequence[str] | None = None) -> int:
        """End the completions of these calls, of all when None, as they are: their `generate` returns.

        How many there were, from rank 0; elsewhere 0.
        """
        return await self._running().abort(call_ids)

    @concurrent_endpoint
    async def compute_logprobs(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """[T] float32 nats for each sequence, entry 0 is 0; beside running requests, which go on."""
        return await self._running().compute_logprobs(sequences)

    @concurrent_endpoint
    async def pull_model_state_dict(self, version: int) -> PullResult:
        """Take this version's weights from the store, in place, between two engine steps.

        What becomes of running requests is `on_update`'s choice; under "drain" the time includes the
        wait for them.
        """
        started = time.perf_counter()

        received: list[Transfer] = []

        async def pull(state_dict: dict[str, Tensor]) -> None:
            received.append(await self.store.pull(version=version, state_dict=state_dict))

        await self._running().update_weights(pull, version=version)
        return PullResult(policy_version=version, time_s=time.perf_counter() - started, sums=received[0].sums)

    @concurrent_endpoint
    async def sleep(self) -> None:
        """Give back the memory of weights and cache until `wake`, after running requests have ended."""
        await self._running().sleep()

    @concurrent_endpoint
    async def wake(self) -> None:
        """Take the memory again; a version must be pulled before anything is generated."""
        await self._running().wake()

    @concurrent_endpoint
    async def random_states(self) -> bytes:
        """Of the engine and of this process, for `restore_random_states`."""
        return self._running().random_states()

    @concurrent_endpoint
    async def restore_random_states(self, states: Mapping[int, bytes]) -> None:
        """Set those of this rank, if they are among `states`."""
        if (own := states.get(current_rank().rank)) is not None:
            self._running().restore_random_states(own)

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
