"""openai 2 and 3: chat completions and responses, whole and streamed, sync and async."""

from __future__ import annotations

import asyncio
import inspect
import json
from typing import Any

import openai
from pydantic import BaseModel

from tools.agents_contract.clients.harness import ADD_SCHEMA, QUESTION, run_cases

USER: Any = [{"role": "user", "content": QUESTION}]
CHAT_TOOLS: Any = [
    {"type": "function", "function": {"name": "add", "strict": True, "parameters": ADD_SCHEMA}}
]
TOOLS: Any = [{"type": "function", "name": "add", "strict": True, "parameters": ADD_SCHEMA}]


class Sum(BaseModel):
    value: int


class Add(BaseModel):
    """Arguments of a tool as a class."""

    a: int
    b: int


def answer_call(message: Any) -> list[Any]:
    """Return the messages after a reply with one call of `add`."""
    (call,) = message.tool_calls
    result = str(add(**json.loads(call.function.arguments)))
    echo = message.model_dump(exclude_none=True)
    return [echo, {"role": "tool", "tool_call_id": call.id, "content": result}]


def add(a: int, b: int) -> int:
    return a + b


def chat_whole() -> Any:
    reply = openai.OpenAI().chat.completions.create(model="m", messages=USER, temperature=0.3)
    return {"answer": reply.choices[0].message.content, "end": reply.choices[0].finish_reason}


def chat_stream() -> Any:
    stream = openai.OpenAI().chat.completions.create(
        model="m", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    ends = [c.choices[0].finish_reason for c in chunks if c.choices]
    return {
        "answer": "".join(texts),
        "end": ends[-1],
        "has_usage": chunks[-1].usage.completion_tokens > 0,
    }


def chat_tools() -> Any:
    client = openai.OpenAI()
    first = client.chat.completions.create(
        model="m", messages=USER, tools=CHAT_TOOLS, tool_choice="required"
    )
    messages = USER + answer_call(first.choices[0].message)
    second = client.chat.completions.create(
        model="m", messages=messages, tools=CHAT_TOOLS, parallel_tool_calls=False
    )
    return {"end": first.choices[0].finish_reason, "answer": second.choices[0].message.content}


def chat_tools_stream() -> Any:
    """The helper `chat.completions.stream` puts deltas of calls together."""
    client, messages, kinds = openai.OpenAI(), list(USER), set()
    with client.chat.completions.stream(model="m", messages=messages, tools=CHAT_TOOLS) as stream:
        for event in stream:
            kinds.add(event.type)
        message = stream.get_final_completion().choices[0].message
    messages += answer_call(message)
    with client.chat.completions.stream(model="m", messages=messages, tools=CHAT_TOOLS) as stream:
        answer = stream.get_final_completion().choices[0].message.content
    return {"saw_arguments": "tool_calls.function.arguments.done" in kinds, "answer": answer}


def chat_parse_tools() -> Any:
    tools: Any = [openai.pydantic_function_tool(Add, name="add")]
    reply = openai.OpenAI().chat.completions.parse(model="m", messages=USER, tools=tools)
    (call,) = reply.choices[0].message.tool_calls
    return {"arguments": call.function.parsed_arguments.model_dump()}


def chat_parse_format() -> Any:
    """Replies are not constrained, so a schema for them is refused by name."""
    try:
        openai.OpenAI().chat.completions.parse(model="m", messages=USER, response_format=Sum)
    except openai.BadRequestError as error:
        return {"error": type(error).__name__, "field": error.param}


async def chat_async() -> Any:
    async with openai.AsyncOpenAI() as client:
        first = await client.chat.completions.create(model="m", messages=USER, tools=CHAT_TOOLS)
        messages = USER + answer_call(first.choices[0].message)
        texts = []
        stream = await client.chat.completions.create(
            model="m", messages=messages, tools=CHAT_TOOLS, stream=True
        )
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content or "")
    return {"answer": "".join(texts)}


def chat_tokens() -> Any:
    """Token ids as vLLM tells them, whole and streamed, which RL tools read."""
    client = openai.OpenAI()
    options: Any = {"logprobs": True, "extra_body": {"return_token_ids": True}}
    whole = client.chat.completions.create(model="m", messages=USER, **options)
    (choice,) = whole.choices
    tokens = [{"prompt": whole.prompt_token_ids, "completion": choice.token_ids}]
    num_logprobs = len(choice.logprobs.content)
    chunks = list(client.chat.completions.create(model="m", messages=USER, stream=True, **options))
    streamed: list[int] = []
    for chunk in chunks:
        streamed += getattr(chunk.choices[0], "token_ids", None) or []
    tokens.append({"prompt": chunks[0].prompt_token_ids, "completion": streamed})
    return {"has_logprobs": num_logprobs == len(choice.token_ids), "tokens": tokens}


def responses_whole() -> Any:
    reply = openai.OpenAI().responses.create(model="m", input=QUESTION, store=False)
    return {"answer": reply.output_text, "status": reply.status}


def responses_stream() -> Any:
    events = list(openai.OpenAI().responses.create(model="m", input=QUESTION, stream=True))
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    numbers = [event.sequence_number for event in events]
    return {
        "answer": "".join(texts),
        "last": events[-1].type,
        "in_order": numbers == list(range(len(events))),
    }


def responses_tools() -> Any:
    client, given = openai.OpenAI(), list(USER)
    first = client.responses.create(model="m", input=given, tools=TOOLS, instructions="Be brief.")
    (call,) = [item for item in first.output if item.type == "function_call"]
    given += [item.model_dump(exclude_none=True) for item in first.output]
    result = str(add(**json.loads(call.arguments)))
    given.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    second = client.responses.create(model="m", input=given, tools=TOOLS, instructions="Be brief.")
    return {"answer": second.output_text}


def responses_tools_stream() -> Any:
    """The helper `responses.stream` checks the order of events."""
    client, given = openai.OpenAI(), list(USER)
    with client.responses.stream(model="m", input=given, tools=TOOLS) as stream:
        kinds = {event.type for event in stream}
        first = stream.get_final_response()
    (call,) = [item for item in first.output if item.type == "function_call"]
    # The helper adds what it has parsed, which is no field of the API.
    given += [item.to_dict(mode="json") for item in first.output]
    for item in given:
        item.pop("parsed_arguments", None)
    result = str(add(**json.loads(call.arguments)))
    given.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    with client.responses.stream(model="m", input=given, tools=TOOLS) as stream:
        answer = stream.get_final_response().output_text
    return {
        "saw_arguments": "response.function_call_arguments.done" in kinds,
        "answer": answer,
    }


async def responses_async() -> Any:
    async with openai.AsyncOpenAI() as client:
        stream = await client.responses.create(model="m", input=QUESTION, stream=True)
        last: Any = None
        async for event in stream:
            last = event
        whole = await client.responses.create(model="m", input=QUESTION)
    return {"answers": [last.response.output[0].content[0].text, whole.output_text]}


def responses_parse_format() -> Any:
    try:
        openai.OpenAI().responses.parse(model="m", input=QUESTION, text_format=Sum)
    except openai.BadRequestError as error:
        return {"error": type(error).__name__, "field": error.param}


def retry() -> Any:
    """The endpoint's first answer is an error, which the client repeats."""
    reply = openai.OpenAI().chat.completions.create(model="m", messages=USER)
    return {"answer": reply.choices[0].message.content}


def slow() -> Any:
    """The reply takes longer than the client waits, which then asks again."""
    client = openai.OpenAI(timeout=1.0, max_retries=5)
    reply = client.chat.completions.create(model="m", messages=USER)
    return {"answer": reply.choices[0].message.content}


async def cancel() -> Any:
    async with openai.AsyncOpenAI() as client:
        try:
            async with asyncio.timeout(2.0):
                await client.chat.completions.create(model="m", messages=USER)
        except TimeoutError:
            return {"error": "TimeoutError"}


def too_long() -> Any:
    messages: Any = [{"role": "user", "content": "x" * 100_000}]
    try:
        openai.OpenAI().chat.completions.create(model="m", messages=messages)
    except openai.BadRequestError as error:
        return {"error": type(error).__name__, "code": error.code}


def ended() -> Any:
    try:
        openai.OpenAI(max_retries=0).responses.create(model="m", input=QUESTION)
    except openai.ConflictError as error:
        return {"error": type(error).__name__}


def wrong_key() -> Any:
    try:
        openai.OpenAI(api_key="sk-relay-wrong").chat.completions.create(model="m", messages=USER)
    except openai.AuthenticationError as error:
        return {"error": type(error).__name__}


def unknown_path() -> Any:
    try:
        openai.OpenAI().embeddings.create(model="m", input="a")
    except openai.NotFoundError as error:
        return {"error": type(error).__name__}


def list_models() -> Any:
    return {"models": [model.id for model in openai.OpenAI().models.list()]}


def list_fields() -> Any:
    """Return the fields that the methods of this version can send."""
    client = openai.OpenAI()
    methods = {"chat": client.chat.completions.create, "responses": client.responses.create}
    fields = {}
    for dialect, method in methods.items():
        names = set(inspect.signature(method).parameters)
        fields[dialect] = sorted(names - {"extra_headers", "extra_query", "extra_body", "timeout"})
    return {"fields": fields}


if __name__ == "__main__":
    run_cases(
        {
            "chat whole": chat_whole,
            "chat stream": chat_stream,
            "chat tools": chat_tools,
            "chat tools stream": chat_tools_stream,
            "chat parse tools": chat_parse_tools,
            "chat parse format": chat_parse_format,
            "chat async": chat_async,
            "chat tokens": chat_tokens,
            "responses whole": responses_whole,
            "responses stream": responses_stream,
            "responses tools": responses_tools,
            "responses tools stream": responses_tools_stream,
            "responses async": responses_async,
            "responses parse format": responses_parse_format,
            "retry after 500": retry,
            "retry after 429": retry,
            "retry while slow": slow,
            "cancel": cancel,
            "too long": too_long,
            "ended": ended,
            "wrong key": wrong_key,
            "unknown path": unknown_path,
            "models": list_models,
            "fields": list_fields,
        }
    )
