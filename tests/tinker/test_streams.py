"""Order, repetition and gaps of one model's requests, in virtual time."""

import asyncio

import pytest
from tinker.types import RequestErrorCategory, RequestFailedResponse

from rl.tinker.service.futures import REQUEST_BYTES, SMALL_BYTES
from rl.tinker.types import BusyError, GoneError, InvalidRequestError
from tests.support.fake_tinker import YOU, service_test, settled
from tests.support.virtual_time import now_s


@service_test(result_kept_s=5)
async def test_repeated_request_is_done_once_even_after_its_result_was_evicted(client):
    model = client.model()
    first = client.add(model, 1, 5)
    assert client.add(model, 1, 7) == first  # while it waits
    assert await client.loss(first) == 5
    assert client.add(model, 1, 7) == first  # when it is done
    await asyncio.sleep(6)
    assert client.add(model, 1, 5) == first
    with pytest.raises(GoneError):
        await client.result(first)
    await client.result(client.step(model, 2))

    assert client.backend.names("delete_model") == [
        "create_model",
        "forward_backward",
        "optim_step",
    ]


@service_test(gap_timeout_s=30)
async def test_requests_behind_a_gap_fail_in_time_and_later_ones_run(client):
    model = client.model()
    await client.result(client.add(model, 1, 100))
    started_s = now_s()
    await asyncio.sleep(7)
    behind = [client.add(model, 3, 3), client.step(model, 5)]
    failures = [await client.result(one, wait_s=60) for one in behind]

    assert now_s() - started_s == pytest.approx(7 + 30)
    for failure in failures:
        assert isinstance(failure, RequestFailedResponse)
        assert failure.category == "user"
        assert f"seq_id 2 of {model} did not come within 30 s" in failure.error
    with pytest.raises(GoneError, match="came after it was given up"):
        await client.result(client.add(model, 2, 2))
    with pytest.raises(InvalidRequestError, match="token id -1"):  # and not a promise of an answer
        client.add(model, 2, -1)
    client.add(model, 6, 6)
    # Neither the 100 requests before the gap nor the 3 behind it.
    assert await client.weight(client.step(model, 7)) == -6
    called = ["create_model", "forward_backward", "drop_gradient", "forward_backward", "optim_step"]
    assert client.backend.names("delete_model") == called


@service_test(gap_timeout_s=30)
async def test_requests_run_in_the_order_of_their_seq_ids_if_gaps_close_in_time(client):
    gate = client.backend.hold("create_model")
    model = client.model()
    behind = client.add(model, 2, 2)
    await asyncio.sleep(100)  # work in progress is no gap
    gate.set()
    await asyncio.sleep(29)
    client.add(model, 1, 1)
    step = client.step(model, 4)
    await asyncio.sleep(29)  # the next gap has a timeout of its own
    client.add(model, 3, 3)

    assert await client.loss(behind) == 2
    assert await client.weight(step) == -(1 + 2 + 3)
    added = [f"forward_backward 0 [{i}]" for i in (1, 2, 3)]
    assert client.backend.calls == ["create_model 0", *added, "optim_step 0"]


@service_test()
async def test_failed_request_does_not_stop_later_ones_and_reveals_no_internals(client):
    model = client.model()
    client.backend.fail("forward_backward", InvalidRequestError("data[0]: no"))
    client.backend.fail("forward_backward", RuntimeError("/secret/path exploded"))
    first, second, third = [
        await client.result(one)
        for one in [client.add(model, seq_id, seq_id) for seq_id in (1, 2, 3)]
    ]

    assert first == RequestFailedResponse(error="data[0]: no", category=RequestErrorCategory.User)
    assert second.category == "server"
    assert "secret" not in second.error
    assert third.metrics["loss:sum"] == 3


@service_test()
async def test_refused_request_uses_up_its_seq_id(client):
    model = client.model()
    with pytest.raises(InvalidRequestError, match=r"data\[0\].model_input: has token id -1"):
        client.add(model, 1, -1)

    assert await client.loss(client.add(model, 2, 3)) == 3
    assert "token id -1" in (await client.failure(client.add(model, 1, -1))).error
    assert now_s() == 0
    for seq_id in (0, -1, 2**63, None):
        with pytest.raises(
            InvalidRequestError, match=f"seq_id={seq_id}: must be a whole number from 1"
        ):
            client.step(model, seq_id)


@service_test(all_held_bytes=3 * (REQUEST_BYTES + 200))
async def test_owner_at_the_limit_may_send_the_request_that_others_wait_for(client):
    model = client.model()
    await client.result(f"{model}:0")
    behind = [client.add(model, seq_id, seq_id) for seq_id in (2, 3, 4)]
    with pytest.raises(BusyError, match="limit all_held_bytes"):
        client.add(model, 5, 5)
    client.of(YOU).model()  # It has less than its share.
    first = client.add(model, 1, 1)

    sums = [await client.loss(one) for one in (first, *behind)]
    assert sums == [1, 2, 3, 4]
    assert await client.loss(client.add(model, 5, 5)) == 5


@service_test()
async def test_incomplete_batch_is_never_stepped(client):
    model = client.model()
    later = client.step(model, 4)
    client.add(model, 1, 5)
    client.backend.fail("forward_backward", InvalidRequestError("the loss is not finite"))
    client.add(model, 3, 7)
    with pytest.raises(InvalidRequestError):
        client.add(model, 2)
    missing = await client.failure(later)
    client.add(model, 5, 2)

    assert missing.category == "user"
    assert "forward_backward with seq_id 1, 2 failed" in missing.error
    assert await client.weight(client.step(model, 6)) == -2


@service_test(all_held_bytes=3 * (SMALL_BYTES + 200))
async def test_limit_on_results_evicts_the_oldest_except_for_who_waits(client):
    model = client.model()
    created = asyncio.create_task(client.result(f"{model}:0"))
    requests = []
    for seq_id in (1, 2, 3, 4, 5):
        await settled()  # A waiting request alone has more bytes than the limit.
        requests.append(client.add(model, seq_id, seq_id))
    await settled()
    for request in requests[:2]:
        with pytest.raises(GoneError, match="too many newer results"):
            await client.result(request)
    assert [await client.loss(one) for one in requests[2:]] == [3, 4, 5]
    assert (await created).model_id == model
