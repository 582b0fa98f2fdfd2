"""Rows that requests have in common are computed once, and calls that come together begin
together.
"""

import asyncio
from typing import Any

import numpy as np
import pytest

from actors.vllm.shared_rows import find_equal_rows
from rl.models.generate import generate
from rl.types import SamplingParams
from tests.support.policies import (
    logprob_errors,
    prompts_of,
    random_model,
    small_spec,
    tokens_of,
)
from tests.support.served_engine import serve_engine

pytestmark = pytest.mark.medium

MODEL_SPEC = small_spec()
MODEL = random_model(MODEL_SPEC, seed=0)
PROMPTS = prompts_of([5, 40, 9])
"""The second fills a cache block of 32 tokens and a part of the next."""
ROOM: dict[str, Any] = {"max_num_batched_tokens": 512, "max_num_seqs": 16}
SAMPLING = SamplingParams(max_tokens=40, num_samples=4, seed=1)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serve_engine(tmp_path_factory.mktemp("engine"), MODEL_SPEC, **ROOM) as served:
        served.load(MODEL)
        yield served


def equal_rows(requests, *, tables):
    """Return the rows of requests, each a first position and its token ids, in blocks of 4."""
    lengths = [len(ids) for _, ids in requests]
    return find_equal_rows(
        np.concatenate([np.array(ids) for _, ids in requests]),
        np.concatenate([np.arange(len(ids)) + begin for begin, ids in requests]),
        queries_S=np.cumsum([0, *lengths]),
        tables=np.array(tables),
        block_size=4,
    ).tolist()


def test_rows_of_equal_prompts_are_the_first_ones():
    requests = [(0, [7, 8]), (0, [7, 9]), (0, [7, 8]), (0, [7, 8, 1])]
    assert equal_rows(requests, tables=[[0], [1], [2], [3]]) == [0, 1, 2, 3, 0, 1, 6, 7, 8]


def test_rows_after_other_blocks_differ():
    requests = [(4, [7, 8]), (4, [7, 8]), (4, [7, 8])]
    assert equal_rows(requests, tables=[[5, 1], [5, 2], [6, 3]]) == [0, 1, 0, 1, 4, 5]


def test_rows_within_a_block_of_a_request_of_its_own_differ():
    requests = [(5, [7, 8]), (5, [7, 8]), (1, [7]), (1, [7])]
    assert equal_rows(requests, tables=[[5, 1], [5, 2], [3, 0], [4, 0]]) == [0, 1, 2, 3, 4, 5]


def test_samples_of_a_prompt_compute_it_once(served):
    counted: list[int] = []
    handle = served.engine._core.model.embed_tokens.register_forward_pre_hook(
        lambda _, inputs: counted.append(inputs[0].numel())
    )
    completions = served.run(served.engine.generate(PROMPTS, sampling=SAMPLING))
    handle.remove()

    # The second prompt's first sample begins at its start, the others after the block in common.
    assert counted[0] == 5 + 40 + 8 + 9
    assert counted[1:] == [len(PROMPTS) * SAMPLING.num_samples] * (SAMPLING.max_tokens - 1)
    assert tokens_of(completions) == tokens_of(generate(MODEL, PROMPTS, sampling=SAMPLING))
    assert logprob_errors(MODEL, PROMPTS, completions, SAMPLING).max() <= 1e-4


def test_calls_that_come_together_take_the_same_steps(served):
    counted: list[int] = []
    handle = served.engine._core.model.register_forward_pre_hook(lambda *_: counted.append(1))

    async def calls():
        running = []
        for prompt in PROMPTS:
            call = served.engine.generate([prompt], sampling=SAMPLING)
            running.append(asyncio.create_task(call))
            # As messages arrive: each in an iteration of the event loop of its own.
            await asyncio.sleep(0.0002)
        await asyncio.gather(*running)

    served.run(calls())
    handle.remove()
    assert len(counted) == SAMPLING.max_tokens


def test_a_shortened_allocation_is_one_without_new_blocks(served, monkeypatch):
    """vLLM's own allocation, called after it, has nothing to do."""
    manager = served.engine._core._scheduler.kv_cache_manager
    shortened, own = manager.allocate_slots, type(manager).allocate_slots
    assert "allocate_slots" in vars(manager), "the engine's manager has vLLM's own function"
    num_without = 0

    def allocate(request, num_new_tokens, **options):
        nonlocal num_without
        blocks = shortened(request, num_new_tokens, **options)
        if blocks is manager.empty_kv_cache_blocks:
            num_without += 1
            cached = dict(manager.coordinator.single_type_managers[0].num_cached_block)
            assert not any(own(manager, request, num_new_tokens, **options).blocks)
            assert manager.coordinator.single_type_managers[0].num_cached_block == cached
        return blocks

    monkeypatch.setattr(manager, "allocate_slots", allocate)
    completions = served.run(served.engine.generate(PROMPTS, sampling=SAMPLING))
    assert num_without > len(PROMPTS) * SAMPLING.num_samples * 30
    assert tokens_of(completions) == tokens_of(generate(MODEL, PROMPTS, sampling=SAMPLING))
