"""A generator of two tensor-parallel ranks gives the results of one rank."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.vllm.engine import GeneratorEngine
from examples.custom_model import MULTIPLIERS
from rl.distributed.sharding import local_tensor, slice_local_shard
from rl.models.decoder import Decoder
from rl.models.generate import generate
from rl.models.lora import LoRA
from rl.models.low_rank.plain_bank import PlainBank
from rl.models.low_rank.shapes import AdapterShapes
from rl.types import SamplingParams
from tests.support.distributed import run_ranks
from tests.support.policies import (
    logprob_errors,
    prompts_of,
    random_model,
    recomputed_logprobs,
    sequence_logprobs,
    small_spec,
    tokens_of,
    writer,
)
from tests.support.served_engine import begin_steps_ahead, make_engine

pytestmark = [pytest.mark.medium, pytest.mark.timeout(240)]

SWITCHES = {"window": 37, "global_layers": (1,), "multipliers": MULTIPLIERS}
# A family that is not relay's own.
SPEC = small_spec(
    family="granite",
    tie=False,
    head_dim=32,
    switches=SWITCHES,
    qkv_bias=True,
    o_bias=True,
    ffn_bias=True,
)
OLD, NEW = random_model(SPEC, seed=0), random_model(SPEC, seed=1)
PROMPTS = prompts_of([5, 1, 40, 150, 33, 7, 64])
SAMPLING = SamplingParams(max_tokens=31, num_samples=3, temperature=0.8, seed=1)
LONG = replace(SAMPLING, max_tokens=60)
SEQUENCES = prompts_of([2, 150, 256], seed=9)
LORA = LoRA.Config(rank=8, alpha=16.0, unembedding=True)
SETTINGS: dict[str, Any] = {
    "tensor_parallel_degree": 2,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 65,
    "rank_timeout_s": 30.0,
}


def live(folder: str) -> dict[str, Any]:
    """Return the results of one rank; rank 1 has no completions."""

    begin_steps_ahead(pytest.MonkeyPatch())

    async def life() -> dict[str, Any]:
        engine = make_engine(Path(folder), SPEC, can_sleep=True, **SETTINGS)
        await engine.start()
        await engine.update_weights(writer(OLD), version=1)
        results = {"first": await engine.generate(PROMPTS, sampling=SAMPLING)}
        await hurry(engine)
        results |= await update_while_calls_run(engine)
        results |= await fail_and_heal(engine)
        results |= await use_adapters(engine)
        await engine.sleep()
        await engine.wake()
        results |= await update_in_flight(engine)
        await asyncio.wait_for(engine.close(), 60)
        return results

    results = asyncio.run(life())
    results["threads_left"] = sum(thread.name == "vllm-engine" for thread in threading.enumerate())
    return results


async def hurry(engine: GeneratorEngine) -> None:
    """Let rank 0 send empty turns in a hurry for a while."""
    if engine.world.rank == 0:
        lockstep = engine._lockstep
        lockstep.timeout_s = 0.1
        await asyncio.sleep(0.5)
        lockstep.timeout_s = engine.config.rank_timeout_s


async def update_while_calls_run(engine: GeneratorEngine) -> dict[str, Any]:
    calls = [
        asyncio.create_task(engine.generate(PROMPTS[i::3], sampling=SAMPLING)) for i in range(3)
    ]
    await engine.generate(PROMPTS[:1], sampling=SamplingParams(max_tokens=1))
    update = asyncio.create_task(engine.update_weights(writer(NEW), version=2))
    await asyncio.sleep(0)
    waiting = await engine.generate(PROMPTS[:2], sampling=SAMPLING)
    concurrent = await asyncio.gather(*calls)
    await update
    return {"concurrent": concurrent, "waiting": waiting}


async def fail_and_heal(engine: GeneratorEngine) -> dict[str, Any]:
    async def fail_on_rank_1(state_dict: dict[str, Tensor]) -> None:
        if engine.world.rank == 1:
            raise KeyError("version 3")

    failed = await error_of(engine.update_weights(fail_on_rank_1, version=3))
    no_weights = ""
    if engine.world.rank == 0:
        no_weights = await error_of(engine.generate(PROMPTS, sampling=SAMPLING))
    await engine.update_weights(writer(OLD), version=4)
    healed = await engine.generate(PROMPTS[:1], sampling=SAMPLING)
    return {"one_rank_failed": failed, "no_weights": no_weights, "healed": healed}


async def use_adapters(engine: GeneratorEngine) -> dict[str, Any]:
    """Load adapters while calls run, one of which a rank cannot write, and let one make room."""

    async def load(seed: int, version: int, *, is_newest: bool = True) -> None:
        write = factor_writer(seed)
        await engine.load_adapter(
            write, version=version, lora=LORA, base_id=None, is_newest=is_newest
        )

    async def fail_on_rank_1(tensors: dict[str, Tensor]) -> None:
        await factor_writer(3)(tensors)
        if engine.world.rank == 1:
            raise KeyError("adapter 30")

    await load(1, 10)
    # No more than can run at once: requests that have not begun get the newest adapter.
    call = asyncio.create_task(engine.generate(PROMPTS[:3], sampling=LONG))
    more = asyncio.create_task(engine.generate(PROMPTS[:3], sampling=LONG))
    await engine.generate(PROMPTS[:1], sampling=SamplingParams(max_tokens=20), adapter=10)
    failed = await error_of(
        engine.load_adapter(fail_on_rank_1, version=30, lora=LORA, base_id=None)
    )
    await load(2, 20)
    later = engine.generate(PROMPTS, sampling=SAMPLING)
    kept, begun_later, newest = await asyncio.gather(call, more, later)
    # Each rank has room for one: rank 0 decides which goes.
    engine._shelf._limit_bytes = 1
    refused = await error_of(load(3, 40))
    engine._shelf._limit_bytes = max(kept.num_bytes for kept in engine._shelf._kept.values())
    engine.give_up_adapters([20])
    await load(3, 40, is_newest=False)
    loaded = sorted(engine._core.adapters.versions)
    # The bank of a GPU takes the place of the one with the kernel, whose adapter nobody uses.
    engine._shelf._limit_bytes = 2**30
    engine._core._policy.bank = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actors.vllm.model.make_bank", make_plain_bank)
        await load(1, 50, is_newest=False)
    plain = await engine.generate(PROMPTS, sampling=SAMPLING, adapter=50)
    return {
        "kept": kept, "newest": newest, "load_failed": failed, "refused": refused, "loaded": loaded,
        "plain": plain, "begun_later": begun_later,
    }  # fmt: skip


def make_plain_bank(layers: Any, *, device: torch.device, **dtypes: Any) -> PlainBank:
    return PlainBank(layers, **dtypes)


def factor_writer(seed: int) -> Any:
    """Return a function that fills factors with the same numbers in any layout."""

    async def write(tensors: dict[str, Tensor]) -> None:
        generator = torch.Generator().manual_seed(seed)
        for target in tensors.values():
            whole = 0.2 * torch.randn(target.shape, generator=generator)
            local_tensor(target).copy_(slice_local_shard(whole, target))

    return write


def add_adapter(model: Decoder, seed: int) -> Decoder:
    """Return the model with the sums of its weights and an adapter's products."""
    shapes = AdapterShapes(SPEC, LORA, mesh=None)
    tensors = shapes.allocate(torch.float32, device=torch.device("cpu"))
    asyncio.run(factor_writer(seed)(tensors))
    merged = copy.deepcopy(model)
    for name, factors in shapes.read(tensors).items():
        spread = factors.layer.spread_by_source(factors.b, factors.rows_ON)
        weight = merged.get_parameter(f"{name}.weight")
        weight.data += factors.layer.scale * spread @ factors.a
    return merged


async def update_in_flight(engine: GeneratorEngine) -> dict[str, Any]:
    # Starting a second engine would take 12 s.
    engine._core._on_update, engine._drains = "recompute", False
    await engine.update_weights(writer(OLD), version=4)
    call = asyncio.create_task(engine.generate(PROMPTS, sampling=LONG))
    await engine.generate(PROMPTS[:1], sampling=SamplingParams(max_tokens=20))
    await engine.update_weights(writer(NEW), version=5)
    scored = await engine.compute_logprobs(SEQUENCES)
    return {"scored": scored, "across": await call}


async def error_of(awaitable: Awaitable[Any]) -> str:
    answer: Any = (await asyncio.gather(awaitable, return_exceptions=True))[0]
    return f"{type(answer).__name__}: {answer}"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(live, 2, str(tmp_path_factory.mktemp("ranks")), timeout_s=200)


def versions_of(completions):
    return {version for of in completions for c in of for version in c.policy_versions.tolist()}


def test_tokens_and_logprobs_equal_those_of_one_rank(ranks):
    first = ranks[0]["first"]
    assert tokens_of(first) == tokens_of(generate(OLD, PROMPTS, sampling=SAMPLING))
    errors = logprob_errors(OLD, PROMPTS, first, SAMPLING)
    assert errors.shape == (len(PROMPTS) * 3 * 31,)
    assert errors.mean() <= 1e-5
    assert versions_of(first) == {1}


def test_ranks_stay_in_step_under_concurrent_calls_and_an_update(ranks):
    for i, completions in enumerate(ranks[0]["concurrent"]):
        assert tokens_of(completions) == tokens_of(generate(OLD, PROMPTS[i::3], sampling=SAMPLING))
        assert versions_of(completions) == {1}
    waiting = ranks[0]["waiting"]
    assert tokens_of(waiting) == tokens_of(generate(NEW, PROMPTS[:2], sampling=SAMPLING))
    assert versions_of(waiting) == {2}


def test_only_rank_0_answers(ranks):
    names = ("first", "waiting", "healed", "across", "scored", "kept", "newest")
    assert [ranks[1][name] for name in names] == [[]] * 7
    assert ranks[1]["concurrent"] == [[], [], []]
    assert [rank["threads_left"] for rank in ranks] == [0, 0]


def test_update_that_fails_on_one_rank_fails_on_all(ranks):
    assert ranks[1]["one_rank_failed"] == "KeyError: 'version 3'"
    assert ranks[0]["one_rank_failed"] == (
        "GeneratorError: the update of the weights to version 3 failed on another rank of the "
        "generator"
    )
    assert ranks[0]["no_weights"].startswith("GeneratorError: the generator has no weights")
    healed = ranks[0]["healed"]
    assert tokens_of(healed) == tokens_of(generate(OLD, PROMPTS[:1], sampling=SAMPLING))
    assert versions_of(healed) == {4}


def test_ranks_serve_adapters_with_the_results_of_one_rank(ranks):
    cases = (
        ("kept", 1, 10, PROMPTS[:3], LONG),
        ("newest", 2, 20, PROMPTS, SAMPLING),
        ("plain", 1, 50, PROMPTS, SAMPLING),
    )
    for name, seed, version, prompts, sampling in cases:
        errors = logprob_errors(add_adapter(OLD, seed), prompts, ranks[0][name], sampling)
        assert errors.max() <= 1e-4
        assert errors.mean() <= 1e-5
        assert versions_of(ranks[0][name]) == {version}


def test_requests_that_wait_for_room_begin_with_the_newest_adapter(ranks):
    """12 requests run at once, so that some of the second nine begin after the next load."""
    versions = [
        set(completion.policy_versions.tolist())
        for of_prompt in ranks[0]["begun_later"]
        for completion in of_prompt
    ]
    assert {frozenset(of) for of in versions} == {frozenset({10}), frozenset({20})}


def test_ranks_agree_on_the_adapters_that_are_loaded(ranks):
    assert ranks[1]["load_failed"] == "KeyError: 'adapter 30'"
    assert ranks[0]["load_failed"] == (
        "GeneratorError: the load of adapter 30 failed on another rank of the generator"
    )
    for rank in ranks:
        assert rank["refused"].startswith("AdapterRoomError: adapter 40 of")
        assert rank["loaded"] == [40]


def test_ranks_stay_in_step_when_weights_change_in_flight(ranks):
    assert versions_of(ranks[0]["across"]) == {4, 5}
    for prompt, of_prompt in zip(PROMPTS, ranks[0]["across"], strict=True):
        for completion in of_prompt:
            num_old = completion.policy_versions.tolist().count(4)
            assert completion.policy_versions.tolist() == [4] * num_old + [5] * (60 - num_old)
            by_old, by_new = (recomputed_logprobs(m, prompt, completion, LONG) for m in (OLD, NEW))
            np.testing.assert_allclose(
                completion.logprobs[:num_old], by_old[:num_old], atol=1e-4, rtol=0
            )
            np.testing.assert_allclose(
                completion.logprobs[num_old:], by_new[num_old:], atol=1e-4, rtol=0
            )


def test_ranks_score_sequences(ranks):
    for tokens, logprobs in zip(SEQUENCES, ranks[0]["scored"], strict=True):
        np.testing.assert_allclose(logprobs, sequence_logprobs(NEW, tokens), atol=1e-5, rtol=0)
