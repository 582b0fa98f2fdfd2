"""The cookbook's capture proxy between real clients and a Tinker server.

    openai, anthropic -> proxy -> tinker.SamplingClient -> the server under test
                                    \\-> exporter -> capture/sample.jsonl, capture/train_op.jsonl

It runs in the cookbook's environment, so it imports nothing of relay. First it trains weights that
call a tool and say what the tool returned. Then it serves these weights with the proxy's own
application, and writes a line to metrics.jsonl for each case: what the clients saw, or the
traceback of what they raised. Arguments are those of a recipe, `name=value`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import tinker
from aiohttp import web
from tinker_cookbook.capture import (
    CaptureExporter,
    JsonlFileSink,
    capture,
    instrument_tinker,
    uninstrument_tinker,
)
from tinker_cookbook.capture.proxy.app import ProxyDeps, make_app
from tinker_cookbook.renderers import Message, Renderer, ToolCall, ToolSpec, get_renderer
from tinker_cookbook.stores.storage import LocalStorage
from tinker_cookbook.tokenizer_utils import get_tokenizer

RESULT_S, DRAIN_S = 300.0, 30.0
LABEL = "policy"
"""Name of the model in the proxy's replies; what clients ask for is only recorded."""
UNKNOWN_PATH = "tinker://00000000-0000000000000000:train:0/sampler_weights/none"
NUM_AT_ONCE = 8
TOO_LONG = "x " * 3000
"""More than the context, for a tokenizer of bytes."""

# The tool, in the form of each API and in the renderer's

QUESTION, ARGUMENTS, SUM = "What is 2 + 3?", {"a": 2, "b": 3}, "5"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
}
OPENAI_TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": SCHEMA},
}
ANTHROPIC_TOOL: Any = {"name": "add", "description": "Add.", "input_schema": SCHEMA}
ASK: Any = {"role": "user", "content": QUESTION}


# Weights that call the tool


def train_on_tool(training: tinker.TrainingClient, *, renderer: Renderer, num_steps: int) -> str:
    """Train a model on a call of the tool and on the answer after it; return its weights' path."""
    spec = ToolSpec(name="add", description="Add.", parameters=SCHEMA)
    asked = [
        *renderer.create_conversation_prefix_with_tools([spec]),
        Message(role="user", content=QUESTION),
    ]
    body = ToolCall.FunctionBody(name="add", arguments=json.dumps(ARGUMENTS))
    called = Message(role="assistant", content="", tool_calls=[ToolCall(id="c", function=body)])
    told = Message(role="tool", content=SUM, tool_call_id="c", name="add")
    call = json.dumps({"name": "add", "arguments": ARGUMENTS})
    data = [
        make_datum(renderer, asked, reply=f"<tool_call>\n{call}\n</tool_call>"),
        make_datum(renderer, [*asked, called, told], reply=f"The sum is {SUM}."),
    ]
    for _ in range(num_steps):
        gradient = training.forward_backward(data, "cross_entropy")
        training.optim_step(tinker.AdamParams(learning_rate=4e-3)).result(RESULT_S)
        loss = gradient.result(RESULT_S).metrics["loss:sum"]
    print(f"loss after {num_steps} steps: {loss:.4f}", flush=True)
    return training.save_weights_for_sampler("capture").result(RESULT_S).path


def make_datum(renderer: Renderer, messages: list[Message], *, reply: str) -> tinker.Datum:
    """Return a datum that trains a reply to a conversation, with the end of its turn."""
    prompt = renderer.build_generation_prompt(messages).to_ints()
    end = renderer.get_stop_sequences()[0]
    tokens = [*renderer.tokenizer.encode(reply, add_special_tokens=False), end]
    whole, num_unlearned = [*prompt, *tokens], len(prompt) - 1
    weights = [0.0] * num_unlearned + [1.0] * len(tokens)
    size = [len(weights)]
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=whole[1:], dtype="int64", shape=size),
            "weights": tinker.TensorData(data=weights, dtype="float32", shape=size),
        },
    )


# Cases. Each has an address of its own, so that its rows can be told from the others.


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The proxy as the clients of one case see it."""

    url: str
    case: str
    service: tinker.ServiceClient

    def address(self, number: int = 0) -> str:
        return f"{self.url}/r/run/{self.case}/traj/{number}"

    def open_openai(self, number: int = 0) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.address(number)}/v1", api_key="any", max_retries=0
        )

    def open_anthropic(self, number: int = 0) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.address(number), api_key="any", max_retries=0)


async def chat(client: openai.AsyncOpenAI, messages: Sequence[Any], **fields: Any) -> Any:
    how = {"model": "asked-for", "max_tokens": 16, "seed": 1} | fields
    return await client.chat.completions.create(messages=list(messages), **how)


async def write(client: anthropic.AsyncAnthropic, messages: Sequence[Any], **fields: Any) -> Any:
    how = {"model": "asked-for", "max_tokens": 16} | fields
    return await client.messages.create(messages=list(messages), **how)


async def take_openai_turns(place: Place) -> Any:
    client, messages, usages = place.open_openai(), [], []
    for turn in range(3):
        messages.append({"role": "user", "content": f"Turn {turn}"})
        reply = await chat(client, messages, seed=turn)
        messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        usages.append([reply.usage.prompt_tokens, reply.usage.completion_tokens])
    return {"usages": usages, "model": reply.model}


async def take_anthropic_turns(place: Place) -> Any:
    client, messages, usages = place.open_anthropic(), [], []
    for turn in range(3):
        messages.append({"role": "user", "content": f"Turn {turn}"})
        reply = await write(client, messages, system="Be brief.")
        messages.append({"role": "assistant", "content": reply.content[0].text or "-"})
        usages.append([reply.usage.input_tokens, reply.usage.output_tokens])
    return {"usages": usages, "model": reply.model}


async def stream_openai(place: Place) -> Any:
    client = place.open_openai()
    whole = await chat(client, [ASK])
    stream = await chat(client, [ASK], stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    usage, streamed = whole.usage, chunks[-1].usage
    return {
        "usages": [
            [usage.prompt_tokens, usage.completion_tokens],
            [streamed.prompt_tokens, streamed.completion_tokens],
        ],
        "is_equal": "".join(texts) == whole.choices[0].message.content,
    }


async def stream_anthropic(place: Place) -> Any:
    async with place.open_anthropic().messages.stream(
        model="asked-for", messages=[ASK], max_tokens=16
    ) as stream:
        kinds = [event.type async for event in stream]
        reply = await stream.get_final_message()
    usage = reply.usage
    return {
        "usages": [[usage.input_tokens, usage.output_tokens]],
        "ends": [kinds[0], kinds[-1]],
        "has_text": reply.content[0].type == "text",
    }


async def use_openai_tool(place: Place) -> Any:
    client = place.open_openai()
    how: Any = {"tools": [OPENAI_TOOL], "temperature": 0, "max_tokens": 128}
    first = await chat(client, [ASK], **how)
    message = first.choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": SUM}
    last = await chat(client, [ASK, message.model_dump(exclude_none=True), result], **how)
    return {
        "end": first.choices[0].finish_reason,
        "arguments": json.loads(call.function.arguments),
        "answer": last.choices[0].message.content,
    }


async def use_anthropic_tool(place: Place) -> Any:
    client = place.open_anthropic()
    how: Any = {
        "model": "asked-for",
        "max_tokens": 128,
        "tools": [ANTHROPIC_TOOL],
        "extra_body": {"temperature": 0},  # The client has no argument for it.
    }
    async with client.messages.stream(messages=[ASK], **how) as stream:
        first = await stream.get_final_message()
    (block,) = [block for block in first.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": block.id, "content": SUM}
    content: Any = [block.model_dump(include={"type", "id", "name", "input"})]
    history: Any = [
        ASK,
        {"role": "assistant", "content": content},
        {"role": "user", "content": [result]},
    ]
    last = await client.messages.create(messages=history, **how)
    return {
        "end": first.stop_reason,
        "arguments": block.input,
        "answer": last.content[0].text,
    }


async def ask_at_once(place: Place) -> Any:
    asking = []
    for number in range(NUM_AT_ONCE):
        messages = [{"role": "user", "content": "x" * (number + 1)}]
        asking.append(chat(place.open_openai(number), messages, seed=number))
    replies = await asyncio.gather(*asking)
    return {"usages": [[r.usage.prompt_tokens, r.usage.completion_tokens] for r in replies]}


async def send_long_prompts(place: Place) -> Any:
    long = [{"role": "user", "content": TOO_LONG}]
    return [
        await get_refusal(chat(place.open_openai(), long)),
        await get_refusal(write(place.open_anthropic(), long)),
    ]


async def get_refusal(asking: Awaitable[Any]) -> Any:
    """Return the status and the text of the error that a client raises."""
    try:
        await asking
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        return [error.status_code, str(error)]
    return [200, ""]


async def request_unknown_names(place: Place) -> Any:
    """Ask for models, weights and paths that are not there."""
    async with httpx.AsyncClient() as http:
        path = await http.post(f"{place.url}/v1/nothing", json={})
        address = await http.post(f"{place.url}/r/run/v1/messages", json={})
    told: dict[str, Any] = {"path": path.status_code, "address": address.status_code}
    for name, option in (
        ("model", {"base_model": "gpt-7"}),
        ("weights", {"model_path": UNKNOWN_PATH}),
    ):
        try:
            await place.service.create_sampling_client(**option)
            told[name] = ["", ""]
        except tinker.TinkerError as error:
            told[name] = [type(error).__name__, str(error)]
    return told


Case = Callable[[Place], Awaitable[Any]]
CASES: dict[str, Case] = {
    "openai_turns": take_openai_turns,
    "anthropic_turns": take_anthropic_turns,
    "openai_stream": stream_openai,
    "anthropic_stream": stream_anthropic,
    "openai_tools": use_openai_tool,
    "anthropic_tools": use_anthropic_tool,
    "at_once": ask_at_once,
    "too_long": send_long_prompts,
    "unknown": request_unknown_names,
}


# The run


async def run_cases(deps: ProxyDeps, service: tinker.ServiceClient, *, log: Path) -> None:
    """Serve the proxy's application on a free loopback port and run the cases, one by one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        runner = web.AppRunner(make_app(deps))
        await runner.setup()
        await web.SockSite(runner, listener).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            for name, case in CASES.items():
                row: dict[str, Any] = {"case": name}
                try:
                    place = Place(url=url, case=name, service=service)
                    row["seen"] = await case(place)
                except Exception:  # noqa: BLE001 - whatever a client raises is a finding
                    row["error"] = traceback.format_exc()
                    print(row["error"], flush=True)
                append_row(log, row)
        finally:
            await runner.cleanup()


def append_row(log: Path, row: dict[str, Any]) -> None:
    with log.open("a") as file:
        file.write(json.dumps(row) + "\n")


def main(arguments: Sequence[str]) -> None:
    given = dict(argument.split("=", 1) for argument in arguments)
    folder, model = Path(given["log_path"]), given["model_name"]
    renderer = get_renderer(given["renderer_name"], get_tokenizer(model), model_name=model)
    exporter = CaptureExporter(JsonlFileSink(LocalStorage(folder)))
    instrument_tinker(exporter)
    service = tinker.ServiceClient()
    try:
        training = service.create_lora_training_client(model, rank=32, seed=1).result(RESULT_S)
        with capture(run_id="teach"):
            path = train_on_tool(training, renderer=renderer, num_steps=int(given["num_steps"]))
        sampling = service.create_sampling_client(model_path=path).result(RESULT_S)
        deps = ProxyDeps(renderer=renderer, sampling_client=sampling, model_label=LABEL)
        asyncio.run(run_cases(deps, service, log=folder / "metrics.jsonl"))
    finally:
        uninstrument_tinker()
        is_drained = exporter.wait_pending(DRAIN_S) and exporter.force_flush(DRAIN_S)
        exporter.shutdown()
    losses = [exporter.dropped, exporter.export_failures, exporter.callback_failures]
    row = {"is_drained": is_drained, "losses": losses, "weights": path}
    append_row(folder / "metrics.jsonl", {"case": "exporter", "seen": row})


if __name__ == "__main__":
    main(sys.argv[1:])
