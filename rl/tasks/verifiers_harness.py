"""Harness of verifiers for rollouts without a program: a chat loop in this process.

It does what verifiers' `null` harness does, which starts a Python program for every rollout.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
from verifiers.v1 import (
    Harness,
    HarnessConfig,
    ModelContext,
    ProgramResult,
    Runtime,
    TaskData,
    Trace,
)
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

from rl.tasks.verifiers_task import HARNESS_ID

__all__ = ["ConversationHarness"]
"""verifiers looks here for the harness of this plugin."""

OVERFLOW = "context_length_exceeded"
"""Code of the error that ends a conversation which has no room left."""

Wire = dict[str, Any]
"""A message of a chat-completions request."""


class ConversationConfig(HarnessConfig):
    id: str = HARNESS_ID


class ConversationHarness(Harness[ConversationConfig]):
    """Chat loop that asks the model and runs tools until a reply calls none."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """Run one segment of a rollout, until the model replies without a call."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Wire] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with AsyncExitStack() as stack:
            servers = {}
            for name, url in mcp_urls.items():
                servers[name] = {"url": url, "timeout": self.config.tool_timeout}
            schemas, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            # No timeout: a reply takes as long as it takes, and the request is cancelled with the
            # rollout.
            http = await stack.enter_async_context(
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
            )
            headers = {"Authorization": f"Bearer {secret}"}
            request: Wire = {"model": ctx.model, "messages": messages}
            if schemas:
                request["tools"] = schemas
            while True:
                async with http.post(
                    f"{endpoint}/chat/completions", json=request, headers=headers
                ) as answer:
                    text = await answer.text()
                if answer.status != 200:
                    # As in `null`, a full context is a limit and no failure: the conversation is
                    # scored as it is.
                    return ProgramResult(
                        exit_code=int(OVERFLOW not in text), stdout="", stderr=text
                    )
                message = json.loads(text)["choices"][0]["message"]
                messages.append(message)
                calls = message.get("tool_calls") or []
                if not calls:
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                for call in calls:
                    content = await _answer(call["function"], dispatch, connections)
                    messages.append(
                        {"role": "tool", "tool_call_id": call["id"], "content": content}
                    )


async def _answer(function: Wire, dispatch: dict[str, tuple[str, str]], connections: Wire) -> Any:
    """Return the result of a call, or the error that the model is shown."""
    name = function["name"]
    if name not in dispatch:
        return f"Error: there is no tool {name!r}; the tools are {', '.join(dispatch) or 'none'}"
    return await call_mcp(connections, dispatch, name, json.loads(function["arguments"]))
