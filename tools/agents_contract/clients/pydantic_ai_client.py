"""pydantic-ai: agents with tools over responses, chat and messages, whole and streamed."""

from __future__ import annotations

from typing import Any

import pydantic_ai
from pydantic import BaseModel

from tools.agents_contract.clients.harness import QUESTION, run_cases

MODELS = {"responses": "openai:m", "chat": "openai-chat:m", "messages": "anthropic:m"}


class Sum(BaseModel):
    value: int


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def make_agent(dialect: str, **options: Any) -> pydantic_ai.Agent:
    return pydantic_ai.Agent(MODELS[dialect], instructions="Add.", tools=[add], **options)


async def run_agent(dialect: str) -> Any:
    return {"answer": (await make_agent(dialect).run(QUESTION)).output}


async def run_stream(dialect: str) -> Any:
    async with make_agent(dialect).run_stream(QUESTION) as result:
        texts = [text async for text in result.stream_text(delta=True, debounce_by=None)]
    return {"answer": "".join(texts)}


async def run_twice(dialect: str) -> Any:
    """The second question is asked with the whole history."""
    agent = make_agent(dialect)
    first = await agent.run(QUESTION)
    second = await agent.run("And 4 + 5?", message_history=first.all_messages())
    return {"answers": [first.output, second.output]}


async def run_typed(dialect: str) -> Any:
    """A typed result is asked for as the call of a tool."""
    result = await make_agent(dialect, output_type=Sum).run(QUESTION)
    return {"value": result.output.value}


if __name__ == "__main__":
    cases = {}
    for name in MODELS:
        cases[f"{name} tools"] = lambda name=name: run_agent(name)
        cases[f"{name} stream"] = lambda name=name: run_stream(name)
        cases[f"{name} history"] = lambda name=name: run_twice(name)
        cases[f"{name} typed"] = lambda name=name: run_typed(name)
    run_cases(cases)
