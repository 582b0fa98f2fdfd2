"""langgraph and langchain-openai: agents with tools over chat and responses."""

from __future__ import annotations

import warnings
from typing import Any

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

from tools.agents_contract.clients.harness import QUESTION, run_cases

GIVEN: Any = {"messages": [{"role": "user", "content": QUESTION}]}


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def get_text(message: Any) -> str:
    return str(message.text)


def run_agent(**options: Any) -> Any:
    agent = create_agent(ChatOpenAI(model="m", **options), tools=[add], system_prompt="Add.")
    result = agent.invoke(GIVEN)
    follow_up = {"role": "user", "content": "And 4 + 5?"}
    second = agent.invoke({"messages": [*result["messages"], follow_up]})
    return {"answers": [get_text(result["messages"][-1]), get_text(second["messages"][-1])]}


def chat() -> Any:
    return run_agent(temperature=0)


def responses() -> Any:
    return run_agent(use_responses_api=True)


def run_stream(**options: Any) -> Any:
    agent = create_agent(ChatOpenAI(model="m", **options), tools=[add])
    texts = []
    for message, about in agent.stream(GIVEN, stream_mode="messages"):
        if about["langgraph_node"] == "model":
            texts.append(get_text(message))
    return {"answer": "".join(texts)}


def chat_stream() -> Any:
    return run_stream()


def responses_stream() -> Any:
    return run_stream(use_responses_api=True)


async def react() -> Any:
    """The older function, which is still there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        agent = create_react_agent(ChatOpenAI(model="m"), tools=[add])
    result = await agent.ainvoke(GIVEN)
    return {"answer": get_text(result["messages"][-1])}


if __name__ == "__main__":
    run_cases(
        {
            "chat": chat,
            "chat stream": chat_stream,
            "responses": responses,
            "responses stream": responses_stream,
            "create_react_agent": react,
        }
    )
