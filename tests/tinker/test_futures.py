"""Futures: waiting for results, keeping results."""

import asyncio

import pytest

from rl.tinker.futures import SMALL_BYTES
from rl.tinker.types import BusyError, GoneError
from tests.support.fake_tinker import ME, service_test
from tests.support.virtual_time import now_s


@service_test()
async def test_all_waiting_callers_get_the_result(client):
    gate = client.backend.hold("forward_backward")
    request = client.add(client.model(), 1, 5)
    assert await client.service.retrieve(request, owner=ME, wait_s=0) is None
    assert now_s() == 0
    assert await client.service.retrieve(request, owner=ME, wait_s=20) is None
    assert now_s() == 20
    waiting = [asyncio.create_task(client.result(request)) for _ in range(3)]
    await asyncio.sleep(4)
    gate.set()

    assert [result.metrics["loss:sum"] for result in await asyncio.gather(*waiting)] == [5, 5, 5]
    assert now_s() == 24


@service_test(result_kept_s=60)
async def test_result_is_kept_for_a_time(client):
    request = client.add(client.model(), 1, 5)
    first = await client.result(request)
    await asyncio.sleep(59)
    assert await client.result(request) is first
    await asyncio.sleep(2)
    with pytest.raises(GoneError, match="ended more than 60 s ago"):
        await client.result(request)


@service_test(result_bytes=3 * (SMALL_BYTES + 200))
async def test_limit_on_results_evicts_the_oldest_except_for_who_waits(client):
    model = client.model()
    created = asyncio.create_task(client.result(f"{model}:0"))
    requests = [client.add(model, seq_id, seq_id) for seq_id in (1, 2, 3, 4, 5)]
    await asyncio.sleep(1)
    for request in requests[:2]:
        with pytest.raises(GoneError, match="too many newer results"):
            await client.result(request)
    assert [(await client.result(one)).metrics["loss:sum"] for one in requests[2:]] == [3, 4, 5]
    assert (await created).model_id == model


@service_test(waiting_bytes=SMALL_BYTES + 200)
async def test_waiting_requests_are_counted_in_bytes(client):
    client.backend.hold("forward_backward")
    model = client.model()
    await client.result(f"{model}:0")
    client.add(model, 1, *range(20))
    with pytest.raises(BusyError, match="limit waiting_bytes: this request"):
        client.add(model, 2, 1)
