"""An engine with little room: prompts are read in parts and requests wait for each other; weights
change in flight.
"""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from actors.vllm.requests import DivergedError, GeneratorError
from rl.models.generate import generate
from rl.types import SamplingParams
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
from tests.support.served_engine import serve_engine

pytestmark = pytest.mark.medium

SPEC = small_spec(family="gemma3_text", switches={"window": 37, "global_layers": (1,)})
OLD, NEW = random_model(SPEC, seed=0), random_model(SPEC, seed=1)
PROMPTS = prompts_of([5, 1, 40, 150, 33, 64])
"""Prompts: the fourth is longer than a step takes, and some fill whole cache blocks."""
LONG = SamplingParams(max_tokens=100, num_samples=2, seed=3)
EXACT: dict[str, Any] = {"atol": 1e-4, "rtol": 0}
"""Float32 tolerance; logprobs of other weights are off by 0.1 or more."""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serve_engine(tmp_path_factory.mktemp("engine"), SPEC, ahead=True) as served:
        with pytest.raises(GeneratorError, match="no weights: a version must be pulled first"):
            served.generate(PROMPTS, max_tokens=1)
        yield served


@pytest.fixture
def engine(served, request):
    """The shared engine with the weights of `OLD`, in the mode of `on_update`; a second one would
    take seconds.
    """
    mode = getattr(request, "param", "drain")
    served.engine._core._on_update, served.engine._drains = mode, mode == "drain"
    served.load(OLD)
    return served


in_flight = pytest.mark.parametrize("engine", ["keep"], indirect=True)
in_flight_in_both_modes = pytest.mark.parametrize("engine", ["keep", "recompute"], indirect=True)


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
    errors = logprob_errors(OLD, PROMPTS, completions, sampling)
    assert errors.shape == (len(PROMPTS) * 3 * 30,)
    assert errors.mean() <= 1e-5
    assert errors.max() <= 1e-4
    assert tokens_of(completions) == tokens_of(generate(OLD, PROMPTS, sampling=sampling))


def test_whole_blocks_of_a_prompt_are_read_once(engine):
    """The prompt has 150 tokens, 128 of them in four whole blocks."""
    counted: list[int] = []
    embedding = engine.engine._core.model.embed_tokens
    handle = embedding.register_forward_pre_hook(
        lambda _, inputs: counted.append(inputs[0].numel())
    )
    for expected in (150, 150 - 128):
        engine.generate([PROMPTS[3]], max_tokens=1)
        assert sum(counted) == expected
        counted.clear()
    handle.remove()


def test_calls_overlap_and_keep_their_own_settings(engine):
    calls: dict[str, Any] = {
        "long": (PROMPTS[:2], {"max_tokens": 100, "seed": 7}),
        "greedy": (PROMPTS[:3], {"max_tokens": 4, "temperature": 0.0}),
        "cold": (
            PROMPTS[1:3],
            {"max_tokens": 6, "temperature": 0.5, "top_k": 3, "seed": 8, "num_samples": 2},
        ),
    }
    order = []

    async def call(name):
        prompts, settings = calls[name]
        made = await engine.engine.generate(prompts, sampling=SamplingParams(**settings))
        order.append(name)
        return made

    async def all_at_once():
        return await asyncio.gather(*map(call, calls))

    answers = engine.run(all_at_once())
    assert order == ["greedy", "cold", "long"]
    for made, (prompts, settings) in zip(answers, calls.values(), strict=True):
        assert tokens_of(made) == tokens_of(
            generate(OLD, prompts, sampling=SamplingParams(**settings))
        )


def test_cancelled_call_frees_its_place_and_leaves_others_alone(engine):
    async def cancel_one():
        # More requests than can run at once: some run and others wait.
        sampling = SamplingParams(max_tokens=100, num_samples=8)
        doomed = asyncio.create_task(engine.engine.generate(PROMPTS, sampling=sampling))
        first = await engine.engine.generate(
            PROMPTS[:1], sampling=SamplingParams(max_tokens=2, seed=1)
        )
        assert not doomed.done()
        doomed.cancel()
        second = await engine.engine.generate(
            PROMPTS[:1], sampling=SamplingParams(max_tokens=2, seed=1)
        )
        with pytest.raises(asyncio.CancelledError):
            await doomed
        return first, second

    first, second = engine.run(cancel_one())
    assert tokens_of(first) == tokens_of(second)
    assert not engine.engine._core.has_requests


def test_draining_update_lets_running_requests_finish_and_new_ones_wait(engine):
    old_version = engine.engine.policy_version
    sampling = SamplingParams(max_tokens=60, num_samples=2, seed=3)
    addresses = {name: p.data_ptr() for name, p in engine.engine.model_state_dict().items()}
    log = []

    async def write(state_dict):
        log.append("writing")
        await asyncio.sleep(0)
        await writer(NEW)(state_dict)
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
    assert {name: p.data_ptr() for name, p in engine.engine.model_state_dict().items()} == addresses
    assert log == ["early", "writing", "written", "late"]
    assert tokens_of(early) == tokens_of(generate(OLD, PROMPTS, sampling=sampling))
    assert tokens_of(late) == tokens_of(generate(NEW, PROMPTS, sampling=sampling))
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
    engine.load(OLD)
    completions = engine.run(engine.engine.generate(PROMPTS, sampling=sampling))
    assert tokens_of(completions) == tokens_of(generate(OLD, PROMPTS, sampling=sampling))


async def after(engine, num_tokens):
    """Wait until the running requests have about `num_tokens` tokens."""
    await engine.engine.generate(PROMPTS[:1], sampling=SamplingParams(max_tokens=num_tokens))


def updated_in_the_middle(engine, model, *, prompts=PROMPTS[:3]):
    """Return completions that span an update to the weights of `model`, and the new version."""

    async def run():
        calls = asyncio.create_task(engine.engine.generate(prompts, sampling=LONG))
        await after(engine, 30)
        version = await engine.update(model)
        assert not calls.done()
        return await calls, version

    return engine.run(run())


def with_prompts(completions, prompts):
    return [
        (prompt, c)
        for prompt, of_prompt in zip(prompts, completions, strict=True)
        for c in of_prompt
    ]


@in_flight_in_both_modes
def test_every_token_has_the_version_that_drew_it(engine):
    completions, version = updated_in_the_middle(engine, NEW)
    for prompt, completion in with_prompts(completions, PROMPTS[:3]):
        assert completion.finish_reason == "length"
        assert len(completion.token_ids) == 100
        num_old = completion.policy_versions.tolist().count(version - 1)
        assert 20 < num_old < 60
        assert completion.policy_versions.tolist() == [version - 1] * num_old + [version] * (
            100 - num_old
        )
        by_old = recomputed_logprobs(OLD, prompt, completion, LONG)
        by_new = recomputed_logprobs(NEW, prompt, completion, LONG)
        np.testing.assert_allclose(completion.logprobs[:num_old], by_old[:num_old], **EXACT)
        assert abs(completion.logprobs[num_old] - by_old[num_old]) > 1e-4  # drawn after the update
        rest = np.abs(completion.logprobs - by_new)[num_old:]
        if engine.engine._core._on_update == "recompute":
            assert rest.max() <= 1e-4
        else:
            assert rest.max() > 0.1


@in_flight
def test_update_to_equal_weights_changes_no_completion(engine):
    completions, version = updated_in_the_middle(engine, OLD)
    assert {c.policy_versions[-1] for of in completions for c in of} == {version}
    assert tokens_of(completions) == tokens_of(generate(OLD, PROMPTS[:3], sampling=LONG))
    assert logprob_errors(OLD, PROMPTS[:3], completions, LONG).max() <= 1e-4


@in_flight_in_both_modes
def test_later_requests_read_no_cache_of_old_weights(engine):
    sampling, longer = SamplingParams(max_tokens=10, seed=5), SamplingParams(max_tokens=60, seed=4)

    async def run():
        # 36 requests, of which 12 run: the prompts' blocks are cached and in use, the other
        # requests wait.
        early = asyncio.create_task(engine.engine.generate(PROMPTS[2:] * 9, sampling=longer))
        await after(engine, 1)
        version = await engine.update(NEW)
        return await engine.engine.generate(PROMPTS, sampling=sampling), await early, version

    late, early, version = engine.run(run())
    assert tokens_of(late) == tokens_of(generate(NEW, PROMPTS, sampling=sampling))
    waited = [[c for c in of_prompt if c.policy_versions[0] == version] for of_prompt in early]
    assert sum(map(len, waited)) >= 20
    assert {c.policy_versions[0] for of_prompt in late for c in of_prompt} == {version}
    assert logprob_errors(NEW, PROMPTS, late, sampling).max() <= 1e-4
    assert logprob_errors(NEW, PROMPTS[2:] * 9, waited, longer).max() <= 1e-4


@in_flight
def test_failed_update_fails_running_calls_and_the_next_heals(engine):
    async def fail(state_dict):
        state_dict["norm.weight"].zero_()
        raise KeyError("version 9 is not in the store")

    async def run():
        calls = asyncio.create_task(engine.engine.generate(PROMPTS, sampling=LONG))
        await after(engine, 5)
        update = engine.engine.update_weights(fail, version=9)
        return await asyncio.gather(update, calls, return_exceptions=True)

    update, calls = engine.run(run())
    assert repr(update) == repr(KeyError("version 9 is not in the store"))
    assert isinstance(calls, GeneratorError)
    assert str(calls) == "the update of the weights to version 9 failed"
    assert not engine.engine._core.has_requests
    with pytest.raises(GeneratorError, match="no weights"):
        engine.generate(PROMPTS, max_tokens=1)
    engine.load(NEW)
    sampling = SamplingParams(max_tokens=5, seed=0)
    made = engine.run(engine.engine.generate(PROMPTS, sampling=sampling))
    assert tokens_of(made) == tokens_of(generate(NEW, PROMPTS, sampling=sampling))


@in_flight
def test_aborted_call_returns_its_tokens_and_can_be_continued(engine):
    ends = generate(OLD, PROMPTS, sampling=LONG)[0][0].token_ids[30]
    sampling = SamplingParams(max_tokens=100, num_samples=2, seed=3, stop_token_ids=(int(ends),))
    undisturbed = generate(OLD, PROMPTS, sampling=sampling)

    async def run():
        other = asyncio.create_task(engine.engine.generate(PROMPTS, sampling=sampling, call_id="b"))
        made, parts = None, []
        while made is None or "abort" in reasons_of(made):
            call = asyncio.create_task(
                engine.engine.generate(PROMPTS, sampling=sampling, call_id="a", begun=made)
            )
            await after(engine, 25)
            num_ended = await engine.engine.abort(["a", "unknown"])
            made = await call
            assert num_ended == reasons_of(made).count("abort")
            parts.append(made)
        assert not other.done() or len(parts) > 2
        return parts, await other

    parts, other = engine.run(run())
    assert len(parts) > 2
    assert {"abort", "stop"} <= set(reasons_of(parts[1]))
    assert tokens_of(parts[-1]) == tokens_of(other) == tokens_of(undisturbed)
    assert reasons_of(parts[-1]) == reasons_of(undisturbed)
    version = engine.engine.policy_version
    assert logprob_errors(OLD, PROMPTS, parts[-1], sampling).max() <= 1e-4
    assert {v for of_prompt in parts[-1] for c in of_prompt for v in c.policy_versions} == {version}
    for before, later in zip(parts[0], parts[-1], strict=True):
        for old, new in zip(before, later, strict=True):
            assert np.array_equal(old.logprobs, new.logprobs[: len(old.logprobs)])
    assert not engine.engine._core.has_requests


def reasons_of(completions):
    return [c.finish_reason for of_prompt in completions for c in of_prompt]


@in_flight
def test_continued_completion_keeps_its_versions(engine):
    async def run():
        call = asyncio.create_task(engine.engine.generate(PROMPTS[:2], sampling=LONG, call_id="a"))
        await after(engine, 10)
        assert await engine.engine.abort() == 4
        begun = await call
        version = await engine.update(NEW)
        return begun, await engine.engine.generate(PROMPTS[:2], sampling=LONG, begun=begun), version

    begun, made, version = engine.run(run())
    for old, (prompt, completion) in zip(
        (c for of in begun for c in of), with_prompts(made, PROMPTS[:2]), strict=True
    ):
        num_old = len(old.token_ids)
        assert num_old >= 9
        assert completion.policy_versions.tolist() == [version - 1] * num_old + [version] * (
            100 - num_old
        )
        assert np.array_equal(completion.logprobs[:num_old], old.logprobs)
        # All keys and values of a continued request come from the weights that continue it.
        expected = recomputed_logprobs(NEW, prompt, completion, LONG)
        np.testing.assert_allclose(completion.logprobs[num_old:], expected[num_old:], **EXACT)


def test_finished_completions_are_returned_unchanged(engine):
    finished = engine.generate(PROMPTS[:1], max_tokens=4, num_samples=2, seed=1)
    cut = [replace(c, finish_reason="abort") for c in finished[0]]
    sampling = SamplingParams(max_tokens=4, num_samples=2, seed=1)
    (made,) = engine.run(engine.engine.generate(PROMPTS[:1], sampling=sampling, begun=finished))
    assert made == finished[0]
    # An aborted completion of `max_tokens` tokens counts as finished.
    (made,) = engine.run(engine.engine.generate(PROMPTS[:1], sampling=sampling, begun=[cut]))
    assert [c.finish_reason for c in made] == ["length", "length"]
    assert tokens_of([made]) == tokens_of(finished)


def test_sequences_are_scored_beside_running_requests(engine):
    sequences = prompts_of([2, 1, 32, 150, 256, 64, 65], seed=9)

    async def run():
        # More requests than can run at once, and the sequences are in the cache.
        calls = asyncio.create_task(engine.engine.generate(PROMPTS * 4, sampling=LONG))
        await engine.engine.generate(sequences[:4], sampling=SamplingParams(max_tokens=1))
        scored = await engine.engine.compute_logprobs(sequences)
        assert not calls.done()
        again = await engine.engine.compute_logprobs(sequences)
        return scored, again, await calls

    scored, again, completions = engine.run(run())
    assert [len(logprobs) for logprobs in scored] == [2, 1, 32, 150, 256, 64, 65]
    for made in (scored, again):
        for tokens, logprobs in zip(sequences, made, strict=True):
            assert logprobs.dtype == np.float32
            np.testing.assert_allclose(logprobs, sequence_logprobs(OLD, tokens), atol=1e-5, rtol=0)
    # Not the tokens: two nearly equal logits may change places with the number of threads.
    for prompt, group in zip(PROMPTS * 4, completions, strict=True):
        for completion in group:
            expected = sequence_logprobs(OLD, np.concatenate([prompt, completion.token_ids]))[
                len(prompt) :
            ]
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)


@in_flight
def test_sequence_is_scored_by_one_version(engine):
    sequences = prompts_of([250, 200, 256], seed=9)

    async def run():
        # Scoring at 64 tokens a step takes longer than this short completion.
        few = asyncio.create_task(
            engine.engine.generate(PROMPTS[1:2], sampling=SamplingParams(max_tokens=6))
        )
        await after(engine, 1)
        scored = asyncio.create_task(engine.engine.compute_logprobs(sequences))
        await few
        await engine.update(NEW)
        assert not scored.done()
        return await scored

    by_new = []
    for tokens, logprobs in zip(sequences, engine.run(run()), strict=True):
        differences = [
            np.abs(logprobs - sequence_logprobs(model, tokens)).max() for model in (OLD, NEW)
        ]
        assert min(differences) <= 1e-5
        by_new.append(differences[1] <= 1e-5)
    assert any(by_new)
