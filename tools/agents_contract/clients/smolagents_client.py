"""smolagents: ToolCallingAgent and CodeAgent, unmodified."""

from __future__ import annotations

import os
from typing import Any

import smolagents

from tools.agents_contract.clients.harness import QUESTION, run_cases


@smolagents.tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def make_model() -> smolagents.OpenAIModel:
    return smolagents.OpenAIModel(
        model_id="m",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
    )


def run_agent(kind: Any, **options: Any) -> Any:
    agent = kind(tools=[add], model=make_model(), max_steps=4, verbosity_level=0, **options)
    return {"answer": agent.run(QUESTION)}


def tool_calling() -> Any:
    return run_agent(smolagents.ToolCallingAgent)


def tool_calling_stream() -> Any:
    return run_agent(smolagents.ToolCallingAgent, stream_outputs=True)


def code() -> Any:
    return run_agent(smolagents.CodeAgent)


def code_stream() -> Any:
    return run_agent(smolagents.CodeAgent, stream_outputs=True)


if __name__ == "__main__":
    run_cases(
        {
            "ToolCallingAgent": tool_calling,
            "ToolCallingAgent stream": tool_calling_stream,
            "CodeAgent": code,
            "CodeAgent stream": code_stream,
        }
    )
