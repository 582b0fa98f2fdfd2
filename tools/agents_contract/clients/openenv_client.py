"""openenv: the probe of an endpoint and the client that captures tokens for training."""

from __future__ import annotations

import json
import os
from typing import Any

from openenv.core.harness.capture import InferenceClient, validate_llm
from openenv.core.harness.capture.validate import check_upstream_response

from tools.agents_contract.clients.harness import ADD_SCHEMA, QUESTION, run_cases

TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": ADD_SCHEMA}}]


def probe() -> Any:
    """Report how much of a reply the endpoint tells; the last two checks need a real model."""
    report = validate_llm(
        os.environ["OPENAI_BASE_URL"],
        "policy",
        api_key=os.environ["OPENAI_API_KEY"],
        check_logprobs_mode=False,
        check_tools=False,
    )
    return {"ok": report.ok, "level": report.capture_level}


async def capture() -> Any:
    """A turn is matched with the turn before by the tokens of its prompt."""
    client = InferenceClient(
        os.environ["OPENAI_BASE_URL"], served_model="m", api_key=os.environ["OPENAI_API_KEY"]
    )
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tokens, problems = [], []
    for _ in range(2):
        reply = await client.completion({"model": "m", "messages": messages, "tools": TOOLS})
        problems += [] if check_upstream_response(reply).ok else ["a reply is incomplete"]
        (choice,) = reply["choices"]
        tokens.append({"prompt": reply["prompt_token_ids"], "completion": choice["token_ids"]})
        messages.append(choice["message"])
        for call in choice["message"].get("tool_calls") or []:
            arguments = json.loads(call["function"]["arguments"])
            result = str(arguments["a"] + arguments["b"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    await client.aclose()
    first, second = tokens
    known = first["prompt"] + first["completion"]
    return {
        "answer": messages[-1]["content"],
        "problems": problems,
        "continues": second["prompt"][: len(known)] == known,
        "tokens": tokens,
    }


if __name__ == "__main__":
    run_cases({"probe": probe, "capture": capture})
