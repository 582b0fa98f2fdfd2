"""anthropic: messages whole and streamed, tools, the helpers for streams and for tools."""

from __future__ import annotations

import inspect
from typing import Any

import anthropic

from tools.agents_contract.clients.harness import ADD_SCHEMA, QUESTION, run_cases

USER: Any = [{"role": "user", "content": QUESTION}]
TOOLS: Any = [{"name": "add", "description": "Add.", "input_schema": ADD_SCHEMA}]
OPTIONS: Any = {"model": "m", "max_tokens": 256}


@anthropic.beta_tool
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return str(a + b)


@anthropic.beta_async_tool(name="add")
async def add_async(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def get_text(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def answer_call(message: Any) -> list[Any]:
    """Return the messages after a reply with one call of `add`."""
    (block,) = [block for block in message.content if block.type == "tool_use"]
    result = str(block.input["a"] + block.input["b"])
    return [
        {"role": "assistant", "content": message.content},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": block.id, "content": result}],
        },
    ]


def whole() -> Any:
    reply = anthropic.Anthropic().messages.create(messages=USER, system="Be brief.", **OPTIONS)
    return {"answer": get_text(reply), "end": reply.stop_reason}


def stream() -> Any:
    events = list(anthropic.Anthropic().messages.create(messages=USER, stream=True, **OPTIONS))
    texts = [e.delta.text for e in events if e.type == "content_block_delta"]
    return {
        "answer": "".join(texts),
        "order": [events[0].type, events[-1].type],
        "has_usage": events[0].message.usage.input_tokens > 0,
    }


def tools() -> Any:
    client = anthropic.Anthropic()
    first = client.messages.create(
        messages=USER, tools=TOOLS, tool_choice={"type": "any"}, **OPTIONS
    )
    messages = USER + answer_call(first)
    second = client.messages.create(messages=messages, tools=TOOLS, **OPTIONS)
    return {"end": first.stop_reason, "answer": get_text(second)}


def tools_stream() -> Any:
    """The helper `messages.stream` puts blocks together, a call's input from pieces of JSON."""
    client = anthropic.Anthropic()
    with client.messages.stream(messages=USER, tools=TOOLS, **OPTIONS) as running:
        first = running.get_final_message()
    messages = USER + answer_call(first)
    with client.messages.stream(messages=messages, tools=TOOLS, **OPTIONS) as running:
        answer = "".join(running.text_stream)
        has_usage = running.get_final_message().usage.output_tokens > 0
    return {"end": first.stop_reason, "answer": answer, "has_usage": has_usage}


def tool_runner() -> Any:
    runner = anthropic.Anthropic().beta.messages.tool_runner(messages=USER, tools=[add], **OPTIONS)
    return {"answer": get_text(runner.until_done())}


async def tool_runner_stream() -> Any:
    async with anthropic.AsyncAnthropic() as client:
        runner = client.beta.messages.tool_runner(
            messages=USER, tools=[add_async], stream=True, **OPTIONS
        )
        answers = []
        async for running in runner:
            answers.append(get_text(await running.get_final_message()))
    return {"answers": answers}


async def bearer() -> Any:
    """A token in place of a key, as Claude Code sends it."""
    key = anthropic.Anthropic().api_key
    async with anthropic.AsyncAnthropic(auth_token=key, api_key=None) as client:
        reply = await client.messages.create(messages=USER, **OPTIONS)
    return {"answer": get_text(reply)}


def count_tokens() -> Any:
    client = anthropic.Anthropic()
    count = client.messages.count_tokens(model="m", messages=USER, tools=TOOLS)
    reply = client.messages.create(messages=USER, tools=TOOLS, **OPTIONS)
    return {"is_equal": count.input_tokens == reply.usage.input_tokens}


def retry() -> Any:
    return {"answer": get_text(anthropic.Anthropic().messages.create(messages=USER, **OPTIONS))}


def slow() -> Any:
    client = anthropic.Anthropic(timeout=1.0, max_retries=5)
    return {"answer": get_text(client.messages.create(messages=USER, **OPTIONS))}


def too_long() -> Any:
    messages: Any = [{"role": "user", "content": "x" * 100_000}]
    try:
        anthropic.Anthropic().messages.create(messages=messages, **OPTIONS)
    except anthropic.BadRequestError as error:
        # The words by which agents know that they must shorten their history.
        return {"error": type(error).__name__, "words": "prompt is too long" in error.message}


def ended() -> Any:
    try:
        anthropic.Anthropic(max_retries=0).messages.create(messages=USER, **OPTIONS)
    except anthropic.ConflictError as error:
        return {"error": type(error).__name__}


def wrong_key() -> Any:
    try:
        anthropic.Anthropic(api_key="wrong").messages.create(messages=USER, **OPTIONS)
    except anthropic.AuthenticationError as error:
        return {"error": type(error).__name__}


def list_models() -> Any:
    return {"models": [model.id for model in anthropic.Anthropic().models.list()]}


def list_fields() -> Any:
    """Return the fields that the methods of this version can send."""
    client = anthropic.Anthropic()
    names: set[str] = set()
    for method in (
        client.messages.create,
        client.messages.count_tokens,
        client.beta.messages.create,
        client.beta.messages.count_tokens,
    ):
        names.update(inspect.signature(method).parameters)
    options = {"extra_headers", "extra_query", "extra_body", "timeout"}
    return {"fields": {"messages": sorted(names - options)}}


if __name__ == "__main__":
    run_cases(
        {
            "whole": whole,
            "stream": stream,
            "tools": tools,
            "tools stream": tools_stream,
            "tool runner": tool_runner,
            "tool runner stream": tool_runner_stream,
            "bearer": bearer,
            "count tokens": count_tokens,
            "retry after 500": retry,
            "retry after 429": retry,
            "retry while slow": slow,
            "too long": too_long,
            "ended": ended,
            "wrong key": wrong_key,
            "models": list_models,
            "fields": list_fields,
        }
    )
