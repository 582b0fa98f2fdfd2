"""An agent that rewrites its history: after three turns a summary takes its place. A sub-agent with
a conversation of its own works out the first product.

Each conversation becomes a branch of the rollout, and all of them are trained.
"""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

from examples.agents.calculator import ask

MAX_TURNS = 3
"""Replies after which the history is summed up, before the next question."""
SUB_AGENT = {"x-relay-role": "sub-agent"}
"""Header of the sub-agent's requests. With a system message of its own it would need none."""


async def solve(problem: Any) -> list[str]:
    """Answer the products of a problem, the first one by a sub-agent."""
    first, *others = problem.question.split()
    async with AsyncOpenAI() as client:
        sub_agent = client.with_options(default_headers=SUB_AGENT)
        answers = [await ask(sub_agent, [{"role": "user", "content": first}])]
        summary = [f"{first}{answers[0]}"]
        messages: list[Any] = []
        for asked in others:
            if sum(message["role"] == "assistant" for message in messages) >= MAX_TURNS:
                messages = []
            question = asked
            if not messages:
                question = "\n".join([*summary, asked])
            messages.append({"role": "user", "content": question})
            answers.append(await ask(client, messages))
            summary.append(f"{asked}{answers[-1]}")
    return answers
