"""The endpoint over HTTP: replies, streams, and paths without a reply."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
from dataclasses import replace

import pytest

from rl.agents.dialects import chat
from rl.agents.endpoint.episode import LONG_CHARS
from rl.agents.settings import ClientRules
from tests.support.agent_endpoint import (
    make_byte_renderer,
    make_settings,
    run_served,
    wait_until,
)

HI = {"role": "user", "content": "Hi"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


def test_conversation_with_a_tool_is_one_branch_of_recorded_tokens():
    async def scenario(served):
        first = await served.chat(HI, tools=[ADD])
        message = first["choices"][0]["message"]
        assert first["choices"][0]["finish_reason"] == "tool_calls"
        call = message["tool_calls"][0]
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        second = await served.chat(HI, message, result, tools=[ADD])
        assert second["choices"][0]["message"]["content"] == "It is 3."
        usage = second["usage"]
        found = served.episode.list_conversations(trained=("main",))
        assert [branch.turns for branch in found.branches] == [(0, 1)]
        first_turn, second_turn = found.turns
        num_before = len(first_turn.prompt_ids) + len(first_turn.completion.token_ids)
        assert usage["prompt_tokens"] == num_before + len(second_turn.prompt_ids)
        assert usage["prompt_tokens_details"]["cached_tokens"] == num_before
        assert [turn.text for turn in found.turns] == [CALL, "It is 3."]

    run_served(
        scenario, lambda text: "It is 3." if "<tool_response>" in text else CALL, max_reply=128
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [HI]}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [HI], "max_tokens": 50}),
    ],
)
def test_every_dialect_answers_whole_and_streamed(path, body):
    async def scenario(served):
        body["model"] = "m"
        whole = await served.post(path, body)
        assert whole.status_code == 200, whole.text
        assert "Hello." in whole.text
        streamed = await served.post(path, body | {"stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert "Hello." in streamed.text
        # The same conversation, asked with other bytes.
        causes = [b.cause for b in served.episode.list_conversations(trained=()).branches]
        assert causes == ["", "again"]

    run_served(scenario)


def test_key_is_read_from_either_header_or_the_path():
    async def scenario(served):
        path, body = "/v1/chat/completions", {"model": "m", "messages": [HI]}
        for url, headers in (
            (path, {"authorization": f"Bearer {served.key}"}),
            (path, {"x-api-key": served.key}),
            (f"/episodes/{served.key}{path}", {"authorization": "Bearer another"}),
        ):
            answer = await served.http.post(served.url + url, json=body, headers=headers)
            assert answer.status_code == 200, url
        for headers in ({}, {"x-api-key": "sk-relay-wrong"}):
            answer = await served.http.post(served.url + path, json=body, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["type"] == "authentication_error"

    run_served(scenario)


def test_other_hosts_are_refused():
    async def scenario(served):
        answer = await served.post("/v1/chat/completions", {}, host="evil.example")
        assert answer.status_code == 421

    run_served(scenario)


def test_run_decides_the_sampling():
    async def scenario(served):
        await served.chat(HI, temperature=0.2, top_p=0.5, seed=1, max_tokens=7, stop=["x"])
        _, sampling = served.generator.calls[0]
        assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (1.0, 1.0, 7)
        assert sampling.stop_texts == ("x",)
        asked = {"model": ["any"], "temperature": [0.2], "top_p": [0.5], "seed": [1]}
        assert served.episode.asked == asked

    run_served(scenario)


def test_client_decides_the_sampling_where_the_rules_say_so():
    async def scenario(served):
        await served.chat(HI, temperature=0.2, top_p=0.5)
        _, sampling = served.generator.calls[0]
        assert (sampling.temperature, sampling.top_p) == (0.2, 0.5)

    run_served(scenario, rules=ClientRules(honours_sampling=True))


def test_stop_text_is_told_without_it_and_matched_with_and_without_it():
    async def scenario(served):
        first = await served.chat(HI, stop=["Observation:"])
        assert first["choices"][0]["message"]["content"] == "Think. "
        for number, content in enumerate(("Think.", "Think. Observation:", "Think. Observation")):
            echo = {"role": "assistant", "content": content}
            await served.chat(HI, echo, {"role": "user", "content": f"go {number}"})
        branches = served.episode.list_conversations(trained=()).branches
        assert [branch.turns for branch in branches] == [(0, 1), (0, 2), (3,)]
        assert served.episode.record.turns[0].turn.text == "Think. Observation:"

    run_served(scenario, lambda text: "Think. Observation:")


def test_stop_text_in_the_thought_that_the_prompt_opens_ends_nothing(tmp_path):
    async def scenario(served):
        reply = await served.chat(HI, stop=["\n", "<think>"])
        message = reply["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "")
        assert reply["choices"][0]["stop_reason"] == "\n"
        assert served.episode.record.turns[0].turn.text == "<think>\nHm.\nNo."

    renderer = make_byte_renderer(tmp_path, "qwen3_5_think")
    run_served(scenario, lambda text: "Hm.\nNo.", renderer=renderer)


# Streams


@pytest.mark.parametrize(
    ("path", "sign", "last"),
    [
        ("/v1/chat/completions", ": keep-alive", "data: [DONE]"),
        ("/inference/v1/generate", ": keep-alive", "data: [DONE]"),
        ("/v1/messages", "event: ping", 'data: {"type":"message_stop"}'),
    ],
)
def test_a_stream_shows_signs_of_life(path, sign, last, monkeypatch):
    monkeypatch.setattr("rl.agents.endpoint.app.KEEP_ALIVE_S", 0.02)

    async def scenario(served):
        served.generator.go_on = asyncio.Event()
        body = {"model": "m", "messages": [HI], "max_tokens": 9, "stream": True}
        if "generate" in path:
            body = {"model": "m", "token_ids": [65], "stream": True}
        headers = {"x-api-key": served.key}
        url = served.url + path
        async with served.http.stream("POST", url, json=body, headers=headers) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == sign
            served.generator.go_on.set()
            rest = [line async for line in lines]
        assert rest[-2] == last

    run_served(scenario)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_stops_reading_is_cut_off_and_counted(is_streamed, monkeypatch):
    monkeypatch.setattr("rl.http.server.WRITE_TIMEOUT_S", 0.2)
    # More than the kernel takes for a client that does not read.
    large = "x" * 32_000_000
    monkeypatch.setattr(chat, "stream_body", lambda *_: large.encode())
    monkeypatch.setattr(chat, "make_body", lambda *_: {"content": large})

    async def scenario(served):
        host, _, port = served.url.removeprefix("http://").partition(":")
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        body = json.dumps({"model": "m", "messages": [HI], "stream": is_streamed})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nx-api-key: {served.key}\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        with contextlib.closing(client):
            await wait_until(lambda: served.episode.counts["cut_off"])
            assert served.episode.record.undelivered == {0}

    run_served(scenario)


# Other paths and headers


def test_count_tokens_counts_what_a_reply_reads():
    async def scenario(served):
        body = {"model": "m", "messages": [HI]}
        count = await served.post("/v1/messages/count_tokens", body)
        reply = await served.post("/v1/messages", body | {"max_tokens": 60})
        assert count.json() == {"input_tokens": reply.json()["usage"]["input_tokens"]}
        # Of a recorded reply the model reads its thoughts, which the client leaves out.
        echo = {"role": "assistant", "content": "Hello."}
        body["messages"] = [HI, echo, {"role": "user", "content": "Go on"}]
        # Counted twice: a request that is only counted is none that could be asked again.
        counts = [await served.post("/v1/messages/count_tokens", body) for _ in range(2)]
        further = await served.post("/v1/messages", body | {"max_tokens": 9})
        usage = further.json()["usage"]
        num = usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert [count.json() for count in counts] == [{"input_tokens": num}] * 2
        branches = served.episode.list_conversations(trained=()).branches
        assert [(branch.turns, branch.cause) for branch in branches] == [((0, 1), "")]
        assert list(served.episode.record.turns) == [0, 1]

    run_served(scenario, lambda text: "<think>\nHm, hm.\n</think>\n\nHello.")


def test_a_client_names_the_role_of_a_conversation():
    async def scenario(served):
        # The same question each time: conversations of two roles have nothing in common.
        for role in ("auxiliary", "superseded", "sub-agent", "main"):
            await served.chat(HI, headers={"x_relay_role": role})
        # What Codex says of its sub-agents.
        await served.chat(
            {"role": "user", "content": "bye"}, headers={"x_openai_subagent": "review"}
        )
        branches = served.episode.list_conversations(trained=("main",)).branches
        assert [(branch.role, branch.cause, branch.is_trained) for branch in branches] == [
            ("auxiliary", "", False),
            ("superseded", "agent", False),
            ("sub-agent", "agent", False),
            ("main", "agent", True),
            ("sub-agent", "rewritten", False),
        ]
        body = {"model": "m", "messages": [HI]}
        wrong = await served.post("/v1/chat/completions", body, x_relay_role="judge")
        assert wrong.status_code == 400
        assert "must be main, sub-agent, auxiliary" in wrong.json()["error"]["message"]

    run_served(scenario)


def test_reward_is_taken_from_the_agent():
    async def scenario(served):
        posted = await served.post("/v1/reward", {"reward": 0.5, "steps": 3})
        assert posted.json() == {"posted": {"reward": 0.5, "steps": 3.0}}
        named = await served.post("/v1/reward", {"Größe/a-b_c.1 d": 1, "n" * 100: 0})
        assert named.status_code == 200
        before = served.episode.posted
        assert [*before] == ["reward", "steps", "Größe/a-b_c.1 d", "n" * 100]
        many = {f"n{i}": 0 for i in range(65)}
        infinite, huge = {"reward": float("inf")}, {"reward": -(10**400)}
        wrong = ("", "n" * 101, "a\n", "a\tb", "\ud800", "a{b}", "\u202ea")
        names = [{name: 0} for name in wrong]
        for body in ({}, {"reward": "high"}, infinite, huge, many, {"a": float("nan")}, *names):
            answer = await served.post("/v1/reward", json.dumps(body).encode())
            assert answer.status_code == 400
        assert served.episode.posted == before

    run_served(scenario)


def test_keys_are_in_no_log(caplog):
    caplog.set_level(logging.DEBUG)

    async def scenario(served):
        await served.chat(HI)
        await served.http.get(f"{served.url}/episodes/{served.key}/nothing")
        assert served.key not in repr(served.episode.settings)
        return served.key

    key = run_served(scenario)
    logged = [r.getMessage() for r in caplog.records if r.name.startswith(("rl", "uvicorn"))]
    assert not any(key in text for text in logged)


def test_episode_with_a_long_text_does_not_hold_up_the_others(monkeypatch):
    async def scenario(served):
        opening, tokenized = served.episode.renderer.opening, threading.Event()

        def render(messages, **options):
            if len(messages[0].content) > LONG_CHARS:
                assert tokenized.wait(10)
            return opening(messages, **options)

        monkeypatch.setattr(served.episode.renderer, "opening", render)
        other = replace(served, episode=served.endpoint.open(make_settings()))
        long = {"role": "user", "content": "a" * (LONG_CHARS + 1)}
        asked = [
            asyncio.create_task(served.post(path, {"model": "m", "max_tokens": 5, "messages": [m]}))
            for path, m in (
                ("/v1/chat/completions", long),
                ("/v1/messages/count_tokens", long),
                ("/v1/chat/completions", HI),
            )
        ]
        assert (await other.chat(HI))["choices"][0]["message"]["content"] == "Hello."
        assert not any(task.done() for task in asked)
        tokenized.set()
        too_long, counted, short = await asyncio.gather(*asked)
        assert "prompt is too long: 10" in too_long.json()["error"]["message"]
        assert counted.json()["input_tokens"] > LONG_CHARS
        # A request of the same episode waits, so that the order of the turns is that of requests.
        assert short.status_code == 200

    run_served(scenario)
