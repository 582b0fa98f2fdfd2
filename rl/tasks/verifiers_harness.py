"""The chat loop of verifiers' environments, in this process: their own starts a program for every rollout.

What it does is what verifiers' `null` harness does: it asks the model, runs the tools that the reply calls,
and ends with a reply that calls none. Every request goes through verifiers' interception server, which keeps
the record.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
from verifiers.v1 import Harness, HarnessConfig, ModelContext, ProgramResult, Runtime, TaskData, Trace
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

HARNESS_ID = "relay_conversation"
BAD_CALL = "malformed_tool_call"
"""Name under which a call that could not be read is recorded; its only argument is what the model is told."""

Wire = dict[str, Any]
"""A message as chat-completions requests have it."""


class ConversationConfig(HarnessConfig):
    id: str = HARNESS_ID


class ConversationHarness(Harness[ConversationConfig]):
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
        """One segment of a rollout: until the model replies without a call."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with AsyncExitStack() as stack:
            servers = {
                name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()
            }
            schemas, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            # Whoever waits for the model is cancelled with the rollout; a reply may take as long as it takes.
            http = await stack.enter_async_context(
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
            )
            request: Wire = {"model": ctx.model, "messages": messages}
            if schemas:
                request["tools"] = schemas
            while True:
                headers = {"Authorization": f"Bearer {secret}"}
                async with http.post(f"{endpoint}/chat/completions", json=request, headers=headers) as answer:
                    body = await answer.json()
                    if answer.status != 200:
                        # A rollout that verifiers itself stopped is told so by an error as well.
                        return ProgramResult(exit_code=1, stdout="", stderr=json.dumps(body))
                message = body["choices"][0]["message"]
                messages.append(message)
                calls = message.get("tool_calls") or []
                if not calls:
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                for call in calls:
                    content = await _answer(call["function"], dispatch, connections)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


async def _answer(function: Wire, dispatch: dict[str, tuple[str, str]], connections: Wire) -> Any:
    """What the model is told of a call: its result, or what was wrong with it."""
    name, arguments = function["name"], json.loads(function["arguments"])
    if name == BAD_CALL:
        return arguments["error"]
    if name not in dispatch:
        return f"Error: there is no tool {name!r}; the tools are {', '.join(dispatch) or 'none'}"
    return await call_mcp(connections, dispatch, name, arguments)


__all__ = ["ConversationHarness"]
