"""litellm: completions over chat and over Anthropic's messages, and responses."""

from __future__ import annotations

import json
import os
from typing import Any

import litellm

from tools.agents_contract.clients.harness import ADD_SCHEMA, QUESTION, run_cases

USER: Any = [{"role": "user", "content": QUESTION}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Add.", "parameters": ADD_SCHEMA},
    }
]


def complete(model: str, messages: Any, **options: Any) -> Any:
    return litellm.completion(model=model, messages=messages, **options)


def run_tools(model: str, *, is_streamed: bool) -> Any:
    messages = list(USER)
    options: Any = {"tools": TOOLS, "max_tokens": 256, "stream": is_streamed}
    for _ in range(2):
        reply = complete(model, messages, **options)
        if is_streamed:
            reply = litellm.stream_chunk_builder(list(reply), messages=messages)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or []:
            arguments = json.loads(call.function.arguments)
            result = str(arguments["a"] + arguments["b"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return {"answer": messages[-1]["content"]}


def chat() -> Any:
    return run_tools("openai/m", is_streamed=False)


def chat_stream() -> Any:
    return run_tools("openai/m", is_streamed=True)


def messages() -> Any:
    return run_tools("anthropic/m", is_streamed=False)


def messages_stream() -> Any:
    return run_tools("anthropic/m", is_streamed=True)


def responses() -> Any:
    reply = litellm.responses(model="openai/m", input=QUESTION)
    return {"answer": reply.output[0].content[0].text}


async def hosted() -> Any:
    """The provider for vLLM servers, with thoughts asked for."""
    reply = await litellm.acompletion(
        model="hosted_vllm/m",
        messages=USER,
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        reasoning_effort="low",
    )
    return {"answer": reply.choices[0].message.content}


def token_ids() -> Any:
    """Token ids where harbor reads them."""
    options: Any = {"logprobs": True, "extra_body": {"return_token_ids": True}}
    reply = complete("openai/m", USER, **options)
    (choice,) = reply.choices
    completion = choice.provider_specific_fields["token_ids"]
    return {
        "has_logprobs": len(choice.logprobs["content"]) == len(completion),
        "tokens": [{"prompt": reply.prompt_token_ids, "completion": completion}],
    }


def too_long() -> Any:
    try:
        complete("openai/m", [{"role": "user", "content": "x" * 100_000}])
    except litellm.ContextWindowExceededError as error:
        return {"error": type(error).__name__}


if __name__ == "__main__":
    run_cases(
        {
            "chat": chat,
            "chat stream": chat_stream,
            "messages": messages,
            "messages stream": messages_stream,
            "responses": responses,
            "hosted_vllm": hosted,
            "too long": too_long,
            "token ids": token_ids,
        }
    )
