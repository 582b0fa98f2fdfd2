"""An agent of anybody: the `openai` package with one tool. Nothing in it knows that it is trained.

    python calculator.py "37*48"     with OPENAI_BASE_URL and OPENAI_API_KEY

`configs/agents.py` trains the model behind it.
"""

from __future__ import annotations

import ast
import asyncio
import json
import operator
import sys
from types import SimpleNamespace
from typing import Any

# `openai` imports its parts when they are first used: here, not during the first question.
import openai.resources.chat.completions  # noqa: F401
from openai import AsyncOpenAI

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
OPERATORS: Any = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
MAX_CHARS = 100
"""Longest expression, so that no number in it is longer."""


def calculate(expression: str) -> str:
    """Return the value of sums and products of integers, or what is wrong with the expression."""
    try:
        if len(expression) > MAX_CHARS:
            raise ValueError
        return str(evaluate(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "Error: not an arithmetic expression; valid are integers, + - * and parentheses"


def evaluate(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=value) if type(value) is int:
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -evaluate(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            result: int = OPERATORS[type(op)](evaluate(left), evaluate(right))
            return result
    raise ValueError


async def ask(client: AsyncOpenAI, messages: list[Any]) -> str:
    """Return the model's answer, and add it to the messages with all calls before it."""
    while True:
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = calculate(str(json.loads(call.function.arguments).get("expression")))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def solve(problem: Any) -> str:
    """Answer every product of a problem, in one conversation."""
    answer, messages = "", list[Any]()
    async with AsyncOpenAI() as client:
        for question in problem.question.split():
            messages.append({"role": "user", "content": question})
            answer = await ask(client, messages)
    return answer


if __name__ == "__main__":
    print(asyncio.run(solve(SimpleNamespace(question=" ".join(sys.argv[1:])))))
