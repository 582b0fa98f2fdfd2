"""The endpoint over HTTP: retries and disconnections."""

from __future__ import annotations

import asyncio
import gc
import threading

import httpx
import pytest

from rl.agents.endpoint.episode import LONG_CHARS
from rl.agents.types import BadRequestError, RequestError
from tests.support.agent_endpoint import run_served, wait_until

HI = {"role": "user", "content": "Hi"}


def test_same_bytes_are_answered_once():
    async def scenario(served):
        first, second = await served.chat(HI), await served.chat(HI)
        assert first == second
        assert len(served.generator.calls) == 1
        assert served.episode.counts["retries"] == 1

    run_served(scenario)


def test_a_retry_waits_for_the_reply_under_way():
    async def scenario(served):
        served.generator.go_on = asyncio.Event()
        first = asyncio.create_task(served.chat(HI, headers={"x_stainless_retry_count": "0"}))
        await wait_until(lambda: served.generator.calls)
        second = asyncio.create_task(served.chat(HI, headers={"x_stainless_retry_count": "1"}))
        await wait_until(lambda: served.episode.counts["retries"])
        served.generator.go_on.set()
        assert await first == await second
        assert len(served.generator.calls) == 1

    run_served(scenario)


def test_equal_first_tries_at_the_same_time_are_samples_of_their_own():
    async def scenario(served):
        served.generator.go_on = asyncio.Event()
        headers = {"x_stainless_retry_count": "0"}
        asking = [asyncio.create_task(served.chat(HI, headers=headers)) for _ in range(3)]
        await wait_until(lambda: len(served.generator.calls) == 3)
        served.generator.go_on.set()
        await asyncio.gather(*asking)
        assert len({sampling.seed for _, sampling in served.generator.calls}) == 3
        assert served.episode.counts["retries"] == 0

    run_served(scenario)


def test_retries_of_equal_requests_get_the_replies_of_those_whose_clients_have_gone():
    async def scenario(served):
        def ask(tries):
            headers = {"x_stainless_retry_count": tries}
            return asyncio.create_task(served.chat(HI, headers=headers))

        served.generator.go_on = asyncio.Event()
        first = [ask("0") for _ in range(3)]
        await wait_until(lambda: len(served.generator.calls) == 3)
        for asking in first[:2]:
            asking.cancel()
        await wait_until(lambda: served.episode.counts["disconnects"] == 2)
        again = [ask("1") for _ in range(2)]
        await wait_until(lambda: served.episode.counts["retries"] == 2)
        served.generator.go_on.set()
        replies = await asyncio.gather(first[2], *again)
        assert len({reply["id"] for reply in replies}) == 3
        assert len(served.generator.calls) == 3

    run_served(scenario)


def test_the_end_of_an_episode_cancels_all_of_equal_requests():
    async def scenario(served):
        served.generator.go_on = asyncio.Event()
        headers = {"x_stainless_retry_count": "0"}
        body = {"model": "m", "messages": [HI]}
        asking = [served.post("/v1/chat/completions", body, **headers) for _ in range(3)]
        answers = asyncio.gather(*asking)
        await wait_until(lambda: len(served.generator.calls) == 3)
        served.endpoint.end(served.episode)
        assert [answer.status_code for answer in await answers] == [409] * 3
        assert served.generator.cancelled == 3

    run_served(scenario)


def test_an_answer_is_given_three_times_to_a_client_that_does_not_count():
    async def scenario(served):
        replies = [await served.chat(HI) for _ in range(4)]
        assert replies[0] == replies[1] == replies[2] != replies[3]
        assert len(served.generator.calls) == 2

    run_served(scenario)


def test_refused_requests_are_not_kept():
    async def scenario(served):
        for number in range(5):
            body = {"model": "m", "messages": [{"role": "user", "content": "x" * (300 + number)}]}
            assert (await served.post("/v1/chat/completions", body)).status_code == 400
        await wait_until(lambda: not served.episode._replies)

    run_served(scenario, max_context=100)


def test_a_first_try_after_a_delivered_reply_is_another_sample():
    async def scenario(served):
        for _ in range(2):
            await served.chat(HI, headers={"x_stainless_retry_count": "0"})
        assert len(served.generator.calls) == 2
        seeds = [sampling.seed for _, sampling in served.generator.calls]
        assert seeds[0] != seeds[1]

    run_served(scenario)


def test_idempotency_key_names_the_request():
    async def scenario(served):
        headers = {"idempotency_key": "a", "x_stainless_retry_count": "0"}
        # More often than a request without a name.
        replies = [await served.chat(HI, headers=headers) for _ in range(5)]
        assert all(reply == replies[0] for reply in replies)
        assert len(served.generator.calls) == 1

    run_served(scenario)


def test_idempotency_key_with_another_body_is_refused():
    async def scenario(served):
        await served.chat(HI, headers={"idempotency_key": "a"})
        body = {"model": "any", "messages": [HI], "temperature": 0.5}
        answer = await served.post("/v1/chat/completions", body, idempotency_key="a")
        assert answer.status_code == 422
        assert answer.json()["error"]["code"] == "idempotency_key_reused"
        assert "with another body" in answer.json()["error"]["message"]
        again = await served.post("/v1/chat/completions", body, idempotency_key="b")
        assert again.status_code == 200

    run_served(scenario)


def test_a_client_that_times_out_and_asks_again_gets_the_first_reply():
    async def scenario(served):
        served.generator.go_on = asyncio.Event()
        with pytest.raises(httpx.ReadTimeout):
            await served.http.post(
                f"{served.url}/v1/chat/completions",
                json={"model": "any", "messages": [HI]},
                headers={"x-api-key": served.key},
                timeout=0.2,
            )
        await wait_until(lambda: served.episode.counts["disconnects"])
        again = asyncio.create_task(served.chat(HI))
        await wait_until(lambda: served.episode.counts["retries"])
        served.generator.go_on.set()
        await again
        assert len(served.generator.calls) == 1
        assert served.generator.cancelled == 0

    run_served(scenario)


def test_a_client_that_comes_back_in_time_after_each_timeout_gets_its_reply(monkeypatch):
    monkeypatch.setattr("rl.agents.endpoint.retries.GRACE_S", 0.4)

    async def scenario(served):
        served.generator.go_on = asyncio.Event()
        # The time of the first absence, had it gone on, would end in the second one.
        counts = served.episode.counts
        for number in range(2):
            before = number
            asking = asyncio.create_task(served.chat(HI))
            await wait_until(lambda: counts["requests"])
            await wait_until(lambda: counts["retries"] == before)  # noqa: B023  (in this round)
            asking.cancel()
            await wait_until(lambda: counts["disconnects"] > before)  # noqa: B023
            await asyncio.sleep(0.25)
        asking = asyncio.create_task(served.chat(HI))
        await wait_until(lambda: served.episode.counts["retries"] == 2)
        served.generator.go_on.set()
        await asking
        assert (len(served.generator.calls), served.generator.cancelled) == (1, 0)

    run_served(scenario)


def test_a_reply_that_no_client_has_got_is_superseded():
    async def scenario(served):
        def list_roles():
            branches = served.episode.list_conversations(trained=("main",)).branches
            return [(branch.role, branch.is_trained) for branch in branches]

        served.generator.go_on = asyncio.Event()
        asking = asyncio.create_task(served.chat(HI))
        await wait_until(lambda: served.generator.calls)
        asking.cancel()
        await wait_until(lambda: served.episode.counts["disconnects"])
        served.generator.go_on.set()
        await wait_until(lambda: served.episode.record.turns)
        assert list_roles() == [("superseded", False)]
        await served.chat(HI)
        assert list_roles() == [("main", True)]
        assert len(served.generator.calls) == 1

    run_served(scenario)


def test_a_client_that_is_gone_cancels_its_reply(monkeypatch):
    monkeypatch.setattr("rl.agents.endpoint.retries.GRACE_S", 0.05)

    async def scenario(served):
        served.generator.go_on = asyncio.Event()
        asking = asyncio.create_task(served.chat(HI))
        await wait_until(lambda: served.generator.calls)
        asking.cancel()
        await wait_until(lambda: served.generator.cancelled)
        assert served.episode.list_conversations(trained=()).turns == ()

    run_served(scenario)


def test_the_end_of_an_episode_that_a_leaving_client_is_not_told_of_is_not_logged(
    caplog, monkeypatch
):
    asked, refused = asyncio.Event(), asyncio.Event()

    async def reply(*_, **options):
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            refused.set()
            raise RequestError("the episode has ended", status=409)

    async def scenario(served):
        monkeypatch.setattr(served.episode, "reply", reply)
        asking = asyncio.create_task(served.chat(HI))
        await asked.wait()
        asking.cancel()
        await refused.wait()

    run_served(scenario)
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_an_error_of_a_long_request_whose_client_has_gone_is_not_logged(caplog, monkeypatch):
    monkeypatch.setattr("rl.agents.endpoint.retries.GRACE_S", 0)
    asked, go_on = threading.Event(), threading.Event()

    def refuse(*_, **options):
        asked.set()
        assert go_on.wait(10)
        raise BadRequestError("no such prompt")

    monkeypatch.setattr("rl.agents.endpoint.episode.plan_turn", refuse)

    async def scenario(served):
        long = {"role": "user", "content": "x" * (LONG_CHARS + 1)}
        asking = asyncio.create_task(served.chat(long))
        await wait_until(asked.is_set)
        asking.cancel()
        await wait_until(lambda: not served.episode._replies)
        go_on.set()
        async with served.episode._recording:
            pass  # The thread has ended.

    run_served(scenario)
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]
