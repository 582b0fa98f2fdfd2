"""Updates in flight, abort, scoring and sleep, as each of two tensor-parallel ranks lives through them.

For `test_vllm_two_ranks.py`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from actors.vllm.engine import GeneratorEngine
from actors.vllm.engine_config import OnUpdate
from rl.distributed.process_group import World
from rl.types import Completion, SamplingParams
from tests.support.policies import config_folder, prompts_of, random_model, small_spec, writer

SPEC = small_spec(tie=False, head_dim=32)
PROMPTS = prompts_of([5, 1, 40, 150, 33, 7, 64])
SAMPLING = SamplingParams(max_tokens=60, num_samples=3, temperature=0.8, seed=1)
SEQUENCES = prompts_of([2, 150, 256], seed=9)
STEP_TIMEOUT_S = 60.0

Completions = list[list[Completion]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lived:
    """By one rank; lists are empty on rank 1."""

    across: Completions
    """Begun under version 1, ended under version 2."""
    scored: list[np.ndarray]
    """Under version 2, while those ran."""
    aborted: Completions
    num_aborted: int
    continued: Completions
    """All under version 2."""


def live(folder: str) -> dict[OnUpdate, Lived]:
    return asyncio.run(_live(folder))


async def _live(folder: str) -> dict[OnUpdate, Lived]:
    """Between the two the engine has slept."""
    world = World.from_env()
    config = GeneratorEngine.Config(
        tensor_parallel_degree=2,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=24,
        max_num_batched_tokens=65,
        cpu_kv_cache_gib=0.05,
        on_update="keep",
        can_sleep=True,
        rank_timeout_s=30,
    )
    assets = config_folder(Path(folder) / str(world.rank), SPEC)
    engine = GeneratorEngine(config=config, model_spec=SPEC, hf_assets_path=assets, world=world)
    await engine.start()
    lived: dict[OnUpdate, Lived] = {"keep": await _in_flight(engine)}
    # Otherwise an engine of its own, which takes 12 s to start.
    engine._core._on_update = "recompute"
    await engine.sleep()
    await engine.wake()
    lived["recompute"] = await _in_flight(engine)
    await asyncio.wait_for(engine.close(), STEP_TIMEOUT_S)
    return lived


async def _in_flight(engine: GeneratorEngine) -> Lived:
    await engine.update_weights(writer(random_model(SPEC, seed=0)), version=1)
    call = asyncio.create_task(engine.generate(PROMPTS, sampling=SAMPLING))
    await engine.generate(PROMPTS[:1], sampling=SamplingParams(max_tokens=20))
    await engine.update_weights(writer(random_model(SPEC, seed=1)), version=2)
    scored = await engine.compute_logprobs(SEQUENCES)
    across = await call

    call = asyncio.create_task(engine.generate(PROMPTS, sampling=SAMPLING, call_id="a"))
    await engine.generate(PROMPTS[:1], sampling=SamplingParams(max_tokens=20))
    num_aborted = await engine.abort(["a"])
    aborted = await call
    continued = await engine.generate(PROMPTS, sampling=SAMPLING, begun=aborted or None)
    return Lived(across=across, scored=scored, aborted=aborted, num_aborted=num_aborted, continued=continued)
