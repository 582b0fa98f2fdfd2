"""openai-agents: agents with tools, a handoff, streams, over responses and over chat."""

from __future__ import annotations

from typing import Any

import agents
from pydantic import BaseModel

from tools.agents_contract.clients.harness import QUESTION, run_cases


class Sum(BaseModel):
    value: int


@agents.function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def make_adder(**options: Any) -> agents.Agent:
    options = {"name": "adder", "model": "m", "tools": [add]} | options
    return agents.Agent(instructions="Add.", **options)


async def tools() -> Any:
    result = await agents.Runner.run(make_adder(), QUESTION)
    return {"answer": result.final_output}


async def handoff() -> Any:
    """The conversation goes on under the instructions of another agent."""
    first = agents.Agent(
        name="first", instructions="Hand over.", model="m", handoffs=[make_adder()]
    )
    result = await agents.Runner.run(first, QUESTION)
    return {"answer": result.final_output, "last": result.last_agent.name}


async def stream() -> Any:
    result = agents.Runner.run_streamed(make_adder(), QUESTION)
    kinds = [e.name async for e in result.stream_events() if e.type == "run_item_stream_event"]
    return {"answer": result.final_output, "kinds": kinds}


async def agent_as_tool() -> Any:
    inner = make_adder().as_tool(tool_name="ask_adder", tool_description="Add two numbers.")
    outer = agents.Agent(name="outer", instructions="Ask.", model="m", tools=[inner])
    result = await agents.Runner.run(outer, QUESTION)
    return {"answer": result.final_output}


async def session() -> Any:
    """The second question is asked with the whole history."""
    kept = agents.SQLiteSession("s")
    agent = make_adder()
    answers = []
    for question in (QUESTION, "And 4 + 5?"):
        result = await agents.Runner.run(agent, question, session=kept)
        answers.append(result.final_output)
    return {"answers": answers}


async def required() -> Any:
    settings = agents.ModelSettings(
        tool_choice="required", temperature=0.2, parallel_tool_calls=False
    )
    result = await agents.Runner.run(make_adder(model_settings=settings), QUESTION)
    return {"answer": result.final_output}


async def chat() -> Any:
    agents.set_default_openai_api("chat_completions")
    try:
        result = await agents.Runner.run(make_adder(), QUESTION)
    finally:
        agents.set_default_openai_api("responses")
    return {"answer": result.final_output}


async def chat_stream() -> Any:
    agents.set_default_openai_api("chat_completions")
    try:
        result = agents.Runner.run_streamed(make_adder(), QUESTION)
        num_events = len([event async for event in result.stream_events()])
    finally:
        agents.set_default_openai_api("responses")
    return {"answer": result.final_output, "has_events": num_events > 0}


async def output_format() -> Any:
    """Replies are not constrained, so a schema for them is refused by name."""
    try:
        await agents.Runner.run(make_adder(output_type=Sum), QUESTION)
    except Exception as error:  # noqa: BLE001 - the class is what is reported
        return {"error": type(error).__name__, "field": getattr(error, "param", None)}


if __name__ == "__main__":
    agents.set_tracing_disabled(True)
    run_cases(
        {
            "tools": tools,
            "handoff": handoff,
            "stream": stream,
            "agent as tool": agent_as_tool,
            "session": session,
            "required": required,
            "chat": chat,
            "chat stream": chat_stream,
            "output format": output_format,
        }
    )
