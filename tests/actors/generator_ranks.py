"""Program of each of two tensor-parallel generator ranks, for `test_vllm_two_ranks.py`."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import Tensor
from torch.distributed.tensor import DTensor

from actors.vllm import driver
from actors.vllm.driver import IDLE_TURNS_PER_TIMEOUT
from actors.vllm.engine import GeneratorEngine
from rl.distributed.process_group import World
from rl.types import Completion, SamplingParams
from tests.support.policies import config_folder, prompts_of, random_model, small_spec, writer

SPEC = small_spec(tie=False, head_dim=32)
PROMPTS = prompts_of([5, 1, 40, 150, 33, 7, 64])
SAMPLING = SamplingParams(max_tokens=31, num_samples=3, temperature=0.8, seed=1)
LONG = replace(SAMPLING, max_tokens=60)
SEQUENCES = prompts_of([2, 150, 256], seed=9)
STEP_TIMEOUT_S = 60.0

Completions = list[list[Completion]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lived:
    """Results of one rank; rank 1 has no completions."""

    sharded: list[str]
    """Names of the parameters that are DTensors."""
    first: Completions
    """Completions under version 1."""
    concurrent: list[Completions]
    """Completions of three concurrent calls, with an update to version 2 requested meanwhile."""
    waiting: Completions
    """Completions requested after the update to version 2."""
    one_rank_failed: str
    """Error of an update that fails on rank 1."""
    no_weights: str
    """Error of a call after the failed update."""
    healed: Completions
    """Completions after an update to version 4."""
    across: Completions
    """Completions that begin under version 4 and end under version 5, in mode "recompute"."""
    scored: list[np.ndarray]
    """Logprobs under version 5, computed while completions run."""
    aborted: Completions
    num_aborted: int
    continued: Completions
    """The aborted completions, continued under version 5."""
    threads_left: int


def live(folder: str) -> Lived:
    return asyncio.run(_live(folder))


async def _live(folder: str) -> Lived:
    world = World.from_env()
    config = GeneratorEngine.Config(
        tensor_parallel_degree=2,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=12,
        max_num_batched_tokens=65,
        cpu_kv_cache_gib=0.05,
        rank_timeout_s=30.0,
        can_sleep=True,
    )
    assets = config_folder(Path(folder) / str(world.rank), SPEC)
    engine = GeneratorEngine(config=config, model_spec=SPEC, hf_assets_path=assets, world=world)
    await engine.start()
    old, new = random_model(SPEC, seed=0), random_model(SPEC, seed=1)
    await engine.update_weights(writer(old), version=1)
    first = await engine.generate(PROMPTS, sampling=SAMPLING)

    if world.rank == 0:
        await _idle_turns(engine, IDLE_TURNS_PER_TIMEOUT + 2)

    calls = [asyncio.create_task(engine.generate(PROMPTS[i::3], sampling=SAMPLING)) for i in range(3)]
    await engine.generate(PROMPTS[:1], sampling=SamplingParams(max_tokens=1))
    update = asyncio.create_task(engine.update_weights(writer(new), version=2))
    await asyncio.sleep(0)
    waiting = await engine.generate(PROMPTS[:2], sampling=SAMPLING)
    concurrent = await asyncio.gather(*calls)
    await update

    async def fail_on_rank_1(state_dict: dict[str, Tensor]) -> None:
        if world.rank == 1:
            raise KeyError("version 3")

    failed = await _error_of(engine.update_weights(fail_on_rank_1, version=3))
    no_weights = await _error_of(engine.generate(PROMPTS, sampling=SAMPLING)) if world.rank == 0 else ""
    await engine.update_weights(writer(old), version=4)
    healed = await engine.generate(PROMPTS[:1], sampling=SAMPLING)
    await engine.sleep()
    await engine.wake()
    # Starting a second engine would take 12 s.
    engine._core._on_update, engine._driver._drains = "recompute", False
    await engine.update_weights(writer(old), version=4)
    call = asyncio.create_task(engine.generate(PROMPTS, sampling=LONG))
    await engine.generate(PROMPTS[:1], sampling=SamplingParams(max_tokens=20))
    await engine.update_weights(writer(new), version=5)
    scored = await engine.compute_logprobs(SEQUENCES)
    across = await call
    call = asyncio.create_task(engine.generate(PROMPTS, sampling=LONG, call_id="a"))
    await engine.generate(PROMPTS[:1], sampling=SamplingParams(max_tokens=20))
    num_aborted = await engine.abort(["a"])
    aborted = await call
    continued = await engine.generate(PROMPTS, sampling=LONG, begun=aborted or None)
    sharded = [name for name, p in engine.model_state_dict().items() if isinstance(p, DTensor)]
    await asyncio.wait_for(engine.close(), STEP_TIMEOUT_S)
    return Lived(
        sharded=sharded,
        first=first,
        concurrent=concurrent,
        waiting=waiting,
        one_rank_failed=failed,
        no_weights=no_weights,
        healed=healed,
        across=across,
        scored=scored,
        aborted=aborted,
        num_aborted=num_aborted,
        continued=continued,
        threads_left=sum(thread.name == "vllm-engine" for thread in threading.enumerate()),
    )


async def _idle_turns(engine: GeneratorEngine, count: int) -> None:
    """Wait until rank 0 has sent `count` empty turns, in a hurry."""
    engine._driver._lockstep.timeout_s = 0.5
    turns = _IdleTurns(count)
    driver.logger.addHandler(turns)
    driver.logger.setLevel(logging.DEBUG)
    try:
        await asyncio.wait_for(turns.all_taken.wait(), STEP_TIMEOUT_S)
    finally:
        engine._driver._lockstep.timeout_s = engine.config.rank_timeout_s
        driver.logger.setLevel(logging.NOTSET)
        driver.logger.removeHandler(turns)


class _IdleTurns(logging.Handler):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_left = count
        self.all_taken = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.num_left -= record.msg == driver.IDLE
        if self.num_left <= 0:
            self.all_taken.set()


async def _error_of(awaitable: object) -> str:
    try:
        await awaitable  # type: ignore[misc]
    except Exception as error:  # noqa: BLE001  (returned to the test)
        return f"{type(error).__name__}: {error}"
    return "none"
