"""The generator: endpoints over the vLLM engine, one actor a tensor-parallel rank.

Extend it by subclassing: a subclass with its own `Config(VLLMGenerator.Config)` is what a run
spawns when its root config holds one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from monarch.actor import Actor, concurrent_endpoint, current_rank, endpoint
from torch import Tensor

from actors.measured import Measured
from actors.vllm.engine import ENVIRONMENT, GeneratorEngine
from actors.vllm.errors import GeneratorError
from rl.config.configurable import Configurable
from rl.distributed.process_group import World
from rl.distributed.threads import use_threads
from rl.models.spec import ModelSpec
from rl.observability.activity import doing, during
from rl.types import Completion, PullResult, SamplingParams
from rl.weights.store import Transfer, WeightStore

T = TypeVar("T")


class VLLMGenerator(Measured, Actor, Configurable):
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
        self._pulling: set[asyncio.Task[Transfer]] = set()

    @property
    def policy_version(self) -> int | None:
        """Of the weights that are served; None where there are none."""
        return None if self.engine is None else self.engine.policy_version

    @endpoint
    @during("setup")
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
    @during("generate")
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
    @during("abort")
    async def abort(self, call_ids: Sequence[str] | None = None) -> int:
        """End the completions of these calls, of all when None, as they are: their `generate` returns.

        How many there were, from rank 0; elsewhere 0.
        """
        return await self._running().abort(call_ids)

    @concurrent_endpoint
    @during("compute_logprobs")
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
        pull = partial(self._pull, version)
        with doing("pull", version=version):
            received = await self._running().update_weights(pull, version=version)
        return PullResult(policy_version=version, time_s=time.perf_counter() - started, sums=received.sums)

    @concurrent_endpoint
    @during("use_store")
    async def use_store(self, store: WeightStore) -> None:
        """Pull from this store from now on: the one before is lost, and a pull from it fails."""
        before, self.store = self.store, store
        for pull in (pulling := list(self._pulling)):
            pull.cancel()
        if pulling:
            await asyncio.wait(pulling)
        before.forget()

    @concurrent_endpoint
    @during("sleep")
    async def sleep(self) -> None:
        """Give back the memory of weights and cache until `wake`, after running requests have ended."""
        await self._running().sleep()

    @concurrent_endpoint
    @during("wake")
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

    async def _pull(self, version: int, state_dict: dict[str, Tensor]) -> Transfer:
        pulling = asyncio.ensure_future(self.store.pull(version=version, state_dict=state_dict))
        self._pulling.add(pulling)
        try:
            await asyncio.wait({pulling})
            if pulling.cancelled():
                raise GeneratorError(f"the weight store was lost while version {version} was being pulled")
            return pulling.result()
        finally:
            pulling.cancel()
            await asyncio.wait({pulling})
            self._pulling.discard(pulling)

    @endpoint
    @during("close")
    async def close(self) -> None:
        """End the engine; calls that wait fail. Idempotent."""
        if self.engine is not None:
            await self.engine.close()

    async def __cleanup__(self, exc: Exception | None) -> None:
        if self.engine is not None:
            await self.engine.close()

    async def _where_it_computes(self, function: Callable[[], T]) -> T:
        return await self._running().aside(function)

    def _running(self) -> GeneratorEngine:
        if self.engine is None:
            raise RuntimeError("the generator is not set up: call setup first")
        return self.engine


def generator_env(config: VLLMGenerator.Config) -> dict[str, str]:
    """Environment of the generator's processes; vllm reads it when it is imported."""
    # vLLM takes as many threads as this says, and one where it says nothing.
    return ENVIRONMENT | {"OMP_NUM_THREADS": str(config.num_threads)}
