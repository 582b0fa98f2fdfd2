"""An agent of anybody: the `openai` package with one tool. Nothing in it knows that it is trained.

    python calculator.py "37*48"     with OPENAI_BASE_URL and OPENAI_API_KEY

`configs/agents.py` trains the model behind it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

# `openai` imports its parts when they are first used: here once, and not again in every episode.
import openai.resources.chat.completions  # noqa: F401
from openai import AsyncOpenAI

from rl.tools.calculator import evaluate
from rl.tools.tool import ToolError

CALCULATOR = {
    "name": "calculator",
    "description": "Evaluate an arithmetic expression.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
}
TOOLS: Any = [{"type": "function", "function": CALCULATOR}]


async def ask(client: AsyncOpenAI, messages: list[Any]) -> str:
    """Return the model's answer, and add it to the messages with all calls before it."""
    while True:
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = calculate(json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def calculate(arguments: dict[str, Any]) -> str:
    try:
        return str(evaluate(str(arguments.get("expression"))))
    except ToolError as error:
        return str(error)


async def solve(problem: Any) -> str:
    """Answer every product of a problem, in one conversation."""
    answer, messages = "", list[Any]()
    async with AsyncOpenAI() as client:
        for question in problem.question.split():
            messages.append({"role": "user", "content": question})
            answer = await ask(client, messages)
    return answer


if __name__ == "__main__":
    from types import SimpleNamespace

    print(asyncio.run(solve(SimpleNamespace(question=" ".join(sys.argv[1:])))))
