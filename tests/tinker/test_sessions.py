"""Sessions and the ids under them; start and close of the service."""

import asyncio
from unittest import mock

import pytest

from rl.tinker.service.service import CLOSE_TIMEOUT_S
from rl.tinker.types import GoneError, LimitReachedError, NotFoundError
from tests.support.fake_tinker import ME, YOU, service_test
from tests.support.virtual_time import now_s


@service_test()
async def test_finished_session_frees_its_models_and_samplers_and_fails_what_waits(client):
    session = client.session()
    model = client.model(session=session)
    sampler = await client.opened(model, 1, 0)
    gate = client.backend.hold("forward_backward")
    client.backend.hold("sample")
    running, waiting = client.add(model, 2, 2), client.add(model, 3, 3)
    sample = client.sample(sampler)
    await asyncio.sleep(1)

    client.finish(session)
    client.finish(session)
    for failure in [await client.failure(request) for request in (waiting, sample)]:
        assert (failure.category, "was finished" in failure.error) == ("user", True)
    for call in (
        lambda: client.add(model, 4, 4),
        lambda: client.service.sessions.find_live(session, ME),
        lambda: client.service.sampling.find_source(sampler, ME),
        lambda: client.model(session=session, number=1),
    ):
        with pytest.raises(GoneError):
            call()
    assert model in client.backend.weights  # running work is finished first
    gate.set()
    assert await client.loss(running) == 2
    await asyncio.sleep(1)
    assert client.backend.weights == client.backend.published == {}
    assert [one.streams for one in client.service.sessions._sessions.values()] == [{}]


@service_test(session_timeout_s=60)
async def test_idle_session_ends_and_any_call_keeps_it_alive(client):
    model = client.model()
    session = model.partition(":")[0]
    for call in (
        lambda: client.service.sessions.find_live(session, ME),
        lambda: client.service.training.find_live_stream(model, ME),
        lambda: client.add(model, 1, 1),
        lambda: client.now(client.service.retrieve, f"{model}:1", wait_s=0),
    ):
        await asyncio.sleep(50)
        call()
    await asyncio.sleep(50)
    assert model in client.backend.weights
    await asyncio.sleep(12)
    with pytest.raises(GoneError):
        client.service.sessions.find_live(session, ME)
    assert client.backend.weights == {}


@service_test()
async def test_session_belongs_to_its_owner_alone(client):
    service, stranger = client.service, client.of(YOU)
    mine = client.session()
    model = client.model(session=mine)
    for call in (
        lambda: service.sessions.find_live(mine, YOU),
        lambda: stranger.finish(mine),
        lambda: stranger.model(session=mine, number=1),
        lambda: stranger.add(model, 1, 1),
        lambda: service.training.find_live_stream(model, YOU),
        lambda: stranger.base_sampler(session=mine),
        lambda: service.sampling.find_source("nobody", ME),
        lambda: service.training.find_live_stream("nobody:train:0", ME),
        lambda: service.sessions.find_live(f"{mine}0", ME),
        lambda: service.sessions.find_live("\n", ME),
    ):
        with pytest.raises(NotFoundError, match="there is no"):
            call()
    with pytest.raises(NotFoundError):
        await service.retrieve(f"{model}:0", owner=YOU, wait_s=0)
    with pytest.raises(GoneError, match="its checkpoints are still there"):
        service.sessions.find_live("0" * 8 + mine[8:], ME)  # the id of an earlier process


@service_test(models=1)
async def test_limit_on_models_holds_per_owner_until_a_session_ends(client):
    first, second = client.session(), client.session()
    client.model(session=first)
    client.of(YOU).model()
    with pytest.raises(LimitReachedError, match="limit models: 1"):
        client.model(session=second)
    client.finish(first)
    await asyncio.sleep(1)
    client.model(session=second)


@mock.patch("rl.tinker.service.sessions.MAX_SESSIONS", 2)
@service_test(result_kept_s=60)
async def test_limit_on_sessions_holds_per_owner_and_ended_ones_are_forgotten_with_their_results(
    client,
):
    first, second = client.session(), client.session()
    with pytest.raises(LimitReachedError, match="has 2 sessions"):
        client.session()
    client.of(YOU).session()
    client.finish(first)
    third = client.session()
    await asyncio.sleep(59)
    with pytest.raises(GoneError):
        client.service.sessions.find_live(first, ME)
    await asyncio.sleep(2)
    with pytest.raises(NotFoundError):
        client.service.sessions.find_live(first, ME)
    assert {client.service.sessions.find_live(one, ME).session_id for one in (second, third)} == {
        second,
        third,
    }


@service_test()
async def test_close_wakes_waiting_callers_at_once_and_ends_in_time(client):
    service, backend = client.service, client.backend
    backend.hold("forward_backward")
    backend.hold("sample")
    model = client.model()
    sampler = client.base_sampler(session=model.partition(":")[0])
    requests = [client.add(model, 1, 1), client.add(model, 3, 3), client.sample(sampler)]
    waiting = [
        asyncio.create_task(service.retrieve(one, owner=ME, wait_s=1000)) for one in requests
    ]
    await asyncio.sleep(10)
    started_s = now_s()
    closing = [asyncio.create_task(service.close()) for _ in range(2)]
    done, _ = await asyncio.wait(waiting, timeout=0.5)
    assert (len(done), now_s() - started_s) == (3, 0)
    assert all(isinstance(task.exception(), GoneError) for task in waiting)
    await asyncio.gather(*closing)
    assert now_s() - started_s <= 2 * CLOSE_TIMEOUT_S
    assert (backend.is_open, +backend.num_sampling) == (False, {})
    with pytest.raises(GoneError):
        client.add(model, 4, 1)
