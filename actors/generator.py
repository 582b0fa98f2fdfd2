"""The generator: endpoints over the vLLM engine, one actor for each tensor-parallel rank.

Extend it by subclassing: a run spawns the class whose `Config(VLLMGenerator.Config)` its root
config holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from monarch.actor import Actor, concurrent_endpoint, endpoint
from torch import Tensor

from actors.vllm.config import GeneratorConfig
from actors.vllm.engine import GeneratorEngine
from actors.vllm.environment import ENVIRONMENT
from actors.vllm.requests import Begun, GeneratorError
from rl.config.configurable import Configurable
from rl.config.tree import check_bounds
from rl.distributed.process_group import World
from rl.models.spec import ModelSpec
from rl.observability.machine import MachineLimits, measure_limits
from rl.observability.spans import span
from rl.types import BoxSum, Completion, SamplingParams
from rl.utils.processes import use_threads
from rl.weights.store import Snapshot, WeightStore


class VLLMGenerator(Actor, Configurable):
    """Actor of one generator rank.

    Endpoints are called on all ranks with equal arguments; rank 0 answers.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GeneratorConfig):
        """Settings of the engine, and the number of generators."""

        num_replicas: int = 1
        """Number of generators, each with its own processes, devices and copy of the weights."""

        def __post_init__(self) -> None:
            GeneratorConfig.__post_init__(self)
            check_bounds(self, "num_replicas", at_least=1)

    def __init__(self, *, config: Config, model_spec: ModelSpec, store: WeightStore) -> None:
        use_threads(1)  # The engine computes in another thread.
        self.config = config
        self.model_spec = model_spec
        self.store = store
        self.engine: GeneratorEngine | None = None
        self._pulling: set[asyncio.Task[tuple[BoxSum, ...]]] = set()

    @property
    def policy_version(self) -> int | None:
        """Version of the weights that are served, which spans record; None while there are none."""
        return None if self.engine is None else self.engine.newest_version

    @endpoint
    @span("setup")
    async def setup(self, hf_assets_path: str) -> None:
        """Start the engine on a folder with config.json; `World.from_env` gives the rank."""
        engine = GeneratorEngine(
            config=self.config,
            model_spec=self.model_spec,
            hf_assets_path=hf_assets_path,
            world=World.from_env(),
        )
        await engine.start()
        self.engine = engine

    # Endpoints of `GeneratorEngine`. Calls overlap: a call of `generate` whose caller has gone goes
    # on until `abort` of its `call_id` ends it.

    @concurrent_endpoint
    @span("generate")
    async def generate(
        self,
        prompts: Sequence[np.ndarray],
        *,
        sampling: SamplingParams,
        call_id: str = "",
        begun: Begun | None = None,
        adapter: int | None = None,
    ) -> list[list[Completion]]:
        return await self._require_engine().generate(
            prompts, sampling=sampling, call_id=call_id, begun=begun, adapter=adapter
        )

    @concurrent_endpoint
    @span("abort")
    async def abort(self, call_ids: Sequence[str] | None = None) -> int:
        return await self._require_engine().abort(call_ids)

    @concurrent_endpoint
    @span("compute_logprobs")
    async def compute_logprobs(
        self, sequences: Sequence[np.ndarray], *, adapter: int | None = None
    ) -> list[np.ndarray]:
        return await self._require_engine().compute_logprobs(sequences, adapter=adapter)

    @concurrent_endpoint
    @span("sleep")
    async def sleep(self) -> None:
        await self._require_engine().sleep()

    @concurrent_endpoint
    @span("wake")
    async def wake(self) -> None:
        await self._require_engine().wake()

    @concurrent_endpoint
    async def pull_model_state_dict(
        self, snapshot: Snapshot, *, is_newest: bool = True
    ) -> tuple[BoxSum, ...]:
        """Pull a version's weights in place between two engine steps; return their checksums.

        `WeightStore.pull` writes into the tensors that the engine computes with, and sums what is
        there then. `on_update` decides what happens to running requests. An adapter is pulled while
        the engine computes, and added between two steps; with `is_newest` it serves the new
        requests that name none.
        """
        pull, engine = partial(self._pull, self.store, snapshot), self._require_engine()
        version, adapter = snapshot.version, snapshot.adapter
        with span("pull", version=version):
            if adapter is None:
                return await engine.update_weights(pull, version=version, base_id=snapshot.base_id)
            return await engine.load_adapter(
                pull,
                version=version,
                lora=adapter.lora,
                base_id=adapter.base_id,
                is_newest=is_newest,
            )

    @concurrent_endpoint
    async def get_base_id(self) -> int | None:
        """Return the checksum of the weights, without adapters; None if there are none."""
        return self._require_engine().base_id

    @concurrent_endpoint
    async def give_up_adapters(self, versions: Sequence[int]) -> None:
        """Free adapters as soon as no request uses them."""
        self._require_engine().give_up_adapters(versions)

    @concurrent_endpoint
    @span("use_store")
    async def use_store(self, store: WeightStore) -> None:
        """Use this store from now on; the previous store is lost, and pulls from it fail."""
        before, self.store = self.store, store
        # A pull from dead processes would otherwise end with its deadline only.
        pulling = list(self._pulling)
        for pull in pulling:
            pull.cancel()
        if pulling:
            await asyncio.wait(pulling)
        before.forget()

    @concurrent_endpoint
    @span("measure")
    async def measure_machine(self, dtype: str, num_bytes: int) -> MachineLimits | None:
        """Measure the device of rank 0; other ranks return None, since they may share its cores."""
        world = World.from_env()
        if world.rank:
            return None
        measure = partial(
            measure_limits, dtype=dtype, num_bytes=num_bytes, device=world.default_device()
        )
        return await self._require_engine().run_between_steps(measure)

    async def _pull(
        self, store: WeightStore, snapshot: Snapshot, state_dict: dict[str, Tensor]
    ) -> tuple[BoxSum, ...]:
        """Pull from the store that was used when the call arrived."""
        # The engine may come to this pull after `use_store`: the old store's actors are dead.
        if store is not self.store:
            raise GeneratorError(
                f"the weight store was lost before version {snapshot.version} was pulled"
            )
        pulling = asyncio.create_task(store.pull(snapshot, state_dict=state_dict))
        self._pulling.add(pulling)
        pulling.add_done_callback(self._pulling.discard)
        try:
            return await pulling
        except asyncio.CancelledError as error:
            # `use_store` cancels the pull alone; a cancelled caller has to stop.
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            raise GeneratorError(
                f"the weight store was lost while version {snapshot.version} was pulled"
            ) from error

    @endpoint
    @span("close")
    async def close(self) -> None:
        if self.engine is not None:
            await self.engine.close()

    async def __cleanup__(self, exc: Exception | None) -> None:
        if self.engine is not None:
            await self.engine.close()

    def _require_engine(self) -> GeneratorEngine:
        if self.engine is None:
            raise RuntimeError("the generator is not set up: call setup first")
        return self.engine


def generator_env(config: VLLMGenerator.Config) -> dict[str, str]:
    """Return the environment variables that vllm reads when it is imported."""
    # vLLM runs on OMP_NUM_THREADS threads, or one where it is unset.
    return ENVIRONMENT | {"OMP_NUM_THREADS": str(config.num_threads)}
