"""Harnesses of other dialects and habits, each of which plays the sums of `relay_adder`'s kind."""

import json

import aiohttp
import verifiers.v1 as vf


class Config(vf.HarnessConfig):
    id: str = "relay_harnesses"
    kind: str = "responses"


class Kinds(vf.Harness[Config]):
    """One of the programs below, in this process."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        async with aiohttp.ClientSession() as http:

            async def post(path, **body):
                headers = {"Authorization": f"Bearer {secret}", "x-api-key": secret}
                body["model"] = ctx.model
                async with http.post(f"{endpoint}{path}", json=body, headers=headers) as answer:
                    text = await answer.text()
                if answer.status != 200:
                    raise RuntimeError(text)
                return text

            await globals()[self.config.kind](post, data.prompt)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


async def responses(post, prompt):
    """Call tools by the Responses API until a reply calls none."""
    tools = [{"type": "function", "name": "add_one", "parameters": PARAMETERS}]
    items = [{"role": "user", "content": prompt}]
    while True:
        answer = json.loads(await post("/responses", input=items, tools=tools, instructions="Add."))
        items += answer["output"]
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        if not calls:
            return
        for call in calls:
            result = str(json.loads(call["arguments"])["a"] + 1)
            items.append(
                {"type": "function_call_output", "call_id": call["call_id"], "output": result}
            )


async def messages(post, prompt):
    """Call tools by the Messages API until a reply calls none."""
    tools = [{"name": "add_one", "input_schema": PARAMETERS}]
    turns = [{"role": "user", "content": prompt}]
    while True:
        body = {"messages": turns, "tools": tools, "system": "Add.", "max_tokens": 500}
        count = json.loads(await post("/messages/count_tokens", messages=turns, tools=tools))
        answer = json.loads(await post("/messages", **body))
        assert count["input_tokens"] > 0
        turns.append({"role": "assistant", "content": answer["content"]})
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        if not calls:
            return
        results = []
        for call in calls:
            text = str(call["input"]["a"] + 1)
            results.append({"type": "tool_result", "tool_use_id": call["id"], "content": text})
        turns.append({"role": "user", "content": results})


async def streamed(post, prompt):
    """Ask once, with a stream for the reply."""
    turns = [{"role": "user", "content": prompt}]
    assert "data: [DONE]" in await post("/chat/completions", messages=turns, stream=True)


async def sub_agent(post, prompt):
    """Ask another conversation for advice before the answer."""
    asked = [{"role": "user", "content": prompt}]
    plan = await chat(post, asked)
    advice = await chat(
        post,
        [
            {"role": "system", "content": "You advise."},
            {"role": "user", "content": f"Check: {plan['content']}"},
        ],
    )
    await chat(post, [*asked, plan, {"role": "user", "content": advice["content"]}])


async def rewrite(post, prompt):
    """Replace the first exchange by a summary of its own, before the second."""
    system = {"role": "system", "content": "Add."}
    first = await chat(post, [system, {"role": "user", "content": prompt}])
    summary = f"{prompt} You said: {first['content']}. Go on."
    await chat(post, [system, {"role": "user", "content": summary}])


async def chat(post, turns):
    return json.loads(await post("/chat/completions", messages=turns))["choices"][0]["message"]


__all__ = ["Kinds"]
