"""Generator engines of small models, and one on an event loop that only runs during calls."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.vllm.engine import GeneratorEngine
from rl.distributed.process_group import World
from rl.models.decoder import Decoder
from rl.models.spec import ModelSpec
from rl.training.engine import TrainingEngine
from rl.types import Completion, SamplingParams
from tests.support.policies import config_folder, writer

CALL_TIMEOUT_S = 60
T = TypeVar("T")


class Served:
    """A started engine, and calls of it from tests that are not async."""

    def __init__(self, runner: asyncio.Runner, engine: GeneratorEngine) -> None:
        self._runner = runner
        self.engine = engine
        self._version = 0

    def run(self, awaitable: Awaitable[T]) -> T:
        async def within_the_limit() -> T:
            return await asyncio.wait_for(awaitable, CALL_TIMEOUT_S)

        return self._runner.run(within_the_limit())

    def generate(self, prompts: list[np.ndarray], **sampling: Any) -> list[list[Completion]]:
        return self.run(self.engine.generate(prompts, sampling=SamplingParams(**sampling)))

    def load(self, model: Decoder) -> int:
        """Load the weights and return their version."""
        return self.run(self.update(model))

    async def update(self, model: Decoder) -> int:
        self._version += 1
        await self.engine.update_weights(writer(model), version=self._version)
        return self._version


def make_engine(folder: Path, spec: ModelSpec, **settings: Any) -> GeneratorEngine:
    """Return a float32 engine of this rank that is not started."""
    # vLLM collects garbage five times as it starts, and unfreezes the heap as it ends: without this
    # each engine after the first of a process would start 2.5 s later.
    gc.freeze()
    world = World.from_env()
    path = config_folder(folder / f"assets-{world.rank}", spec)
    defaults: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "cpu_kv_cache_gib": 0.05}
    config = GeneratorEngine.Config(**defaults | settings)
    return GeneratorEngine(config=config, model_spec=spec, hf_assets_path=path, world=world)


def write_factors(trainer: TrainingEngine) -> Callable[[dict[str, Tensor]], Awaitable[None]]:
    """Return an argument for `GeneratorEngine.load_adapter` that copies this trainer's adapter."""

    async def write(tensors: dict[str, Tensor]) -> None:
        source = trainer.policy.adapter_state_dict()
        assert tensors.keys() == source.keys()
        for name, target in tensors.items():
            target.copy_(source[name])

    return write


def begin_steps_ahead(patch: pytest.MonkeyPatch) -> None:
    """Let engines on a CPU begin each step before they take the result of the one before, as on a
    GPU.
    """
    from actors.vllm.compat import make_client

    def make(vllm_config: Any, *, world: World) -> Any:
        # vLLM's config for a CPU has just set this to False.
        vllm_config.scheduler_config.async_scheduling = True
        return make_client(vllm_config, world=world)

    patch.setattr("actors.vllm.core.make_client", make)
    # Copies are made at once, and nothing is to be waited for.
    patch.setattr(torch.cuda, "Event", Mock)
    patch.setattr(torch.cuda, "current_stream", Mock)
    patch.setattr(torch.cuda, "stream", nullcontext)


@contextmanager
def serve_engine(
    folder: Path, spec: ModelSpec, *, ahead: bool = False, **settings: Any
) -> Iterator[Served]:
    """Yield an engine with little room, so that prompts are read in parts and requests wait for
    each other.

    `ahead`: begin steps ahead, as on a GPU.
    """
    engine = make_engine(
        folder, spec, **{"max_num_seqs": 12, "max_num_batched_tokens": 64} | settings
    )
    with asyncio.Runner() as runner, pytest.MonkeyPatch.context() as patch:
        if ahead:
            begin_steps_ahead(patch)
        runner.run(engine.start())
        yield Served(runner, engine)
        runner.run(engine.close())
