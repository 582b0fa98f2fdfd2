"""OpenAI's older completions: a prompt in, its continuation out, without a chat template.

Clients of it write their own prompts: evaluation tools, and scripts for base models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl.agents.dialects import tokens
from rl.agents.dialects.checking import check_fields, show_value
from rl.agents.dialects.reading import (
    MAX_TOP_LOGPROBS,
    count_harmless,
    read_count,
    read_flag,
    read_stops,
    read_text,
    require_object,
)
from rl.agents.dialects.reply_reader import ParsedReply
from rl.agents.dialects.writing import DONE, describe_openai_usage, frame_data, list_logprobs
from rl.agents.types import BadRequestError, ChatReply, ChatRequest, ReplyExtra

DEFAULT_MAX_TOKENS = 16
"""Most new tokens of a request that does not say, as in OpenAI's API."""

KEEP_ALIVE = tokens.KEEP_ALIVE
make_error = tokens.make_error
stream_error = tokens.stream_error


def read_request(body: Mapping[str, Any]) -> ChatRequest:
    """Return the request of a body; raise BadRequestError for a field that is wrong."""
    body = require_object(body, "body")
    sorted_fields = check_fields(body, "completions")
    token_ids, text = _read_prompt(body.get("prompt"))
    wants: set[ReplyExtra] = set()
    top = read_count(body.get("logprobs"), "logprobs", low=0, high=MAX_TOP_LOGPROBS)
    if top is not None:
        wants.add("logprobs")
    if read_flag(body.get("return_token_ids"), "return_token_ids"):
        wants.add("token_ids")
    options = require_object(body.get("stream_options") or {}, "stream_options")
    if read_flag(options.get("include_usage"), "stream_options.include_usage"):
        wants.add("usage")
    return ChatRequest(
        messages=(),
        token_ids=token_ids,
        prompt_text=text,
        model=read_text(body.get("model"), "model"),
        is_streamed=read_flag(body.get("stream"), "stream"),
        max_tokens=read_count(body.get("max_tokens"), "max_tokens") or DEFAULT_MAX_TOKENS,
        stop=read_stops(body.get("stop"), "stop"),
        asked=sorted_fields.asked,
        harmless=count_harmless(sorted_fields.harmless, set()),
        wants=frozenset(wants),
        top_logprobs=top or 0,
    )


def _read_prompt(value: Any) -> tuple[tuple[int, ...] | None, str | None]:
    """Return the tokens of a prompt, or else its text; a list of one prompt is that prompt."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise BadRequestError(
                f"prompt has {len(value)} prompts: a request has one reply", field="prompt"
            )
        (value,) = value
    if isinstance(value, list):
        return tokens.read_token_ids(value, "prompt"), None
    if not isinstance(value, str):
        raise BadRequestError(
            f"prompt={show_value(value)} must be a text or a list of token ids", field="prompt"
        )
    return None, read_text(value, "prompt")


def make_body(reply: ChatReply, request: ChatRequest, parsed: ParsedReply) -> dict[str, Any]:
    """Return the body of a whole reply: its text as the model wrote it, calls and thoughts too."""
    return {
        **_describe_head(reply),
        "choices": [_describe_choice(reply, request)],
        "usage": describe_openai_usage(reply),
    }


def stream_body(reply: ChatReply, request: ChatRequest, parsed: ParsedReply) -> bytes:
    """Return a whole reply as the stream of it: one chunk, and the usage if it is wanted."""
    head = _describe_head(reply)
    frames = [frame_data({**head, "choices": [_describe_choice(reply, request)], "usage": None})]
    if "usage" in request.wants:
        frames.append(frame_data({**head, "choices": [], "usage": describe_openai_usage(reply)}))
    return b"".join([*frames, DONE])


def _describe_head(reply: ChatReply) -> dict[str, Any]:
    return {
        "id": f"cmpl-{reply.id}",
        "object": "text_completion",
        "created": reply.created,
        "model": reply.model,
    }


def _describe_choice(reply: ChatReply, request: ChatRequest) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "text": reply.text,
        "finish_reason": "length" if reply.end == "length" else "stop",
        "stop_reason": reply.stop_text,
        "logprobs": _describe_logprobs(reply, request) if "logprobs" in request.wants else None,
    }
    if "token_ids" in request.wants:
        choice["prompt_token_ids"] = reply.prompt_ids.tolist()
        choice["token_ids"] = list(reply.tokens.token_ids)
    return choice


def _describe_logprobs(reply: ChatReply, request: ChatRequest) -> dict[str, Any]:
    """Return OpenAI's parallel lists, with an entry for each token."""
    entries = list_logprobs(reply.tokens, request)
    texts = [entry["token"] for entry in entries]
    logprobs = [entry["logprob"] for entry in entries]
    offsets, place = [], 0
    for text in texts:
        offsets.append(place)
        place += len(text)
    # Of the alternatives only the sampled token is known.
    top = [{text: logprob} for text, logprob in zip(texts, logprobs, strict=True)]
    return {
        "tokens": texts,
        "token_logprobs": logprobs,
        "top_logprobs": top if request.top_logprobs else None,
        "text_offset": offsets,
    }
