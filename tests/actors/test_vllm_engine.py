"""One engine, float32, with little room: prompts are read in parts and requests wait for each other."""

import asyncio

import numpy as np
import pytest

from actors.vllm.errors import GeneratorError
from rl.models.generate import generate
from rl.types import SamplingParams
from tests.support.policies import (
    VOCAB_SIZE,
    full_logits,
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
"""The fourth is longer than a step takes, and some fill whole cache blocks."""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with served_engine(tmp_path_factory.mktemp("engine"), SPEC) as served:
        with pytest.raises(GeneratorError, match="no weights: a version must be pulled first"):
            served.generate(PROMPTS, max_tokens=1)
        served.load(MODEL)
        yield served


@pytest.fixture
def engine(served):
    """With the weights of `MODEL` again, whatever a test before has loaded."""
    served.load(MODEL)
    return served


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"top_p": 0.8},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.0},
    ],
    ids=str,
)
def test_logprobs_are_those_of_our_model_and_of_the_distribution_drawn_from(engine, settings):
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
    # Same seeds, same draws: token for token what our own sampler gives.
    assert tokens_of(completions) == tokens_of(generate(MODEL, PROMPTS, sampling=sampling))


def test_calls_without_a_seed_draw_again_what_they_drew_after_the_random_states_were_taken(engine):
    settings = {"max_tokens": 12, "num_samples": 2}
    states = engine.engine.random_states()
    first = [tokens_of(engine.generate(PROMPTS, **settings)) for _ in range(2)]
    assert first[0] != first[1]
    engine.engine.restore_random_states(states)
    assert [tokens_of(engine.generate(PROMPTS, **settings)) for _ in range(2)] == first


def test_greedy_takes_the_most_likely_token_each_time(engine):
    completions = engine.generate(PROMPTS, max_tokens=8, temperature=0.0)
    for prompt, (completion,) in zip(PROMPTS, completions, strict=True):
        tokens = prompt
        for _ in range(8):
            tokens = np.append(tokens, full_logits(MODEL, tokens)[-1].argmax().item())
        assert completion.token_ids.tolist() == tokens[len(prompt) :].tolist()


def test_a_completion_ends_with_its_stop_token_or_at_its_length(engine):
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


def test_a_seed_decides_the_tokens_whatever_else_runs(engine):
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


def test_cancelling_a_call_frees_its_place_and_leaves_the_others_alone(engine):
    async def cancel_one():
        # More requests than run at once: some are running, some waiting.
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


def test_an_update_changes_the_policy_in_place_and_forgets_its_cache(engine):
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


def test_an_update_lets_running_requests_finish_and_new_ones_wait(engine):
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


def test_a_failed_update_is_raised_and_stops_generation_until_the_next(engine):
    async def fail(state_dict):
        state_dict["norm.weight"].zero_()
        raise KeyError("version 9 is not in the store")

    async def update_with_a_call_waiting():
        update = asyncio.create_task(engine.engine.update_weights(fail, version=9))
        await asyncio.sleep(0)
        call = engine.engine.generate(PROMPTS, sampling=SamplingParams(max_tokens=1))
        return await asyncio.gather(update, call, return_exceptions=True)

    update, call = engine.run(update_with_a_call_waiting())
    assert repr(update) == repr(KeyError("version 9 is not in the store"))
    assert isinstance(call, GeneratorError)
    assert str(call) == "the update of the weights to version 9 failed"
    assert engine.engine.policy_version is None
    with pytest.raises(GeneratorError, match="no weights"):
        engine.generate(PROMPTS, max_tokens=1)
    engine.load(MODEL)
    sampling = SamplingParams(max_tokens=3, seed=0)
    completions = engine.run(engine.engine.generate(PROMPTS, sampling=sampling))
    assert tokens_of(completions) == tokens_of(generate(MODEL, PROMPTS, sampling=sampling))


TOO_LONG = (
    "prompt 1 has 157 tokens: with sampling.max_tokens=100 that is more than generator.max_model_len=256"
)
TOO_COLD = r"sampling.temperature=0.005: must be 0 \(greedy\) or at least 0.01"


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        (np.zeros(157), {"max_tokens": 100}, TOO_LONG),
        (np.zeros(0), {}, "prompt 1 is empty"),
        (np.array([3, VOCAB_SIZE]), {}, "prompt 1 has token id 64: must be 0 to 63"),
        (np.array([-1, 3]), {}, "prompt 1 has token id -1: must be 0 to 63"),
        (np.zeros(1), {"temperature": 0.005}, TOO_COLD),
        (np.zeros(1), {"top_p": 0.0}, "sampling.top_p=0.0: must be above 0, at most 1"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_runs(engine, prompt, settings, message):
    sampling = SamplingParams(**({"max_tokens": 5} | settings))
    prompts = [PROMPTS[0], prompt.astype(np.int32)]
    with pytest.raises(ValueError, match=message):
        engine.run(engine.engine.generate(prompts, sampling=sampling))
    assert not engine.engine._driver._samples
    assert len(engine.generate([np.zeros(156, dtype=np.int32)], max_tokens=100)[0][0].token_ids) == 100


def test_no_prompts_give_no_completions(engine):
    assert engine.generate([], max_tokens=5) == []


def test_the_short_way_through_a_step_gives_what_vllms_own_scheduler_does(engine):
    scheduler = engine.engine._core._scheduler
    short, recognise = [], scheduler._all_decode
    stop = int(engine.generate(PROMPTS[:1], max_tokens=20, seed=4)[0][0].token_ids[7])

    def made(all_decode):
        scheduler._all_decode = all_decode
        engine.load(MODEL)  # An empty cache: both read their prompts in the same steps.
        # More requests than run at once; some end early.
        completions = engine.generate(PROMPTS, max_tokens=70, num_samples=5, seed=4, stop_token_ids=(stop,))
        return [
            (c.token_ids.tolist(), c.logprobs.tolist(), c.finish_reason) for of in completions for c in of
        ]

    def counted():
        short.append(recognise())
        return short[-1]

    try:
        assert made(counted) == made(lambda: False)
    finally:
        scheduler._all_decode = recognise
    assert short.count(True) > len(short) / 2
