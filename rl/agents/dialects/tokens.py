"""Tokens in, tokens out: vLLM's `/inference/v1/generate`, whose clients render their own prompts.

Entries of logprobs have the names that vLLM gives them (`token_id`) and those that the client of
verifiers reads (`token`: "token_id:7").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl.agents.dialects.checking import check_fields, show_value
from rl.agents.dialects.reading import (
    MAX_TOP_LOGPROBS,
    count_harmless,
    read_count,
    read_flag,
    read_stops,
    read_text,
    require_list,
    require_object,
)
from rl.agents.dialects.reply_reader import ParsedReply
from rl.agents.dialects.writing import (
    COMMENT,
    DONE,
    describe_openai_error,
    describe_openai_usage,
    frame_data,
    list_logprobs,
)
from rl.agents.types import (
    BadRequestError,
    ChatReply,
    ChatRequest,
    ReplyExtra,
    RequestError,
    TokenPiece,
)

MAX_ID = 2**31 - 1
KEEP_ALIVE = COMMENT


def read_request(body: Mapping[str, Any]) -> ChatRequest:
    """Return the request of a body; raise BadRequestError for a field that is wrong."""
    body = require_object(body, "body")
    sorted_fields = check_fields(body, "tokens")
    given = body.get("sampling_params")
    sampling = {} if given is None else require_object(given, "sampling_params")
    wants: set[ReplyExtra] = set()
    name = "sampling_params.logprobs"
    if read_count(sampling.get("logprobs"), name, low=0, high=MAX_TOP_LOGPROBS) is not None:
        wants |= {"logprobs", "token_names"}
    if read_flag(body.get("return_token_ids"), "return_token_ids"):
        wants.add("token_ids")
    options = require_object(body.get("stream_options") or {}, "stream_options")
    if read_flag(options.get("include_usage"), "stream_options.include_usage"):
        wants.add("usage")
    return ChatRequest(
        messages=(),
        token_ids=read_token_ids(body.get("token_ids"), "token_ids"),
        model=read_text(body.get("model"), "model"),
        is_streamed=read_flag(body.get("stream"), "stream"),
        max_tokens=read_count(sampling.get("max_tokens"), "sampling_params.max_tokens"),
        stop=read_stops(sampling.get("stop"), "sampling_params.stop"),
        asked=sorted_fields.asked,
        harmless=count_harmless(sorted_fields.harmless, set()),
        wants=frozenset(wants),
        top_logprobs=1,
    )


def read_token_ids(value: Any, field: str) -> tuple[int, ...]:
    """Return a prompt of tokens; raise BadRequestError unless it is one."""
    ids = require_list(value, field)
    if not ids:
        raise BadRequestError(f"{field}=[] must have at least one token", field=field)
    for place, token_id in enumerate(ids):
        # True is an int.
        if type(token_id) is not int or not 0 <= token_id <= MAX_ID:
            where = f"{field}[{place}]"
            raise BadRequestError(
                f"{where}={show_value(token_id)} must be the id of a token", field=where
            )
    return tuple(ids)


def make_body(reply: ChatReply, request: ChatRequest, parsed: ParsedReply) -> dict[str, Any]:
    """Return the body of a whole reply. What its tokens mean is the client's to find out."""
    return {
        **_describe_head(reply),
        "created": reply.created,
        "model": reply.model,
        "choices": [_describe_choice(reply, request)],
        "usage": describe_openai_usage(reply),
        **_describe_prompt(reply, request),
    }


def make_error(error: RequestError) -> tuple[int, dict[str, Any]]:
    """Return status and body of an error."""
    return error.status, {"error": _describe_error(error)}


def stream_error(error: RequestError, request: ChatRequest) -> bytes:
    """Return the stream of a reply that has failed before its first token."""
    return frame_data({"error": _describe_error(error)}) + DONE


def stream_body(reply: ChatReply, request: ChatRequest, parsed: ParsedReply) -> bytes:
    """Return a whole reply as the stream of it: its tokens, and the usage if it is wanted."""
    head = _describe_head(reply)
    choice = _describe_choice(reply, request)
    chunk = {**head, "choices": [choice], "usage": None, **_describe_prompt(reply, request)}
    frames = [frame_data(chunk)]
    if "usage" in request.wants:
        frames.append(frame_data({**head, "choices": [], "usage": describe_openai_usage(reply)}))
    return b"".join([*frames, DONE])


def _describe_head(reply: ChatReply) -> dict[str, Any]:
    return {"request_id": reply.id, "output_mode": "tokens"}


def _describe_prompt(reply: ChatReply, request: ChatRequest) -> dict[str, Any]:
    wanted = "token_ids" in request.wants
    return {"prompt_token_ids": reply.prompt_ids.tolist() if wanted else None}


def _describe_choice(reply: ChatReply, request: ChatRequest) -> dict[str, Any]:
    tokens = reply.tokens
    return {
        "index": 0,
        # Calls are the client's to read, so that no reply ends with one.
        "finish_reason": "length" if reply.end == "length" else "stop",
        "stop_reason": reply.stop_text,
        "token_ids": list(tokens.token_ids),
        "logprobs": _describe_logprobs(tokens, request) if "logprobs" in request.wants else None,
    }


def _describe_logprobs(tokens: TokenPiece, request: ChatRequest) -> dict[str, Any]:
    content = []
    for token_id, entry in zip(tokens.token_ids, list_logprobs(tokens, request), strict=True):
        top = [{**one, "token_id": token_id} for one in entry["top_logprobs"]]
        content.append({**entry, "token_id": token_id, "top_logprobs": top})
    return {"content": content}


def _describe_error(error: RequestError) -> dict[str, Any]:
    return describe_openai_error(
        error.message, status=error.status, field=error.field, code=error.code
    )
