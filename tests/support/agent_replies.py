"""Replies as models may write them, and the bodies and streams of them as clients read them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl.agents.dialects import chat, completions, messages, responses, tokens
from rl.agents.dialects.reply_reader import ParsedReply, ReplyEvent, ReplyReader
from rl.agents.types import ChatReply, ChatRequest
from rl.types import Completion, Message

DIALECTS: dict[str, Any] = {"chat": chat, "responses": responses, "messages": messages}
STREAMS: dict[str, Callable[..., Any]] = {
    "chat": chat.ChatStream,
    "responses": responses.ResponsesStream,
    "messages": messages.MessagesStream,
}
ASKS: Mapping[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "responses": {"input": "hi"},
    "messages": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 9,
        "thinking": {"type": "adaptive"},
    },
}
"""Smallest request of each dialect; its replies tell thoughts."""
VALUES = (
    1,
    -2.5,
    "x",
    "</tool_call>",
    "<think>",
    "}{",
    'a"b\\',
    "é😀\n",
    None,
    True,
    [1, {"k": []}],
)


def make_request(dialect: str, **more: Any) -> ChatRequest:
    if dialect == "tokens":
        return tokens.read_request({"token_ids": [1], **more})
    if dialect == "completions":
        return completions.read_request({"prompt": "hi", **more})
    return DIALECTS[dialect].read_request({**ASKS[dialect], **more})


def make_reply(parsed: ParsedReply, *, text: str = "", **more: Any) -> ChatReply:
    """Return a reply of four tokens to a prompt of three."""
    finish_reason = more.pop("finish_reason", "stop")
    completion = Completion(
        token_ids=np.array([7, 8, 9, 2], np.int32),
        logprobs=np.array([-0.5, -0.25, -1.0, 0.0], np.float32),
        policy_versions=np.zeros(4, np.int32),
        finish_reason=finish_reason,
    )
    end = "tool_calls" if parsed.calls else "stop"
    fields: dict[str, Any] = {
        "id": "r1",
        "created": 1_700_000_000,
        "model": "policy",
        "text": text,
        "end": "length" if finish_reason == "length" else end,
        "prompt_ids": np.array([4, 5, 6], dtype=np.int32),
        "completion": completion,
        "cached_tokens": 2,
    }
    return ChatReply(**fields | more)


def make_text(rng: random.Random, call_format: str) -> str:
    """Return a reply with thoughts, calls and damage, at times cut off anywhere."""
    parts = []
    for _ in range(rng.randint(0, 5)):
        parts.append(_make_part(rng, call_format))
    text = "".join(parts)
    if rng.random() < 0.2:
        text = text[: rng.randint(0, len(text))]
    return text


def make_call(rng: random.Random, call_format: str) -> str:
    arguments = {f"k{place}": rng.choice(VALUES) for place in range(rng.randint(0, 3))}
    key = "arguments" if call_format == "hermes" else rng.choice(["arguments", "parameters"])
    call = json.dumps({"name": "add", key: arguments}, ensure_ascii=rng.random() < 0.5)
    if call_format == "llama":
        return f"{call}{rng.choice(['', ';', '; ', chr(10)])}"
    white = rng.choice(["", "\n"])
    return f"<tool_call>{white}{call}{white}</tool_call>"


def _make_part(rng: random.Random, call_format: str) -> str:
    kind = rng.randint(0, 9)
    if kind <= 3:
        return make_call(rng, call_format)
    if kind == 4:
        inner = make_call(rng, call_format) if rng.random() < 0.5 else "hm"
        return f"<think>\n{inner}\n</think>\n\n"
    if kind == 5:
        call = make_call(rng, call_format)
        place = rng.randint(0, len(call))
        return call[:place] + rng.choice(["", "}", '"', "x"]) + call[place + 1 :]
    if kind == 6:
        return rng.choice(
            ["<tool_call>", "</tool_call>", "<think>", "[THINK]no[/THINK]", "<|python_tag|>"]
        )
    if kind == 7:
        return rng.choice(["\n", " ", "\n\n", ";", "{", '{"a": 1}', "<tool", "</thi"])
    return rng.choice(["It is 5.", "naïve 😀 text", "a < b", " and\nthen "])


def feed_in_pieces(reader: ReplyReader, text: str, rng: random.Random) -> list[list[ReplyEvent]]:
    """Return the events of each piece of a text that is cut at random places, and of its end."""
    events, place = [], 0
    while place < len(text):
        size = rng.choice((1, 2, 3, 5, 8, 40))
        events.append(reader.feed(text[place : place + size]))
        place += size
    return [*events, reader.finish()]


# Streams as clients read them


@dataclass(frozen=True)
class Heard:
    """A reply as a client has put it together."""

    content: Any
    """Message of chat, output of responses, blocks of messages."""
    end: Any


def parse_frames(raw: bytes) -> Iterator[dict[str, Any]]:
    """Yield the data of a stream's events; the name of an event is that of its type."""
    for frame in raw.decode().removesuffix("\n\n").split("\n\n"):
        if frame.startswith((":", "event: ping")) or frame == "data: [DONE]":
            continue
        lines = frame.split("\n")
        data = json.loads(lines[-1].removeprefix("data: "))
        if len(lines) == 2:
            assert lines[0] == f"event: {data['type']}"
        yield data


def hear_chat(raw: bytes) -> Heard:
    message: dict[str, Any] = {"role": None, "content": ""}
    end = None
    assert raw.endswith(b"data: [DONE]\n\n")
    for chunk in parse_frames(raw):
        assert chunk["object"] == "chat.completion.chunk"
        for choice in chunk["choices"]:
            assert end is None
            end = choice["finish_reason"]
            for key, value in choice["delta"].items():
                if key == "role":
                    message["role"] = value
                elif key == "tool_calls":
                    for call in value:
                        calls = message.setdefault("tool_calls", [])
                        assert call.pop("index") == len(calls)
                        calls.append(call)
                else:
                    message[key] = message.get(key, "") + value
    return Heard(message, end)


def hear_responses(raw: bytes) -> Heard:
    """Put items together from their deltas, and check them against what each end repeats."""
    items: list[dict[str, Any]] = []
    events = list(parse_frames(raw))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
            continue
        item = items[event["output_index"]]
        assert event.get("item_id", item["id"]) == item["id"]
        if kind == "content_part.added":
            item["content"].append(event["part"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            item["content"][event["content_index"]]["text"] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert item["content"][event["content_index"]]["text"] == event["text"]
        elif kind == "content_part.done":
            assert item["content"][event["content_index"]] == event["part"]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert (item["arguments"], item["name"]) == (event["arguments"], event["name"])
        else:
            assert kind == "output_item.done"
            item["status"] = "completed"
            assert item == event["item"]
    response = events[-1]["response"]
    assert events[-1]["type"] == f"response.{response['status']}"
    assert response["output"] == items
    return Heard(items, response["status"])


def hear_messages(raw: bytes) -> Heard:
    blocks: list[dict[str, Any]] = []
    events = list(parse_frames(raw))
    assert events[0]["type"] == "message_start"
    is_open, inputs = False, ""
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
            is_open, inputs = True, ""
        elif event["type"] == "content_block_delta":
            assert is_open
            assert event["index"] == len(blocks) - 1
            delta = event["delta"]
            kind = delta.pop("type")
            if kind == "input_json_delta":
                inputs += delta["partial_json"]
                blocks[-1]["input"] = json.loads(inputs)
            else:
                (key,) = delta
                assert kind == f"{key}_delta"
                blocks[-1][key] += delta[key]
        else:
            assert event == {"type": "content_block_stop", "index": len(blocks) - 1}
            is_open = False
    assert not is_open
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    return Heard(blocks, events[-2]["delta"]["stop_reason"])


HEAR = {"chat": hear_chat, "responses": hear_responses, "messages": hear_messages}


def hear_body(dialect: str, body: Mapping[str, Any]) -> Heard:
    """Return what a client reads in a whole body."""
    if dialect == "chat":
        (choice,) = body["choices"]
        message = dict(choice["message"])
        assert message.pop("refusal") is None
        # A stream has no null: its content is the text of no chunks.
        message["content"] = message["content"] or ""
        return Heard(message, choice["finish_reason"])
    if dialect == "responses":
        return Heard(body["output"], body["status"])
    return Heard(body["content"], body["stop_reason"])


def echo(dialect: str, body: Mapping[str, Any]) -> Message:
    """Return the message that a client's history of a body reads to."""
    asked: dict[str, Any] = json.loads(json.dumps(ASKS[dialect]))
    told = json.loads(json.dumps(body))
    question = {"role": "user", "content": "and?"}
    if dialect == "chat":
        asked["messages"] += [told["choices"][0]["message"], question]
    elif dialect == "responses":
        asked["input"] = [{"role": "user", "content": "hi"}, *told["output"], question]
    else:
        reply = {"role": "assistant", "content": told["content"]}
        asked["messages"] += [reply, question]
    first, message, last = DIALECTS[dialect].read_request(asked).messages
    assert (first.content, last.content) == ("hi", "and?")
    return message
