"""A generator of two tensor-parallel ranks gives the results of one rank."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from actors.vllm.engine import GeneratorEngine
from rl.distributed.process_group import World
from rl.models.generate import generate
from rl.types import Completion, SamplingParams
from tests.support.distributed import run_ranks
from tests.support.policies import (
    config_folder,
    prompts_of,
    random_model,
    recomputed_logprobs,
    sequence_logprobs,
    small_spec,
    tokens_of,
    writer,
)

pytestmark = [pytest.mark.medium, pytest.mark.timeout(240)]

SPEC = small_spec(tie=False, head_dim=32)
OLD, NEW = random_model(SPEC, seed=0), random_model(SPEC, seed=1)
PROMPTS = prompts_of([5, 1, 40, 150, 33, 7, 64])
SAMPLING = SamplingParams(max_tokens=31, num_samples=3, temperature=0.8, seed=1)
LONG = replace(SAMPLING, max_tokens=60)
SEQUENCES = prompts_of([2, 150, 256], seed=9)

Completions = list[list[Completion]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lived:
    """Results of one rank; rank 1 has no completions."""

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
    await engine.update_weights(writer(OLD), version=1)
    first = await engine.generate(PROMPTS, sampling=SAMPLING)

    if world.rank == 0:
        lockstep = engine._driver._lockstep
        lockstep.timeout_s = 0.1  # rank 0 then sends empty turns in a hurry
        await asyncio.sleep(0.5)
        lockstep.timeout_s = config.rank_timeout_s

    calls = [asyncio.create_task(engine.generate(PROMPTS[i::3], sampling=SAMPLING)) for i in range(3)]
    await engine.generate(PROMPTS[:1], sampling=SamplingParams(max_tokens=1))
    update = asyncio.create_task(engine.update_weights(writer(NEW), version=2))
    await asyncio.sleep(0)
    waiting = await engine.generate(PROMPTS[:2], sampling=SAMPLING)
    concurrent = await asyncio.gather(*calls)
    await update

    async def fail_on_rank_1(state_dict: dict[str, Tensor]) -> None:
        if world.rank == 1:
            raise KeyError("version 3")

    failed = await _error_of(engine.update_weights(fail_on_rank_1, version=3))
    no_weights = await _error_of(engine.generate(PROMPTS, sampling=SAMPLING)) if world.rank == 0 else ""
    await engine.update_weights(writer(OLD), version=4)
    healed = await engine.generate(PROMPTS[:1], sampling=SAMPLING)
    await engine.sleep()
    await engine.wake()
    # Starting a second engine would take 12 s.
    engine._core._on_update, engine._driver._drains = "recompute", False
    await engine.update_weights(writer(OLD), version=4)
    call = asyncio.create_task(engine.generate(PROMPTS, sampling=LONG))
    await engine.generate(PROMPTS[:1], sampling=SamplingParams(max_tokens=20))
    await engine.update_weights(writer(NEW), version=5)
    scored = await engine.compute_logprobs(SEQUENCES)
    across = await call
    await asyncio.wait_for(engine.close(), 60)
    return Lived(
        first=first,
        concurrent=concurrent,
        waiting=waiting,
        one_rank_failed=failed,
        no_weights=no_weights,
        healed=healed,
        across=across,
        scored=scored,
        threads_left=sum(thread.name == "vllm-engine" for thread in threading.enumerate()),
    )


async def _error_of(awaitable: object) -> str:
    try:
        await awaitable  # type: ignore[misc]
    except Exception as error:  # noqa: BLE001  (returned to the test)
        return f"{type(error).__name__}: {error}"
    return "none"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(live, 2, str(tmp_path_factory.mktemp("ranks")), timeout_s=200)


def versions_of(completions):
    return {version for of in completions for c in of for version in c.policy_versions.tolist()}


def test_tokens_and_logprobs_equal_those_of_one_rank(ranks):
    completions = ranks[0].first
    assert tokens_of(completions) == tokens_of(generate(OLD, PROMPTS, sampling=SAMPLING))
    differences = np.concatenate(
        [
            completion.logprobs - recomputed_logprobs(OLD, prompt, completion, SAMPLING)
            for prompt, of_prompt in zip(PROMPTS, completions, strict=True)
            for completion in of_prompt
        ]
    )
    assert np.abs(differences).mean() <= 1e-5
    assert versions_of(completions) == {1}


def test_ranks_stay_in_step_under_concurrent_calls_and_an_update(ranks):
    for i, completions in enumerate(ranks[0].concurrent):
        assert tokens_of(completions) == tokens_of(generate(OLD, PROMPTS[i::3], sampling=SAMPLING))
        assert versions_of(completions) == {1}
    assert tokens_of(ranks[0].waiting) == tokens_of(generate(NEW, PROMPTS[:2], sampling=SAMPLING))
    assert versions_of(ranks[0].waiting) == {2}


def test_only_rank_0_answers(ranks):
    assert ranks[1].first == ranks[1].waiting == ranks[1].healed == []
    assert ranks[1].concurrent == [[], [], []]


def test_update_that_fails_on_one_rank_fails_on_all(ranks):
    assert ranks[1].one_rank_failed == "KeyError: 'version 3'"
    assert ranks[0].one_rank_failed == (
        "GeneratorError: the update of the weights to version 3 failed on another rank of the generator"
    )
    assert ranks[0].no_weights.startswith("GeneratorError: the generator has no weights")
    assert tokens_of(ranks[0].healed) == tokens_of(generate(OLD, PROMPTS[:1], sampling=SAMPLING))
    assert versions_of(ranks[0].healed) == {4}


def test_closed_generator_leaves_no_thread(ranks):
    assert [rank.threads_left for rank in ranks] == [0, 0]


def test_ranks_stay_in_step_when_weights_change_in_flight(ranks):
    first, second = ranks
    assert versions_of(first.across) == {4, 5}
    for prompt, of_prompt in zip(PROMPTS, first.across, strict=True):
        for completion in of_prompt:
            num_old = completion.policy_versions.tolist().count(4)
            assert completion.policy_versions.tolist() == [4] * num_old + [5] * (60 - num_old)
            by_old, by_new = (recomputed_logprobs(m, prompt, completion, LONG) for m in (OLD, NEW))
            np.testing.assert_allclose(completion.logprobs[:num_old], by_old[:num_old], atol=1e-4, rtol=0)
            np.testing.assert_allclose(completion.logprobs[num_old:], by_new[num_old:], atol=1e-4, rtol=0)
    assert second.across == second.scored == []


def test_ranks_score_sequences(ranks):
    for tokens, logprobs in zip(SEQUENCES, ranks[0].scored, strict=True):
        np.testing.assert_allclose(logprobs, sequence_logprobs(NEW, tokens), atol=1e-5, rtol=0)
