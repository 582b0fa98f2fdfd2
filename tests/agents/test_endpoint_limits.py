"""The endpoint over HTTP: limits of an episode, and errors."""

from __future__ import annotations

import asyncio
import json

import cloudpickle
import numpy as np
import pytest

from rl.agents.endpoint.queue import QueuedGenerator
from rl.agents.settings import ClientRules
from rl.types import Message, SamplingParams
from tests.support.agent_endpoint import make_qwen_renderer, run_served, wait_until

HI = {"role": "user", "content": "Hi"}


def test_an_ended_episode_is_a_409():
    async def scenario(served):
        served.endpoint.end(served.episode)
        answer = await served.post("/v1/messages", {"model": "m", "messages": [HI]})
        assert answer.status_code == 409
        assert answer.json() == {
            "type": "error",
            "error": {"type": "conflict_error", "message": "the episode has ended"},
        }

    run_served(scenario)


@pytest.mark.parametrize("num_more", [0, 1])
def test_a_prompt_beyond_the_context_is_recognised_by_agents(num_more):
    num_frame = len(make_qwen_renderer().opening([Message(role="user", content="")]))
    num = 100 + num_more

    async def scenario(served):
        long = {"role": "user", "content": "x" * (num - num_frame)}
        answer = await served.post("/v1/chat/completions", {"model": "m", "messages": [long]})
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == "messages"
        assert f"prompt is too long: {num} tokens > 99 maximum" in error["message"]

    run_served(scenario, max_context=100)


def test_reply_is_cut_to_what_is_left_or_refused():
    async def scenario(served):
        reply = await served.chat(HI, max_tokens=16_384)
        assert served.generator.calls[0][1].max_tokens == 64
        assert reply["choices"][0]["finish_reason"] == "stop"
        cut_off = await served.chat(HI, max_tokens=2)
        assert cut_off["choices"][0]["finish_reason"] == "length"

    run_served(scenario)

    async def refused(served):
        body = {"model": "m", "messages": [HI], "max_tokens": 65}
        answer = await served.post("/v1/chat/completions", body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "max_tokens"

    run_served(refused, rules=ClientRules(refuses_long_replies=True))


def test_number_of_replies_is_limited():
    async def scenario(served):
        await served.chat(HI)
        answer = await served.post("/v1/chat/completions", {"model": "m", "messages": [HI, HI]})
        assert answer.status_code == 403
        assert "its 1 replies" in answer.json()["error"]["message"]
        assert served.episode.reached == "turns"

    run_served(scenario, max_requests=1)


def test_replies_under_way_count_as_replies():
    async def scenario(served):
        served.generator.go_on = asyncio.Event()
        headers = {"x_stainless_retry_count": "0"}
        body = {"model": "m", "messages": [HI]}
        asking = [served.post("/v1/chat/completions", body, **headers) for _ in range(5)]
        tasks = [asyncio.create_task(one) for one in asking]
        await wait_until(lambda: sum(task.done() for task in tasks) == 3)
        served.generator.go_on.set()
        answers = await asyncio.gather(*tasks)
        assert sorted(answer.status_code for answer in answers) == [200, 200, 403, 403, 403]

    run_served(scenario, max_requests=2)


def test_refused_requests_use_up_no_replies_and_are_limited_by_themselves(monkeypatch):
    monkeypatch.setattr("rl.agents.endpoint.episode.UNANSWERED_AT_LEAST", 2)

    async def ask(served, content):
        body = {"model": "m", "messages": [{"role": "user", "content": content}]}
        answer = await served.post("/v1/chat/completions", body)
        return answer.status_code, answer.json().get("error", {}).get("message", "")

    async def scenario(served):
        for number in range(11):
            assert (await ask(served, "x" * (200 + number)))[0] == 400
        assert (await ask(served, "Hi"))[0] == 200
        assert "its 1 replies" in (await ask(served, "Ho"))[1]

    async def loop(served):
        for number in range(12):
            await ask(served, "x" * (200 + number))
        assert await ask(served, "Hi") == (
            403,
            "the episode has had 12 requests without a reply, its limit",
        )
        assert served.episode.reached is None

    run_served(scenario, max_context=100, max_requests=1)
    run_served(loop, max_context=100, max_requests=1)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", b"{", 400),
        ("/v1/responses", {"input": "Hi", "bogus": 1}, 400),
        ("/v1/messages", {"messages": ["x" * 500]}, 413),
        ("/v1/messages/count_tokens", {"messages": []}, 400),
    ],
)
def test_requests_that_cannot_be_read_are_limited(path, body, status, monkeypatch):
    monkeypatch.setattr("rl.agents.endpoint.episode.UNANSWERED_AT_LEAST", 2)

    async def scenario(served):
        for _ in range(12):
            assert (await served.post(path, body)).status_code == status
        answer = await served.post(path, body)
        assert answer.status_code == 403
        assert "12 requests without a reply" in answer.json()["error"]["message"]
        assert (await served.post("/v1/reward", {"reward": 1})).status_code == 200

    run_served(scenario, max_requests=1, max_body_bytes=400)


def test_a_name_that_another_request_has_had_counts_as_refused():
    async def scenario(served):
        for _ in range(2):
            await served.chat(HI, headers={"idempotency_key": "a"})
        body = {"model": "m", "messages": [HI, HI]}
        answer = await served.post("/v1/chat/completions", body, idempotency_key="a")
        assert answer.status_code == 422
        assert served.episode.counts["requests"] == 2

    run_served(scenario)


def test_tokens_of_all_turns_are_limited():
    async def scenario(served):
        await served.chat(HI)
        answer = await served.post("/v1/chat/completions", {"model": "m", "messages": [HI, HI]})
        assert answer.status_code == 403
        assert served.episode.reached == "tokens"

    run_served(scenario, max_tokens=50)


def test_tokens_of_replies_under_way_count_and_are_given_back():
    async def scenario(served):
        served.generator.go_on = asyncio.Event()
        body = {"model": "m", "max_tokens": 20}
        asking = []
        for number in range(8):
            messages = [HI, {"role": "user", "content": str(number)}]
            asking.append(served.post("/v1/chat/completions", body | {"messages": messages}))
        answers = asyncio.gather(*asking)
        # A prompt has 30 tokens: two with their replies may have 100 of 140.
        await wait_until(lambda: served.episode._num_under_way == 8)
        await wait_until(lambda: len(served.generator.calls) == 2)
        served.generator.go_on.set()
        assert sorted(answer.status_code for answer in await answers) == [200] * 3 + [403] * 5
        # The third waits, and may have as many tokens as without the others at the same time.
        assert [sampling.max_tokens for _, sampling in served.generator.calls] == [20] * 3
        assert served.episode.record.num_tokens == 3 * (30 + 7)
        assert served.episode.reached == "tokens"

    run_served(scenario, max_tokens=140)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [HI], "logit_bias": {"1": 2}}, "logit_bias"),
        ({"messages": [HI], "tools": [{"type": "function"}]}, "tools[0].function"),
        ({"messages": [HI, {"role": "assistant", "content": "a"}]}, "messages"),
    ],
)
def test_bad_fields_are_named(body, field):
    async def scenario(served):
        answer = await served.post("/v1/chat/completions", {"model": "m"} | body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field

    run_served(scenario)


def test_a_large_body_an_invalid_one_and_an_unknown_path_are_refused():
    async def scenario(served):
        large = await served.post("/v1/chat/completions", b"x" * 200)
        broken = await served.post("/v1/responses", b"{")
        unknown = await served.post("/v1/embeddings", {})
        assert [large.status_code, broken.status_code, unknown.status_code] == [413, 400, 404]
        for answer in (large, broken, unknown):
            assert answer.json()["error"]["message"]

    run_served(scenario, max_body_bytes=150)


def nest(depth):
    return json.loads("[" * depth + "]" * depth)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"chat_template_kwargs": {"a": nest(600)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": nest(64)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "x" * 16_384}}, "chat_template_kwargs"),
        ({"metadata": nest(100)}, "metadata"),
        ({"x" * 200: nest(100)}, "x" * 40 + " ... (120 characters more) ... " + "x" * 40),
    ],
)
def test_a_body_that_is_nested_deeply_or_asks_at_length_is_refused_by_field(fields, field):
    async def scenario(served):
        body = {"model": "m", "messages": [HI]} | fields
        answer = await served.post("/v1/chat/completions", body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field
        assert not served.episode.asked

    run_served(scenario)


def test_arguments_in_a_history_are_nested_as_deeply_as_an_episode_can_be_pickled():
    async def ask(served, depth):
        call = {"function": {"name": "f", "arguments": json.dumps({"a": nest(depth - 1)})}}
        history = [HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool"}]
        body = {"model": "m", "messages": history, "metadata": {"n": [[]]}}
        return await served.post("/v1/chat/completions", body)

    async def scenario(served):
        answer = await ask(served, 65)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "messages[1].tool_calls[0].function.arguments"
        assert "nested deeper than 64 levels" in error["message"]
        assert (await ask(served, 64)).status_code == 200
        assert cloudpickle.dumps(served.episode.list_conversations(trained=("main",)))

    run_served(scenario)


def test_model_names_are_accepted_unless_the_rules_list_them():
    async def scenario(served):
        answer = await served.post("/v1/chat/completions", {"model": "gpt-4o", "messages": [HI]})
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
        listed = await served.http.get(f"{served.url}/v1/models", headers={"x-api-key": served.key})
        assert [model["id"] for model in listed.json()["data"]] == ["mine"]

    run_served(scenario, rules=ClientRules(models=("mine",)))


def test_a_taken_call_whose_caller_has_gone_is_told_to_who_answers_it():
    async def scenario():
        queued = QueuedGenerator()
        prompt = [np.array([1, 2], dtype=np.int32)]
        asking = [
            asyncio.create_task(queued.generate(prompt, sampling=SamplingParams(max_tokens=1)))
            for _ in range(2)
        ]
        taken = await queued.take(wait_s=1.0)
        assert len(taken.calls) == 2
        asking[0].cancel()
        await asyncio.wait({asking[0]})
        assert (await queued.take(wait_s=1.0)).cancelled == (taken.calls[0].id,)
        asking[1].cancel()

    asyncio.run(scenario())
