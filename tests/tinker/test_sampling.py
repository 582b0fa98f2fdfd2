"""Sampling sessions, when their weights close, and which requests are valid."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tinker.types import RequestErrorCategory, RequestFailedResponse

from rl.tinker.service.futures import REQUEST_BYTES, SMALL_BYTES
from rl.tinker.types import BusyError, GoneError, InvalidRequestError, NotFoundError
from rl.tinker.wire.codec import check_sample
from tests.support.fake_tinker import BASE, YOU, prompt, service_test, settled


@service_test()
async def test_snapshot_keeps_the_weights_of_its_place_in_the_stream(client):
    model = client.model()
    session = model.partition(":")[0]
    requests = [client.snapshot(model, 1, 0)]
    for step in (1, 2):
        client.add(model, 3 * step - 1, 5)
        client.step(model, 3 * step)
        requests.append(client.snapshot(model, 3 * step + 1, step))
    ids = [(await client.result(request)).sampling_session_id for request in requests]
    base = client.base_sampler(9, session)

    assert ids == [f"{session}:sample:{n}" for n in range(3)]
    assert [await client.token(one) for one in (*ids, base)] == [0, -5, -10, 0]


@service_test()
async def test_repeated_sample_is_done_once_and_weights_that_failed_to_open_are_tried_again(client):
    session = client.session()
    sampler = client.base_sampler(3, session)
    client.backend.fail("open", RuntimeError("no memory"))
    assert (await client.failure(client.sample(sampler))).category == "server"
    assert client.base_sampler(3, session) == sampler
    first = client.sample(sampler, 7, prompt(1, num_samples=3))
    assert client.sample(sampler, 7, prompt(2, num_samples=3)) == first
    assert len((await client.result(first)).sequences) == 3
    assert client.backend.names() == ["open", "open", "sample"]
    with pytest.raises(
        InvalidRequestError, match="num_samples=1025: must be 1 to 1024"
    ):  # also when repeated
        client.sample(sampler, 7, prompt(1, num_samples=1025))


@service_test(virtual=False, samplers=1)
async def test_saved_weights_open_with_a_sample_are_shared_and_close_for_others(client):
    model = client.model()
    client.add(model, 1, 4)
    client.step(model, 2)
    path = await client.saved_sampler(model, 3, "step-1")
    service, backend = client.service, client.backend
    ids = [client.create_sampler(client.session(), n, model_path=path) for n in range(2)]
    assert "open" not in backend.names()
    assert await asyncio.gather(*map(client.token, ids)) == [-4, -4]
    assert [client.now(service.sampling.get_sampler, one).model_path for one in ids] == [path, path]
    assert backend.names().count("open") == 1
    second = await client.saved_sampler(model, 4, "s2")
    other = client.create_sampler(model.partition(":")[0], 0, model_path=second)
    for seq_id, one in enumerate((other, ids[0]), 1):
        await client.token(one, seq_id)
        await settled()
        assert len(backend.published) == 1
    assert backend.names().count("open") == 3
    for one, num_open in zip(ids, (1, 0), strict=True):
        client.finish(one.partition(":")[0])
        await settled()
        assert len(backend.published) == num_open


@service_test(samplers=2)
async def test_least_recently_used_snapshot_closes_once_its_samples_have_ended(client):
    gate = client.backend.hold("sample")
    model, other = client.model(), client.of(YOU).model()
    first = await client.opened(model, 1, 0)
    await client.of(YOU).opened(other, 1, 1)
    running = client.sample(first)
    second, third = [await client.opened(model, number, number) for number in (2, 3)]
    await asyncio.sleep(1)
    with pytest.raises(GoneError, match="limit samplers"):
        client.sample(second)
    gate.set()
    await client.result(running)
    assert [await client.token(one, 9) for one in (first, third)] == [0, 0]
    await asyncio.sleep(1)
    assert len(client.backend.published) == 3  # two of this owner, and one of the other


@service_test()
async def test_without_room_in_the_backend_the_owners_oldest_unused_snapshot_closes(client):
    client.backend.max_published = 3
    model, other = client.model(), client.of(YOU).model()
    await client.of(YOU).opened(other, 1, 9)
    first, second = [await client.opened(model, n, n) for n in (1, 2)]
    gate = client.backend.hold("sample")
    running = client.sample(first)
    third = await client.opened(model, 3, 3)
    with pytest.raises(GoneError, match="there are 3 snapshots"):
        client.sample(second)
    client.sample(third)
    assert "there are 3 snapshots" in (await client.failure(client.snapshot(model, 4, 4))).error
    gate.set()
    await client.result(running)
    assert [await client.token(one, 9) for one in (first, third)] == [0, 0]
    assert len(client.backend.published) == 3


@service_test()
async def test_second_snapshot_under_one_id_is_refused_and_closed(client):
    session = client.session()
    models = [client.model(session=session, number=number) for number in (0, 1)]
    gate = client.backend.hold("publish")
    first, second = (client.snapshot(model, 1, 7) for model in models)
    await settled()
    assert client.backend.names().count("publish") == 2
    gate.set()
    assert (await client.result(first)).sampling_session_id == f"{session}:sample:7"
    assert "there is a sampling session" in (await client.failure(second)).error
    await settled()
    assert len(client.backend.published) == 1


@service_test(virtual=False)
async def test_weights_replaced_before_the_first_sample_fail_it(client):
    model = client.model()
    path = await client.saved_sampler(model, 1, "same")
    session = model.partition(":")[0]
    old = client.create_sampler(session, 0, model_path=path)
    client.add(model, 2, 3)
    client.step(model, 3)
    assert await client.saved_sampler(model, 4, "same") == path
    new = client.create_sampler(session, 1, model_path=path)
    await client.failure(client.sample(old))
    assert await client.token(new) == -3


@service_test(virtual=False)
async def test_sources_that_cannot_be_sampled_from_are_refused(client):
    model = client.model()
    session = model.partition(":")[0]
    state = await client.saved(model, 1, "state")
    path = await client.saved_sampler(model, 2, "sampler")

    for said, source in (
        ("base_model=None: must be 'tiny'", {}),
        ("base_model='huge': must be 'tiny'", {"base_model": "huge"}),
        ("has weights for training", {"model_path": state}),
        ("base_model='other': must be 'tiny'", {"model_path": path, "base_model": "other"}),
        ("must have the form tinker://", {"model_path": path + "/.."}),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            client.create_sampler(session, 5, **source)
    stranger = client.of(YOU)
    for one, own, missing in ((client, session, f"{path}x"), (stranger, stranger.session(), path)):
        with pytest.raises(NotFoundError, match="there is no checkpoint"):
            one.create_sampler(own, 5, model_path=missing)
    with pytest.raises(NotFoundError):
        client.sample(client.create_sampler(session, 5, base_model="tiny")[:-1] + "6")


def test_call_is_translated_with_its_defaults():
    base = replace(BASE, stop_token_ids=(7,))
    request = check_sample(prompt(1, 2, 3), base)
    assert (request.sampling.max_tokens, request.sampling.stop_token_ids) == (97, (7,))
    assert request.sampling.seed is not None
    request = check_sample(prompt(1, max_tokens=5, stop=["a", "b"], seed=3, top_k=0), base)
    assert (request.sampling.max_tokens, request.sampling.seed, request.sampling.top_k) == (5, 3, 0)
    assert (request.sampling.stop_token_ids, request.sampling.stop_texts) == ((), ("a", "b"))
    request = check_sample(prompt(1, temperature=0.5, top_p=0.9, top_k=40, num_samples=3), base)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.num_samples) == (
        0.5,
        0.9,
        40,
        3,
    )
    assert check_sample(prompt(1, top_k=-1), base).sampling.top_k == 0
    assert check_sample(prompt(1, stop=[]), base).sampling.stop_token_ids == ()
    full = check_sample(prompt(*range(100), prompt_logprobs=True), base)
    assert full.sampling.max_tokens == 0
    with pytest.raises(InvalidRequestError, match="temperature"):
        check_sample(prompt(1, temperature=0.001), replace(BASE, min_temperature=0.01))


@pytest.mark.parametrize(
    ("tokens", "fields", "said"),
    [
        ([], {}, "prompt: has 0 tokens: must be 1 to 99"),
        ([1] * 100, {}, "prompt is too long: 100 tokens > 99 maximum; the model's context has 100"),
        ([1, 1000], {}, "prompt: has token id 1000: must be 0 to 999"),
        ([-1], {}, "prompt: has token id -1: must be 0 to 999"),
        ([1], {"num_samples": 0}, "num_samples=0: must be 1 to 1024"),
        ([1], {"topk_prompt_logprobs": 1001}, "topk_prompt_logprobs=1001: must be 0 to 1000"),
        (
            [1],
            {"max_tokens": 0},
            "sampling_params.max_tokens=0: must be a finite number of at least 1",
        ),
        (
            [1],
            {"temperature": -0.1},
            "sampling_params.temperature, unless it is 0=-0.1: must be 1e-30 to",
        ),
        ([1], {"top_p": 0.0}, "sampling_params.top_p=0.0: must be 1e-30 to 1"),
        ([1], {"seed": 2**63}, "sampling_params.seed=9223372036854775808: must be 0 to"),
        ([1], {"stop": ["a", ""]}, "sampling_params.stop: has an empty text"),
        ([1], {"stop": [1, 10**30]}, "sampling_params.stop: has token id 1" + "0" * 30),
        ([1], {"model_path": "tinker://x"}, "model_path: 'tinker://x' is not supported"),
    ],
)
def test_invalid_field_of_a_sample_is_named(tokens, fields, said):
    with pytest.raises(InvalidRequestError) as error:
        check_sample(prompt(*tokens, **fields), BASE)
    assert said in str(error.value)


@service_test()
async def test_cancelled_sample_ends_its_work_and_fails(client):
    client.backend.hold("sample")
    sampler = client.base_sampler()
    running, unstarted = client.sample(sampler, 0), client.sample(sampler, 1)
    client.now(client.service.cancel_future, unstarted)
    await settled()
    assert sum(client.backend.num_sampling.values()) == 1
    client.now(client.service.cancel_future, running)
    cancelled = RequestFailedResponse(error="it was cancelled", category=RequestErrorCategory.User)
    assert [await client.failure(one) for one in (running, unstarted)] == [cancelled] * 2
    await settled()
    client.now(client.service.cancel_future, running)  # without effect
    assert sum(client.backend.num_sampling.values()) == 0
    with pytest.raises(InvalidRequestError, match="only samples can be cancelled"):
        client.now(client.service.cancel_future, client.add(client.model(), 1, 5))
    with pytest.raises(NotFoundError):
        client.of(YOU).now(client.service.cancel_future, running)


@service_test(all_held_bytes=2 * REQUEST_BYTES + 9 * SMALL_BYTES)
async def test_waiting_samples_count_each(client):
    client.backend.hold("sample")
    sampler = client.base_sampler()
    client.sample(sampler, 0, prompt(1, num_samples=4))
    with pytest.raises(BusyError, match="limit all_held_bytes"):
        client.sample(sampler, 1, prompt(1, num_samples=5))
    client.sample(sampler, 1, prompt(1, num_samples=4))
