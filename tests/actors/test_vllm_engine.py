"""A float32 engine with little room: prompts are read in parts and requests wait for each other."""

import asyncio

import numpy as np
import pytest
import torch

from actors.vllm.requests import DivergedError, GeneratorError
from rl.models.generate import generate
from rl.types import SamplingParams
from tests.support.policies import (
    prompts_of,
    random_model,
    recomputed_logprobs,
    small_spec,
    tokens_of,
    writer,
)
from tests.support.served_engine import served_engine

pytestmark = pytest.mark.medium

SPEC = small_spec()
MODEL = random_model(SPEC, seed=0)
PROMPTS = prompts_of([5, 1, 40, 150, 33, 64])
"""Prompts: the fourth is longer than a step takes, and some fill whole cache blocks."""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with served_engine(tmp_path_factory.mktemp("engine"), SPEC) as served:
        with pytest.raises(GeneratorError, match="no weights: a version must be pulled first"):
            served.generate(PROMPTS, max_tokens=1)
        served.load(MODEL)
        yield served


@pytest.fixture
def engine(served):
    """The shared engine, reset to the weights of `MODEL`."""
    served.load(MODEL)
    return served


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.0},
    ],
    ids=str,
)
def test_tokens_and_logprobs_equal_those_of_the_plain_sampler(engine, settings):
    sampling = SamplingParams(max_tokens=30, num_samples=3, seed=1, **settings)
    completions = engine.run(engine.engine.generate(PROMPTS, sampling=sampling))
    differences = np.concatenate(
        [
            completion.logprobs - recomputed_logprobs(MODEL, prompt, completion, sampling)
            for prompt, of_prompt in zip(PROMPTS, completions, strict=True)
            for completion in of_prompt
        ]
    )
    assert differences.shape == (len(PROMPTS) * 3 * 30,)
    assert np.abs(differences).mean() <= 1e-5
    assert np.abs(differences).max() <= 1e-4
    assert tokens_of(completions) == tokens_of(generate(MODEL, PROMPTS, sampling=sampling))


def test_restored_random_states_repeat_calls_without_a_seed(engine):
    settings = {"max_tokens": 12, "num_samples": 2}
    states = engine.engine.random_states()
    first = [tokens_of(engine.generate(PROMPTS, **settings)) for _ in range(2)]
    assert first[0] != first[1]
    engine.engine.restore_random_states(states)
    assert [tokens_of(engine.generate(PROMPTS, **settings)) for _ in range(2)] == first


def test_completion_ends_at_its_stop_token_or_its_length(engine):
    ((free,),) = engine.generate(PROMPTS[:1], max_tokens=20, seed=4)
    assert free.finish_reason == "length"
    assert len(free.token_ids) == 20
    stop = int(free.token_ids[7])
    end = free.token_ids.tolist().index(stop) + 1
    ((stopped,),) = engine.generate(PROMPTS[:1], max_tokens=20, seed=4, stop_token_ids=(stop,))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids.tolist() == free.token_ids[:end].tolist()
    assert np.array_equal(stopped.logprobs, free.logprobs[:end])
    assert stopped.token_ids.dtype == np.int32
    assert stopped.logprobs.dtype == np.float32


def test_seed_determines_the_tokens_whatever_else_runs(engine):
    alone = [engine.generate([prompt], max_tokens=12, num_samples=2, seed=5)[0] for prompt in PROMPTS]
    together = engine.generate(PROMPTS, max_tokens=12, num_samples=2, seed=5)
    assert tokens_of(alone) == tokens_of(together)
    assert tokens_of(together)[0][0] != tokens_of(together)[0][1]
    assert tokens_of(together) != tokens_of(engine.generate(PROMPTS, max_tokens=12, num_samples=2, seed=6))
    without = [engine.generate(PROMPTS, max_tokens=12) for _ in range(2)]
    assert tokens_of(without[0]) != tokens_of(without[1])


def test_calls_overlap_and_keep_their_own_settings(engine):
    order = []

    async def call(name, prompts, **settings):
        result = await engine.engine.generate(prompts, sampling=SamplingParams(**settings))
        order.append(name)
        return result

    greedy = {"max_tokens": 4, "temperature": 0.0}
    cold = {"max_tokens": 6, "temperature": 0.5, "top_k": 3, "seed": 8, "num_samples": 2}

    async def all_at_once():
        return await asyncio.gather(
            call("long", PROMPTS[:2], max_tokens=100, seed=7),
            call("greedy", PROMPTS[:3], **greedy),
            call("cold", PROMPTS[1:3], **cold),
        )

    long, short, few = engine.run(all_at_once())
    assert order == ["greedy", "cold", "long"]
    for made, prompts, settings in (
        (long, PROMPTS[:2], {"max_tokens": 100, "seed": 7}),
        (short, PROMPTS[:3], greedy),
        (few, PROMPTS[1:3], cold),
    ):
        assert tokens_of(made) == tokens_of(generate(MODEL, prompts, sampling=SamplingParams(**settings)))


def test_cancelled_call_frees_its_place_and_leaves_others_alone(engine):
    async def cancel_one():
        # More requests than can run at once: some run and others wait.
        sampling = SamplingParams(max_tokens=100, num_samples=8)
        doomed = asyncio.create_task(engine.engine.generate(PROMPTS, sampling=sampling))
        first = await engine.engine.generate(PROMPTS[:1], sampling=SamplingParams(max_tokens=2, seed=1))
        assert not doomed.done()
        doomed.cancel()
        second = await engine.engine.generate(PROMPTS[:1], sampling=SamplingParams(max_tokens=2, seed=1))
        with pytest.raises(asyncio.CancelledError):
            await doomed
        return first, second

    first, second = engine.run(cancel_one())
    assert tokens_of(first) == tokens_of(second)
    assert not engine.engine._core.has_requests


def test_update_changes_the_weights_in_place_and_drops_the_cache(engine):
    other = random_model(SPEC, seed=1)
    sampling = SamplingParams(max_tokens=10, num_samples=2, seed=2)
    before = engine.run(engine.engine.generate(PROMPTS, sampling=sampling))
    addresses = {name: p.data_ptr() for name, p in engine.engine.model_state_dict().items()}
    version = engine.load(other)
    after = engine.run(engine.engine.generate(PROMPTS, sampling=sampling))
    assert {name: p.data_ptr() for name, p in engine.engine.model_state_dict().items()} == addresses
    assert engine.engine.policy_version == version
    for completions, model, expected in ((before, MODEL, version - 1), (after, other, version)):
        assert tokens_of(completions) == tokens_of(generate(model, PROMPTS, sampling=sampling))
        assert {v for of in completions for c in of for v in c.policy_versions.tolist()} == {expected}


def test_draining_update_lets_running_requests_finish_and_new_ones_wait(engine):
    other = random_model(SPEC, seed=1)
    old_version = engine.engine.policy_version
    sampling = SamplingParams(max_tokens=60, num_samples=2, seed=3)
    log = []

    async def write(state_dict):
        log.append("writing")
        await asyncio.sleep(0)
        await writer(other)(state_dict)
        log.append("written")

    async def call(name):
        made = await engine.engine.generate(PROMPTS, sampling=sampling)
        log.append(name)
        return made

    async def update_in_between():
        early = asyncio.create_task(call("early"))
        await engine.engine.generate(PROMPTS[:1], sampling=SamplingParams(max_tokens=1))
        assert engine.engine._core.has_requests
        update = asyncio.create_task(engine.engine.update_weights(write, version=77))
        await asyncio.sleep(0)
        late = asyncio.create_task(call("late"))
        return await early, await update, await late

    early, _, late = engine.run(update_in_between())
    assert log == ["early", "writing", "written", "late"]
    assert tokens_of(early) == tokens_of(generate(MODEL, PROMPTS, sampling=sampling))
    assert tokens_of(late) == tokens_of(generate(other, PROMPTS, sampling=sampling))
    assert {c.policy_versions[-1] for of in early for c in of} == {old_version}
    assert {c.policy_versions[0] for of in late for c in of} == {77}


def test_weights_with_nan_fail_their_calls_and_the_next_weights_heal(engine):
    broken = random_model(SPEC, seed=0)
    with torch.no_grad():
        broken.norm.weight[0] = torch.nan
        for name, parameter in broken.named_parameters():
            if name.endswith("qkv_proj.weight"):
                parameter.fill_(torch.nan)  # puts NaN into the cache too
    engine.load(broken)
    sampling = SamplingParams(max_tokens=5, temperature=0.0)

    async def calls():
        calls = [engine.engine.generate(PROMPTS, sampling=sampling) for _ in range(2)]
        scored = engine.engine.compute_logprobs(PROMPTS[:1])
        return await asyncio.gather(*calls, scored, return_exceptions=True)

    for error in engine.run(calls()):
        assert isinstance(error, DivergedError)
        assert "logprobs are NaN" in str(error)
    engine.load(MODEL)
    completions = engine.run(engine.engine.generate(PROMPTS, sampling=sampling))
    assert tokens_of(completions) == tokens_of(generate(MODEL, PROMPTS, sampling=sampling))
