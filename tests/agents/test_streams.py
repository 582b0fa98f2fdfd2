"""A streamed reply is the whole reply, and a client that echoes it sends the same message."""

import json
import random

import pytest

from rl.agents.dialects.reply_reader import ParsedReply, ReplyReader, join_events, read_reply
from rl.agents.types import RequestError, TokenPiece
from tests.support.agent_replies import (
    DIALECTS,
    HEAR,
    STREAMS,
    echo,
    feed_in_pieces,
    hear_body,
    make_reply,
    make_request,
    make_text,
    parse_frames,
)

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
NUM_REPLIES = 10_000


def read(text, *, call_format="hermes"):
    return read_reply(text, call_format=call_format, reply_id="r1", has_tools=True)


def stream(dialect, request, reply, pieces):
    writer = STREAMS[dialect](request, start=reply.start)
    frames = [writer.start()]
    for events in pieces:
        frames += [DIALECTS[dialect].KEEP_ALIVE, writer.add(events)]
    return b"".join([*frames, writer.finish(reply)])


@pytest.mark.parametrize("call_format", ["hermes", "llama"])
def test_streamed_reply_is_the_whole_one_however_it_is_cut(call_format):
    """Content, thoughts, calls, ids, arguments and end, as clients put them together."""
    rng = random.Random(5)
    requests = {dialect: make_request(dialect) for dialect in DIALECTS}
    num_calls = num_cut = 0
    for number in range(NUM_REPLIES // 2):
        text = make_text(rng, call_format)
        reader = ReplyReader(call_format=call_format, reply_id="r1", has_tools=True)
        pieces = feed_in_pieces(reader, text, rng)
        dialect = list(DIALECTS)[number % len(DIALECTS)]
        parsed = read(text, call_format=call_format)
        finish_reason = rng.choice(["stop", "stop", "length"])
        reply = make_reply(parsed, text=text, finish_reason=finish_reason)
        request = requests[dialect]
        whole = hear_body(dialect, DIALECTS[dialect].make_body(reply, request, parsed))
        raw = stream(dialect, request, reply, pieces)
        assert HEAR[dialect](raw) == whole, text
        num_calls += len(parsed.calls)
        num_cut += finish_reason == "length"
    assert num_calls > 1500
    assert num_cut > 1000


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("call_format", ["hermes", "llama"])
def test_echoed_reply_reads_back_to_the_same_message(dialect, call_format):
    rng = random.Random(6)
    request = make_request(dialect)
    for _ in range(500):
        parsed = read(make_text(rng, call_format), call_format=call_format)
        body = DIALECTS[dialect].make_body(make_reply(parsed), request, parsed)
        assert echo(dialect, body) == parsed.message


@pytest.mark.parametrize("dialect", DIALECTS)
def test_client_that_wants_no_thoughts_is_told_none(dialect):
    parsed = read(f"<think>a</think>b<think>c</think>d{CALL}")
    more = {"thinking": None} if dialect == "messages" else {"include_reasoning": False}
    request = make_request(dialect, **more)
    reply = make_reply(parsed)
    body = DIALECTS[dialect].make_body(reply, request, parsed)
    whole = hear_body(dialect, body)
    assert "reason" not in json.dumps(whole.content)
    assert "thinking" not in json.dumps(whole.content)
    assert HEAR[dialect](stream(dialect, request, reply, [parsed.parts])) == whole
    assert echo(dialect, body) == parsed.message


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("text", ["", "<think>only", "<think></think>"])
def test_reply_without_content_is_a_turn_all_the_same(dialect, text):
    parsed = read(text)
    body = DIALECTS[dialect].make_body(make_reply(parsed), make_request(dialect), parsed)
    assert echo(dialect, body) == parsed.message
    request = make_request(dialect)
    raw = stream(dialect, request, make_reply(parsed), [parsed.parts])
    assert HEAR[dialect](raw) == hear_body(dialect, body)


@pytest.mark.parametrize(
    ("text", "finish_reason", "stop_text", "ends"),
    [
        ("a", "stop", None, ("stop", "completed", "end_turn")),
        ("a", "stop", "END", ("stop", "completed", "stop_sequence")),
        ("a", "length", None, ("length", "incomplete", "max_tokens")),
        (CALL, "stop", None, ("tool_calls", "completed", "tool_use")),
        (CALL, "stop", "END", ("tool_calls", "completed", "tool_use")),
        (CALL, "length", None, ("length", "incomplete", "max_tokens")),
        (CALL[:30], "length", None, ("length", "incomplete", "max_tokens")),
    ],
)
def test_end_of_a_reply_in_each_dialect(text, finish_reason, stop_text, ends):
    parsed = read(text)
    reply = make_reply(parsed, finish_reason=finish_reason, stop_text=stop_text)
    for dialect, end in zip(DIALECTS, ends, strict=True):
        request = make_request(dialect)
        body = DIALECTS[dialect].make_body(reply, request, parsed)
        assert hear_body(dialect, body).end == end
        assert HEAR[dialect](stream(dialect, request, reply, [parsed.parts])).end == end
        if dialect == "messages":
            assert body["stop_sequence"] == (stop_text if end == "stop_sequence" else None)


def test_whole_reply_may_be_told_as_a_stream():
    parsed = read(f"<think>a</think>b{CALL}c")
    for dialect, module in DIALECTS.items():
        request, reply = make_request(dialect), make_reply(parsed)
        raw = module.stream_body(reply, request, parsed)
        assert HEAR[dialect](raw) == hear_body(dialect, module.make_body(reply, request, parsed))


def test_usage_of_each_dialect():
    """Three tokens of a prompt, of which two were cached, and four of a completion."""
    parsed = read("a")
    reply = make_reply(parsed)
    bodies = {
        name: module.make_body(reply, make_request(name), parsed)
        for name, module in DIALECTS.items()
    }
    assert bodies["chat"]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert bodies["responses"]["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 7,
    }
    assert bodies["messages"]["usage"] == {
        "input_tokens": 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 4,
    }


def test_stream_of_messages_begins_with_the_tokens_of_the_prompt():
    parsed = read("a")
    request = make_request("messages")
    first, *_, last, _ = parse_frames(
        stream("messages", request, make_reply(parsed), [parsed.parts])
    )
    usage = first["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (1, 2)
    assert usage["output_tokens"] == 0
    assert last["usage"]["output_tokens"] == 4


@pytest.mark.parametrize("is_wanted", [True, False])
def test_stream_of_chat_ends_with_the_usage_if_it_is_wanted(is_wanted):
    parsed = read("a")
    options = {"include_usage": is_wanted}
    request = make_request("chat", stream_options=options)
    chunks = list(parse_frames(stream("chat", request, make_reply(parsed), [parsed.parts])))
    assert (chunks[-1]["choices"] == []) == is_wanted
    if is_wanted:
        assert chunks[-1]["usage"]["total_tokens"] == 7
        assert {chunk["usage"] is None for chunk in chunks[:-1]} == {True}
    else:
        assert all("usage" not in chunk for chunk in chunks)


# Tokens as vLLM tells them

TEXTS = ("It", " is", " é", "")


def make_token_request(**more):
    return make_request("chat", return_token_ids=True, logprobs=True, **more)


def test_whole_reply_has_ids_and_logprobs_where_vllm_has_them():
    parsed = read("It is é")
    reply = make_reply(parsed, token_texts=TEXTS)
    body = DIALECTS["chat"].make_body(reply, make_token_request(top_logprobs=2), parsed)
    assert body["prompt_token_ids"] == [4, 5, 6]
    (choice,) = body["choices"]
    assert choice["token_ids"] == [7, 8, 9, 2]
    entries = choice["logprobs"]["content"]
    assert entries[2] == {
        "token": " é",
        "logprob": -1.0,
        "bytes": [32, 195, 169],
        # Of the alternatives only the sampled token is known.
        "top_logprobs": [{"token": " é", "logprob": -1.0, "bytes": [32, 195, 169]}],
    }
    assert [entry["logprob"] for entry in entries] == [-0.5, -0.25, -1.0, 0.0]


def test_reply_without_extras_has_none():
    parsed = read("a")
    body = DIALECTS["chat"].make_body(make_reply(parsed), make_request("chat"), parsed)
    assert "prompt_token_ids" not in body
    assert "token_ids" not in body["choices"][0]
    assert body["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("num_streamed", [0, 1, 3, 4])
def test_streamed_tokens_add_up_to_all_tokens_once(num_streamed):
    parsed = read("It is é")
    reply = make_reply(parsed, token_texts=TEXTS)
    writer = STREAMS["chat"](make_token_request(), start=reply.start)
    frames = [writer.start()]
    for place in range(num_streamed):
        tokens = TokenPiece(
            token_ids=reply.tokens.token_ids[place : place + 1],
            logprobs=reply.tokens.logprobs[place : place + 1],
            texts=TEXTS[place : place + 1],
        )
        # The text of the first two tokens is held back.
        frames.append(writer.add(parsed.parts if place == 2 else (), tokens=tokens))
    frames.append(writer.finish(reply))
    chunks = list(parse_frames(b"".join(frames)))
    assert chunks[0]["prompt_token_ids"] == [4, 5, 6]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    token_ids, names = [], []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        token_ids += choice.get("token_ids", [])
        names += [entry["token"] for entry in (choice.get("logprobs") or {}).get("content", [])]
    assert token_ids == [7, 8, 9, 2]
    assert names == list(TEXTS)


def test_tokens_are_named_by_ids_where_that_is_asked_or_texts_are_unknown():
    parsed = read("a")
    for request, texts in (
        (make_request("chat", logprobs=True, return_tokens_as_token_ids=True), TEXTS),
        (make_request("chat", logprobs=True), ()),
    ):
        body = DIALECTS["chat"].make_body(make_reply(parsed, token_texts=texts), request, parsed)
        entries = body["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in entries] == [f"token_id:{n}" for n in (7, 8, 9, 2)]


def test_logprobs_that_json_cannot_carry_are_the_lowest():
    parsed = read("a")
    reply = make_reply(parsed)
    reply.completion.logprobs[:2] = [float("-inf"), float("nan")]
    body = DIALECTS["chat"].make_body(reply, make_request("chat", logprobs=True), parsed)
    entries = body["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == [-9999.0, -9999.0, -1.0, 0.0]


# Errors and keep-alives

FULL = RequestError("the run is full", status=429, retry_after_s=2.0)
LONG = RequestError(
    "prompt is too long: 9 tokens", status=400, field="messages", code="context_length_exceeded"
)
BROKEN = RequestError("the engine failed", status=500)


@pytest.mark.parametrize(
    ("error", "openai_type", "anthropic_type"),
    [
        (FULL, "rate_limit_error", "rate_limit_error"),
        (LONG, "invalid_request_error", "invalid_request_error"),
        (BROKEN, "server_error", "api_error"),
        (RequestError("no key", status=401), "authentication_error", "authentication_error"),
        (RequestError("ended", status=409), "conflict_error", "conflict_error"),
    ],
)
def test_error_has_the_form_of_its_dialect(error, openai_type, anthropic_type):
    expected = {
        "message": error.message,
        "type": openai_type,
        "param": error.field or None,
        "code": error.code or None,
    }
    for dialect in ("chat", "responses"):
        assert DIALECTS[dialect].make_error(error) == (error.status, {"error": expected})
    body = {"type": "error", "error": {"type": anthropic_type, "message": error.message}}
    assert DIALECTS["messages"].make_error(error) == (error.status, body)


def test_error_in_a_stream_is_told_in_it():
    reply = make_reply(ParsedReply(parts=()))
    events = {}
    for dialect, make_stream in STREAMS.items():
        writer = make_stream(make_request(dialect), start=reply.start)
        *_, events[dialect] = parse_frames(writer.start() + writer.fail(LONG))
    assert events["chat"]["error"]["message"] == LONG.message
    assert events["responses"]["type"] == "error"
    assert events["responses"]["message"] == events["responses"]["error"]["message"] == LONG.message
    assert events["responses"]["sequence_number"] == 2
    assert events["messages"] == DIALECTS["messages"].make_error(LONG)[1]


def test_joined_events_are_those_of_a_whole_reply():
    parsed = read(f"a{CALL}b")
    assert join_events(parsed.parts) == parsed.parts


def test_no_character_of_a_text_ends_a_line_of_a_stream():
    text = "a\x85b\u2028c\u2029d\re\nf"
    parsed = read(text)
    request = make_request("chat")
    raw = stream("chat", request, make_reply(parsed), [parsed.parts])
    assert raw.decode().splitlines() == raw.decode().removesuffix("\n").split("\n")
    assert HEAR["chat"](raw).content["content"] == text
