"""Replies without a memory: what is rendered, how it is sampled, what is refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from rl.agents.endpoint.record import EpisodeRecord
from rl.agents.endpoint.retries import RequestIdentity
from rl.agents.endpoint.stateless import ChatModel, StatelessAnswerer
from rl.agents.types import ChatRequest, RequestError, ToolSpec
from rl.rollouts.samples import make_demonstrated_completion
from rl.types import Message, ToolCall
from rl.utils.threads import WorkerThread
from tests.support.agent_endpoint import ScriptedGenerator, make_qwen_renderer

HI = Message(role="user", content="Hi")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ADD = ToolSpec(name="add", parameters={"type": "object", "properties": {}})
IDENTITY = RequestIdentity(digest=b"one")


@pytest.fixture
def thread():
    thread = WorkerThread("renderer")
    yield thread
    thread.stop(timeout_s=10)


@pytest.fixture
def answerer(thread):
    """Answerer of a scripted model with a context of 400 bytes."""
    model = ChatModel(
        renderer=make_qwen_renderer(), thread=thread, max_context=400, min_temperature=0.01
    )
    generator = ScriptedGenerator(reply=lambda text: "Hello.")
    return StatelessAnswerer(model=model, generator=generator, names=("m",))


def ask(answerer, *messages, **fields):
    request = ChatRequest(**{"messages": messages or (HI,), "model": "m"} | fields)
    return asyncio.run(answerer.reply(request, identity=IDENTITY))


def sample(answerer, **fields):
    """Return the sampling of a reply."""
    ask(answerer, **fields)
    return answerer.generator.calls[-1][1]


def refuse(answerer, *messages, **fields):
    with pytest.raises(RequestError) as error:
        ask(answerer, *messages, **fields)
    assert answerer.generator.calls == []
    return error.value


def test_reply_is_read_and_told_with_its_tokens(answerer):
    answer = ask(answerer)
    assert answer.parsed.content == "Hello."
    assert (answer.reply.end, answer.reply.model, answer.reply.cached_tokens) == ("stop", "m", 0)
    # Each byte of the reply, and the end of the turn.
    assert len(answer.reply.completion.token_ids) == 7


def test_same_request_is_sampled_again(answerer):
    first, second = ask(answerer), ask(answerer)
    answerer.mark_delivered(first)
    assert len(answerer.generator.calls) == 2
    assert first.reply.id != second.reply.id
    seeds = {sampling.seed for _, sampling in answerer.generator.calls}
    assert len(seeds) == 2


def test_client_decides_the_sampling(answerer):
    sampling = sample(
        answerer,
        asked={"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 7},
        max_tokens=11,
        stop=("x",),
    )
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
    assert (sampling.seed, sampling.max_tokens, sampling.stop_texts) == (7, 11, ("x",))
    assert sampling.stop_token_ids == make_qwen_renderer().stop_token_ids


def test_without_wishes_temperature_is_1_and_the_reply_may_fill_the_context(answerer):
    sampling = sample(answerer)
    num_prompt = len(ask(answerer).reply.prompt_ids)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert sampling.max_tokens == 400 - num_prompt
    assert sample(answerer, max_tokens=10_000).max_tokens == 400 - num_prompt


@pytest.mark.parametrize(
    ("asked", "name", "value"),
    [
        ({"top_p": 0}, "top_p", 1e-30),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 10**9}, "top_k", 0),
        ({"seed": -1}, "seed", 2**62 - 1),
        ({"temperature": 0}, "temperature", 0),
    ],
)
def test_values_that_samplers_do_not_know_are_translated(answerer, asked, name, value):
    assert getattr(sample(answerer, asked=asked), name) == value


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty=0.5 is not supported: must be 0"),
        ({"min_p": 0.1}, "min_p=0.1"),
        ({"stop_token_ids": [5]}, "stop_token_ids=[5]"),
        ({"enable_thinking": False}, "enable_thinking=False is not supported: must be True"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs="),
        ({"temperature": 0.001}, "temperature=0.001 must be 0 or at least 0.01"),
    ],
)
def test_what_would_have_no_effect_is_refused_by_name(answerer, asked, said):
    error = refuse(answerer, asked=asked)
    assert (error.status, error.field) == (400, next(iter(asked)))
    assert said in error.message


def test_values_that_ask_for_nothing_are_accepted(answerer):
    nothing = {"frequency_penalty": 0.0, "repetition_penalty": 1.0, "chat_template_kwargs": {}}
    ask(answerer, asked=nothing)
    thoughtless = replace(answerer, model=replace(answerer.model, thinks=False))
    ask(thoughtless, asked={"enable_thinking": False})
    assert len(answerer.generator.calls) == 2


def test_unknown_model_is_not_found(answerer):
    error = refuse(answerer, model="gpt")
    assert (error.status, error.code) == (404, "model_not_found")
    assert error.message == "model 'gpt' does not exist here: must be m"


def test_prompt_beyond_the_context_is_too_long(answerer):
    error = refuse(answerer, Message(role="user", content="x" * 400))
    num_tokens = 400 + len(ask(answerer).reply.prompt_ids) - len("Hi")
    assert error.message.startswith(f"prompt is too long: {num_tokens} tokens > 399 maximum")
    assert (error.status, error.code) == (400, "context_length_exceeded")


def test_conversation_is_rendered_as_in_an_episode(answerer):
    calls = (ToolCall(name="add", arguments={"a": 1, "b": 2}),)
    called = Message(role="assistant", content="", calls=calls)
    told = Message(role="tool", content="3")
    renderer = answerer.model.renderer
    episode = EpisodeRecord(renderer=renderer)
    plan = episode.plan(ChatRequest(messages=(HI,), tools=(ADD,)))
    sampled = make_demonstrated_completion(renderer.reply(CALL))
    episode.add(plan, sampled, text=CALL, told=called)
    expected = episode.plan(ChatRequest(messages=(HI, called, told), tools=(ADD,))).context_ids
    long = replace(answerer, model=replace(answerer.model, max_context=4000))

    answer = ask(long, HI, called, told, tools=(ADD,))

    assert answer.reply.prompt_ids.tolist() == expected.tolist()
    request = ChatRequest(messages=(HI, called, told), tools=(ADD,), model="m")
    assert asyncio.run(long.count_tokens(request)) == len(expected)


def test_calls_of_tools_are_read_unless_none_are_allowed(answerer):
    answerer.generator.reply = lambda text: CALL
    long = replace(answerer, model=replace(answerer.model, max_context=4000))
    answer = ask(long, tools=(ADD,))
    assert [call.call.name for call in answer.parsed.calls] == ["add"]
    assert answer.reply.end == "tool_calls"
    assert ask(long, tools=(ADD,), allows_calls=False).parsed.content == CALL


def test_reply_ends_before_a_stop_text(answerer):
    answerer.generator.reply = lambda text: "Think. Observation:"
    answer = ask(answerer, stop=("Observation:",))
    assert (answer.parsed.content, answer.reply.stop_text) == ("Think. ", "Observation:")


def test_cancelled_request_cancels_its_sample(answerer):
    async def cancel():
        answerer.generator.go_on = asyncio.Event()
        request = ChatRequest(messages=(HI,), model="m")
        reply = asyncio.create_task(answerer.reply(request, identity=IDENTITY))
        while not answerer.generator.calls:
            await asyncio.sleep(0.001)
        reply.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reply

    asyncio.run(cancel())
    assert answerer.generator.cancelled == 1
