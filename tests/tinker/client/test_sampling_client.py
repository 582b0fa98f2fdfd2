"""Samples and logprobs are those of the weights that a sampling client was made of."""

import asyncio
import pickle

import numpy as np
import pytest
from tinker import types

import rl.tinker as tinker
from tests.support.bigram_backend import NAME, VOCABULARY, log_softmax

TIMEOUT_S = 10
PROMPT = types.ModelInput.from_ints([1, 2, 3])
DATA = [
    types.Datum(
        model_input=types.ModelInput.from_ints([3, 4]),
        loss_fn_inputs={"target_tokens": [4, 5], "weights": [1.0, 1.0]},
    )
]


def step(training):
    training.forward_backward(DATA, "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1.0)).result(TIMEOUT_S)


def snapshot(training):
    return training.save_weights_and_get_sampling_client().result(TIMEOUT_S)


def sample(client, *, num_samples=1, seed=0, **params):
    params = types.SamplingParams(max_tokens=6, seed=seed, **params)
    return client.sample(PROMPT, num_samples, params).result(TIMEOUT_S).sequences


@pytest.fixture
def base(service):
    return service.create_sampling_client(base_model=NAME).result(TIMEOUT_S)


def test_a_snapshot_keeps_the_weights_that_it_was_made_of(backend, training):
    step(training)
    client = snapshot(training)
    before = [s.tokens for s in sample(client, num_samples=8)]
    seen = types.ModelInput.from_ints([3, 4, 5])
    logprobs = client.compute_logprobs(seen).result(TIMEOUT_S)
    step(training)
    assert [s.tokens for s in sample(client, num_samples=8)] == before
    assert client.compute_logprobs(seen).result(TIMEOUT_S) == logprobs
    later = snapshot(training).compute_logprobs(seen).result(TIMEOUT_S)
    assert all(new > old for new, old in zip(later[1:], logprobs[1:], strict=True))


def test_logprobs_are_of_the_distribution_that_was_sampled_from(backend, training):
    step(training)
    table = log_softmax(backend.models[training.model_id].table)
    for sequence in sample(snapshot(training), num_samples=4):
        came_from = [3, *sequence.tokens[:-1]]
        assert sequence.logprobs == pytest.approx(table[came_from, sequence.tokens].tolist())
        assert sequence.stop_reason == "length"


def test_a_stop_token_ends_a_sample_and_is_part_of_it(training):
    for _ in range(5):
        step(training)
    (sequence,) = sample(snapshot(training), stop=[5])
    assert (sequence.tokens, sequence.stop_reason) == ([4, 5], "stop")


def test_saved_weights_are_sampled_from_like_those_in_memory(service, training):
    step(training)
    path = training.save_weights_for_sampler("first").result(TIMEOUT_S).path
    assert path == f"tinker://{training.model_id}/sampler_weights/first"
    saved = service.create_sampling_client(model_path=path).result(TIMEOUT_S)
    of_model = training.create_sampling_client(path).result(TIMEOUT_S)
    expected = [s.tokens for s in sample(snapshot(training), num_samples=4)]
    assert [s.tokens for s in sample(saved, num_samples=4)] == expected
    assert [s.tokens for s in sample(of_model, num_samples=4)] == expected
    assert saved.get_base_model() == NAME


def test_every_sequence_has_an_id_of_its_own(base):
    sequences = [*sample(base, num_samples=3), *sample(base, num_samples=2)]
    assert len({s.sequence_id for s in sequences}) == 5


def test_the_base_model_is_sampled_from_and_scores_prompts(base):
    response = base.sample(
        PROMPT,
        1,
        types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
    ).result(TIMEOUT_S)
    chance = -np.log(VOCABULARY)
    assert response.prompt_logprobs == [None, pytest.approx(chance), pytest.approx(chance)]
    assert (
        response.topk_prompt_logprobs
        == [None] + [[(0, pytest.approx(chance)), (1, pytest.approx(chance))]] * 2
    )


def test_only_the_last_tokens_are_scored_where_only_they_are_asked_for(base):
    logprobs = base.compute_logprobs(PROMPT, prompt_logprobs_last_n=1).result(TIMEOUT_S)
    assert logprobs == [None, None, pytest.approx(-np.log(VOCABULARY))]
    with pytest.raises(ValueError, match="prompt_logprobs_last_n=3: must be 1 to 2"):
        base.compute_logprobs(PROMPT, prompt_logprobs_last_n=3)
    with pytest.raises(ValueError, match="needs include_prompt_logprobs=True"):
        base.sample(PROMPT, 1, types.SamplingParams(max_tokens=1), prompt_logprobs_last_n=1)


def test_many_samples_wait_together(base):
    futures = [base.sample(PROMPT, 1, types.SamplingParams(max_tokens=2)) for _ in range(200)]
    assert all(len(f.result(TIMEOUT_S).sequences[0].tokens) == 2 for f in futures)


def test_a_cancelled_sample_ends_its_work(backend, base):
    backend.go_on.clear()
    future = base.sample(PROMPT, 1, types.SamplingParams(max_tokens=2))
    assert backend.sampling.wait(TIMEOUT_S)

    async def give_up():
        with pytest.raises(TimeoutError):
            await future.result_async(timeout=0.01)

    asyncio.run(give_up())
    assert future.future().cancelled()
    assert backend.cancelled.wait(TIMEOUT_S)


def test_a_refused_sample_says_why(base):
    future = base.sample(types.ModelInput.empty(), 1, types.SamplingParams(max_tokens=1))
    with pytest.raises(tinker.BadRequestError, match="prompt is empty"):
        future.result(TIMEOUT_S)


@pytest.mark.parametrize(
    "option",
    [
        {"topk_sample_logprobs": 2},
        {"prompt_alt_tokens_k": 1},
        {"target_prompt_logprobs": types.TensorData(data=[1], dtype="int64", shape=[1, 1])},
    ],
)
def test_what_is_not_supported_is_named(base, option):
    with pytest.raises(ValueError, match=f"{next(iter(option))}=.* is not supported here"):
        base.sample(PROMPT, 1, types.SamplingParams(max_tokens=1), **option)


def test_a_client_stays_in_its_process(base):
    with pytest.raises(RuntimeError, match="cannot be used in another: start a server"):
        pickle.dumps(base)
    with pytest.raises(RuntimeError, match="handle='x' cannot be opened"):
        tinker.SamplingClient.from_sampler_handle("x")


def test_the_older_coroutines_give_results(base):
    async def use():
        with pytest.warns(FutureWarning, match="sample_async"):
            response = await base.sample_async(PROMPT, 1, types.SamplingParams(max_tokens=3))
        with pytest.warns(FutureWarning, match="compute_logprobs_async"):
            return response, await base.compute_logprobs_async(PROMPT)

    response, logprobs = asyncio.run(use())
    assert len(response.sequences[0].tokens) == 3
    assert logprobs[0] is None
