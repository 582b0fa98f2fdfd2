"""The clients of OpenAI and Anthropic, unmodified, against the endpoint: replies, errors, retries.

`make agents-contract` does the same with other packages, each in an environment of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import anthropic
import openai
import pytest

from rl.agents.endpoint.episodes import Endpoint
from rl.agents.players.loading import EARLY_CLIENT, WITHOUT_KEY, load_agent_function
from rl.agents.settings import ClientRules
from tests.support.agent_endpoint import serve
from tools.agents_contract.scripted import reply_to

QUESTION = "What is 2 + 3?"
ASKED = [{"role": "user", "content": QUESTION}]
ANSWER = "The sum is 5."
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
CHAT_TOOL = {"type": "function", "function": {"name": "add", "strict": True, "parameters": SCHEMA}}
RESPONSES_TOOL = {"type": "function", "name": "add", "strict": True, "parameters": SCHEMA}
MESSAGES_TOOL = {"name": "add", "input_schema": SCHEMA}
LIMIT = {"model": "m", "max_tokens": 128}
NO_SSL = {"verify": False, "trust_env": False}
"""No certificates, which take half a second to load, and no proxy."""


class Clients:
    """The two clients of an endpoint's episode."""

    def __init__(self, served, stack):
        self.served = served
        self._stack = stack

    async def openai(self, **options):
        http = openai.DefaultAsyncHttpxClient(**NO_SSL, timeout=options.pop("timeout", 20))
        options = {"api_key": self.served.key, "http_client": http} | options
        client = openai.AsyncOpenAI(base_url=f"{self.served.url}/v1", **options)
        return await self._stack.enter_async_context(client)

    async def anthropic(self, **options):
        http = anthropic.DefaultAsyncHttpxClient(**NO_SSL, timeout=options.pop("timeout", 20))
        options = {"api_key": self.served.key, "http_client": http} | options
        client = anthropic.AsyncAnthropic(base_url=self.served.url, **options)
        return await self._stack.enter_async_context(client)

    def list_branches(self):
        """Return the turns, roles and causes of the episode's branches."""
        found = self.served.episode.list_conversations(trained=("main",))
        return [(branch.turns, branch.role, branch.cause) for branch in found.branches]


def run(scenario, *, reply=reply_to, max_reply=256, **options):
    async def serve_it():
        async with (
            serve(reply, max_reply=max_reply, **options) as served,
            contextlib.AsyncExitStack() as stack,
            asyncio.timeout(30),
        ):
            return await scenario(Clients(served, stack))

    return asyncio.run(serve_it())


# A question, a call of a tool, an answer


async def chat(clients):
    client, messages = await clients.openai(), list(ASKED)
    first = await client.chat.completions.create(model="m", messages=messages, tools=[CHAT_TOOL])
    assert first.choices[0].finish_reason == "tool_calls"
    messages += answer_chat(first.choices[0].message)
    second = await client.chat.completions.create(model="m", messages=messages, tools=[CHAT_TOOL])
    assert second.choices[0].finish_reason == "stop"
    return second.choices[0].message.content, second.usage.completion_tokens


async def chat_stream(clients):
    client, messages = await clients.openai(), list(ASKED)
    create = client.chat.completions.stream
    async with create(model="m", messages=messages, tools=[CHAT_TOOL]) as stream:
        first = await stream.get_final_completion()
    messages += answer_chat(first.choices[0].message)
    texts: list[str] = []
    usage: Any = None
    async for chunk in await client.chat.completions.create(
        model="m",
        messages=messages,
        tools=[CHAT_TOOL],
        stream=True,
        stream_options={"include_usage": True},
    ):
        texts += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage
    return "".join(texts), usage.completion_tokens


def answer_chat(message):
    (call,) = message.tool_calls
    arguments = json.loads(call.function.arguments)
    result = str(arguments["a"] + arguments["b"])
    echo = message.model_dump(exclude_none=True)
    return [echo, {"role": "tool", "tool_call_id": call.id, "content": result}]


async def responses(clients):
    client, given = await clients.openai(), list(ASKED)
    first = await client.responses.create(model="m", input=given, tools=[RESPONSES_TOOL])
    given += answer_response(first)
    second = await client.responses.create(model="m", input=given, tools=[RESPONSES_TOOL])
    return second.output_text, second.usage.output_tokens


async def responses_stream(clients):
    client, given = await clients.openai(), list(ASKED)
    async with client.responses.stream(model="m", input=given, tools=[RESPONSES_TOOL]) as stream:
        first = await stream.get_final_response()
    given += answer_response(first)
    last: Any = None
    async for event in await client.responses.create(
        model="m", input=given, tools=[RESPONSES_TOOL], stream=True
    ):
        last = event
    assert last.type == "response.completed"
    return last.response.output[0].content[0].text, last.response.usage.output_tokens


def answer_response(response):
    (call,) = response.output
    arguments = json.loads(call.arguments)
    result = str(arguments["a"] + arguments["b"])
    fields = {"type", "call_id", "name", "arguments"}
    echo = call.model_dump(include=fields)
    return [echo, {"type": "function_call_output", "call_id": call.call_id, "output": result}]


async def messages(clients):
    client, given = await clients.anthropic(), list(ASKED)
    first = await client.messages.create(messages=given, tools=[MESSAGES_TOOL], **LIMIT)
    assert first.stop_reason == "tool_use"
    given += answer_message(first)
    second = await client.messages.create(messages=given, tools=[MESSAGES_TOOL], **LIMIT)
    assert second.stop_reason == "end_turn"
    return second.content[0].text, second.usage.output_tokens


async def messages_stream(clients):
    client, given = await clients.anthropic(), list(ASKED)
    async with client.messages.stream(messages=given, tools=[MESSAGES_TOOL], **LIMIT) as stream:
        first = await stream.get_final_message()
    given += answer_message(first)
    async with client.messages.stream(messages=given, tools=[MESSAGES_TOOL], **LIMIT) as stream:
        text = "".join([text async for text in stream.text_stream])
        return text, (await stream.get_final_message()).usage.output_tokens


def answer_message(message):
    (block,) = message.content
    result = str(block.input["a"] + block.input["b"])
    told = {"type": "tool_result", "tool_use_id": block.id, "content": result}
    return [
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [told]},
    ]


async def tool_runner(clients):
    @anthropic.beta_async_tool
    async def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    client = await clients.anthropic()
    runner = client.beta.messages.tool_runner(messages=ASKED, tools=[add], **LIMIT)
    last = await runner.until_done()
    return last.content[0].text, last.usage.output_tokens


TALKS = (chat, chat_stream, responses, responses_stream, messages, messages_stream, tool_runner)


@pytest.mark.parametrize("talk", TALKS, ids=lambda talk: talk.__name__)
def test_conversation_with_a_tool_is_one_branch_of_sampled_tokens(talk):
    async def scenario(clients):
        text, num_tokens = await talk(clients)
        assert text == ANSWER
        # A byte is a token, and the end of the turn is another.
        assert num_tokens == len(ANSWER) + 1
        assert clients.list_branches() == [((0, 1), "main", "")]
        renderer = clients.served.generator.renderer
        found = clients.served.episode.list_conversations(trained=("main",))
        call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
        for turn, sampled in zip(found.turns, (call, ANSWER), strict=True):
            ids = [*renderer.encode(sampled).tolist(), renderer.end_token_id]
            assert turn.completion.token_ids.tolist() == ids
        prompts = [prompt for prompt, _ in clients.served.generator.calls]
        assert prompts[1].startswith(f"{prompts[0]}{call}<|im_end|>\n<|im_start|>user\n")
        assert clients.served.episode.counts["retries"] == 0

    run(scenario)


def test_count_of_tokens_is_that_of_the_reply():
    async def scenario(clients):
        client = await clients.anthropic()
        count = await client.messages.count_tokens(
            model="m", messages=ASKED, tools=[MESSAGES_TOOL], system="Add."
        )
        reply = await client.messages.create(
            messages=ASKED, tools=[MESSAGES_TOOL], system="Add.", **LIMIT
        )
        assert count.input_tokens == reply.usage.input_tokens
        assert clients.list_branches() == [((0,), "main", "")]

    run(scenario)


def test_token_ids_and_logprobs_are_those_of_the_record():
    async def scenario(clients):
        client = await clients.openai()
        reply = await client.chat.completions.create(
            model="m", messages=ASKED, logprobs=True, extra_body={"return_token_ids": True}
        )
        (choice,) = reply.choices
        (turn,) = clients.served.episode.list_conversations(trained=("main",)).turns
        assert reply.prompt_token_ids == turn.prompt_ids.tolist()
        assert choice.token_ids == turn.completion.token_ids.tolist()
        logprobs = [token.logprob for token in choice.logprobs.content]
        assert logprobs == turn.completion.logprobs.tolist()

    run(scenario)


# Errors are the packages' own classes


async def ask_openai(clients, **options):
    client = await clients.openai(**{"max_retries": 0} | options)
    return await client.chat.completions.create(model="m", messages=ASKED)


async def ask_anthropic(clients, **options):
    client = await clients.anthropic(**{"max_retries": 0} | options)
    return await client.messages.create(messages=ASKED, **LIMIT)


PACKAGES = pytest.mark.parametrize(
    ("package", "ask"),
    [(openai, ask_openai), (anthropic, ask_anthropic)],
    ids=["openai", "anthropic"],
)


@PACKAGES
def test_wrong_key_is_an_authentication_error(package, ask):
    async def scenario(clients):
        with pytest.raises(package.AuthenticationError, match="names no episode"):
            await ask(clients, api_key="sk-relay-wrong")

    run(scenario)


@PACKAGES
def test_unknown_model_is_not_found(package, ask):
    async def scenario(clients):
        with pytest.raises(package.NotFoundError, match="must be mine"):
            await ask(clients)

    run(scenario, rules=ClientRules(models=("mine",)))


@PACKAGES
def test_prompt_that_is_too_long_is_a_bad_request(package, ask):
    async def scenario(clients):
        with pytest.raises(package.BadRequestError, match="prompt is too long") as caught:
            await ask(clients)
        if package is openai:
            assert caught.value.code == "context_length_exceeded"

    run(scenario, max_context=20)


@PACKAGES
def test_ended_episode_is_a_conflict_that_no_client_repeats(package, ask, monkeypatch):
    asked = []
    find = Endpoint.find

    def count(endpoint, key):
        asked.append(key)
        return find(endpoint, key)

    monkeypatch.setattr(Endpoint, "find", count)

    async def scenario(clients):
        clients.served.endpoint.end(clients.served.episode)
        with pytest.raises(package.ConflictError, match="the episode has ended"):
            await ask(clients, max_retries=3)
        assert len(asked) == 1

    run(scenario)


@PACKAGES
def test_limit_of_replies_is_a_permission_error(package, ask):
    async def scenario(clients):
        with pytest.raises(package.PermissionDeniedError, match="its 0 replies"):
            await ask(clients)
        assert clients.served.episode.reached == "turns"

    run(scenario, max_requests=0)


@PACKAGES
def test_full_endpoint_is_a_rate_limit(package, ask, monkeypatch):
    monkeypatch.setattr("rl.http.guard.Shares.take", lambda self, owner, amount: amount > 1)

    async def scenario(clients):
        with pytest.raises(package.RateLimitError, match="its share of requests"):
            await ask(clients)

    run(scenario)


@PACKAGES
def test_failure_of_the_generator_is_a_server_error(package, ask, caplog):
    async def scenario(clients):
        with pytest.raises(package.InternalServerError, match="the server failed"):
            await ask(clients)
        assert clients.list_branches() == []

    run(scenario, reply=lambda text: 1 / 0)


def test_schema_of_the_reply_is_refused_by_name():
    async def scenario(clients):
        client = await clients.openai()
        schema = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=ASKED, response_format=schema)
        assert caught.value.param == "response_format"

    run(scenario)


@pytest.mark.parametrize("talk", [chat_stream, responses_stream, messages_stream])
def test_signs_of_life_in_a_stream_are_skipped_by_the_client(talk, monkeypatch):
    monkeypatch.setattr("rl.agents.endpoint.app.KEEP_ALIVE_S", 0.01)

    async def scenario(clients):
        go_on = clients.served.generator.go_on = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, go_on.set)
        text, _ = await talk(clients)
        assert text == ANSWER

    run(scenario)


def test_error_in_a_stream_is_raised_by_the_client(monkeypatch):
    monkeypatch.setattr("rl.agents.endpoint.app.KEEP_ALIVE_S", 0.01)

    async def scenario(clients):
        clients.served.generator.go_on = asyncio.Event()
        client = await clients.openai(max_retries=0)
        stream = await client.chat.completions.create(model="m", messages=ASKED, stream=True)
        clients.served.endpoint.end(clients.served.episode)
        with pytest.raises(openai.APIError, match="the episode has ended"):
            async for _ in stream:
                pass

    run(scenario)


# Retries, slow replies, disconnections


@PACKAGES
@pytest.mark.parametrize("status", [429, 500])
def test_client_that_retries_after_an_error_leaves_one_turn(package, ask, status):
    async def scenario(clients):
        await ask(clients, max_retries=2)
        assert clients.list_branches() == [((0,), "main", "")]
        assert clients.served.episode.counts["requests"] == 1

    run(scenario, faults=(status,))


@PACKAGES
def test_client_that_is_impatient_gets_the_reply_of_its_first_request(package, ask):
    async def scenario(clients):
        served = clients.served
        served.generator.go_on = asyncio.Event()
        asking = asyncio.create_task(ask(clients, timeout=0.2, max_retries=9))
        await _until(lambda: served.episode.counts["retries"])
        served.generator.go_on.set()
        await asking
        assert len(served.generator.calls) == 1
        assert clients.list_branches() == [((0,), "main", "")]

    run(scenario)


@PACKAGES
def test_client_that_is_cancelled_ends_its_sample(package, ask, monkeypatch):
    monkeypatch.setattr("rl.agents.endpoint.retries.GRACE_S", 0.02)

    async def scenario(clients):
        served = clients.served
        served.generator.go_on = asyncio.Event()
        asking = asyncio.create_task(ask(clients))
        await _until(lambda: served.generator.calls)
        asking.cancel()
        await _until(lambda: served.generator.cancelled)
        assert clients.list_branches() == []

    run(scenario)


async def _until(condition):
    """Wait until a condition is true."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def test_client_that_is_made_when_a_module_is_imported_is_explained(tmp_path, monkeypatch):
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "agent.py"
    file.write_text("import openai\nclient = openai.OpenAI()\ndef solve(problem): pass\n")
    with pytest.raises(ValueError, match=f"^{EARLY_CLIENT}; .*Missing credentials"):
        load_agent_function(f"{file}:solve")
    # The other client notices it at its first request only.
    client = anthropic.Anthropic(http_client=anthropic.DefaultHttpxClient(**NO_SSL))
    with pytest.raises(TypeError, match=WITHOUT_KEY):
        client.messages.create(**LIMIT, messages=ASKED)
