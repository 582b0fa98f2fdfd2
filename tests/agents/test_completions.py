"""OpenAI's completions: bodies, prompts as text and as tokens, and where the path is."""

from __future__ import annotations

import asyncio
import json

import pytest

from rl.agents.dialects import completions
from rl.agents.dialects.reply_reader import ParsedReply
from rl.agents.endpoint.retries import RequestIdentity
from rl.agents.endpoint.stateless import ChatModel, StatelessAnswerer
from rl.agents.types import BadRequestError, RequestError
from rl.utils.threads import WorkerThread
from tests.support.agent_endpoint import ScriptedGenerator, make_qwen_renderer, serve
from tests.support.agent_replies import make_reply, make_request, parse_frames
from tools.agents_contract.scripted import reply_to

NOTHING = ParsedReply(parts=())
TEXTS = ("a", "bc", "d", "")


@pytest.mark.parametrize(
    ("given", "token_ids", "text"),
    [
        ("a b", None, "a b"),
        (["a b"], None, "a b"),
        ([5, 6], (5, 6), None),
        ([[5, 6]], (5, 6), None),
    ],
)
def test_prompt_is_a_text_or_tokens_alone_or_in_a_list(given, token_ids, text):
    request = make_request("completions", prompt=given)
    assert (request.token_ids, request.prompt_text) == (token_ids, text)
    assert request.messages == ()


@pytest.mark.parametrize(
    ("given", "field", "said"),
    [
        (None, "prompt", "must be a text or a list of token ids"),
        ({"a": 1}, "prompt", "must be a text or a list of token ids"),
        ([], "prompt", "must have at least one token"),
        ([[]], "prompt", "must have at least one token"),
        ([1, True], "prompt[1]", "must be the id of a token"),
        (["a", "b"], "prompt", "prompt has 2 prompts"),
        ([[1], [2]], "prompt", "prompt has 2 prompts"),
        ("\ud800", "prompt", "half of a surrogate pair"),
    ],
)
def test_prompt_that_is_none_or_many_is_refused(given, field, said):
    with pytest.raises(BadRequestError, match=said) as caught:
        make_request("completions", prompt=given)
    assert caught.value.field == field


def test_request_has_sixteen_tokens_unless_it_says_otherwise():
    assert make_request("completions").max_tokens == 16
    request = make_request("completions", max_tokens=3, stop="x", logprobs=0, temperature=0.5)
    assert (request.max_tokens, request.stop, request.top_logprobs) == (3, ("x",), 0)
    assert request.wants == {"logprobs"}
    assert request.asked == {"temperature": 0.5}


@pytest.mark.parametrize("field", ["n", "best_of", "echo", "suffix", "logit_bias"])
def test_field_that_asks_for_something_else_is_refused_by_name(field):
    value = {"n": 2, "best_of": 2, "echo": True, "suffix": "z", "logit_bias": {"5": 1}}[field]
    with pytest.raises(BadRequestError, match=f"{field}=.* is not supported"):
        make_request("completions", **{field: value})


def test_body_has_the_text_and_parallel_lists_of_logprobs():
    request = make_request("completions", logprobs=1, return_token_ids=True)
    reply = make_reply(NOTHING, text="abcd", token_texts=TEXTS)
    # Through JSON, which has no numbers of numpy.
    body = json.loads(json.dumps(completions.make_body(reply, request, NOTHING)))
    assert (body["id"], body["object"]) == ("cmpl-r1", "text_completion")
    assert body["usage"]["total_tokens"] == 7
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abcd", "stop")
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([4, 5, 6], [7, 8, 9, 2])
    assert choice["logprobs"] == {
        "tokens": ["a", "bc", "d", ""],
        "token_logprobs": [-0.5, -0.25, -1.0, 0.0],
        "top_logprobs": [{"a": -0.5}, {"bc": -0.25}, {"d": -1.0}, {"": 0.0}],
        "text_offset": [0, 1, 3, 4],
    }


def test_alternatives_and_logprobs_are_told_only_if_they_are_wanted():
    reply = make_reply(NOTHING, text="abcd", token_texts=TEXTS)
    for value, expected in ((None, None), (0, None)):
        body = completions.make_body(reply, make_request("completions", logprobs=value), NOTHING)
        logprobs = body["choices"][0]["logprobs"]
        assert (logprobs or {}).get("top_logprobs") is expected
        assert (logprobs is None) == (value is None)
        assert "token_ids" not in body["choices"][0]


def test_stream_has_the_text_its_end_and_the_usage():
    request = make_request(
        "completions", stream_options={"include_usage": True}, return_token_ids=True
    )
    raw = completions.stream_body(
        make_reply(NOTHING, text="abcd", finish_reason="length"), request, NOTHING
    )
    assert raw.endswith(b"data: [DONE]\n\n")
    chunk, last = parse_frames(raw)
    assert (chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) == ("abcd", "length")
    assert chunk["choices"][0]["prompt_token_ids"] == [4, 5, 6]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 4)


# Answers


@pytest.fixture
def answerer():
    """Answerer of a scripted model with a context of 120 bytes."""
    thread = WorkerThread("renderer")
    model = ChatModel(renderer=make_qwen_renderer(), thread=thread, max_context=120)
    generator = ScriptedGenerator(reply=lambda text: f"({text})")
    yield StatelessAnswerer(model=model, generator=generator, names=("m",))
    thread.stop(timeout_s=10)


def ask(answerer, **fields):
    request = make_request("completions", model="m", **fields)
    identity = RequestIdentity(digest=b"one")
    answer = asyncio.run(answerer.reply(request, identity=identity))
    return completions.make_body(answer.reply, request, answer.parsed)["choices"][0]["text"]


def test_text_and_its_tokens_get_the_same_reply_without_a_template(answerer):
    tokens = make_qwen_renderer().tokenizer.encode("Once")
    assert ask(answerer, prompt="Once") == ask(answerer, prompt=tokens) == "(Once)"
    assert [call[0] for call in answerer.generator.calls] == ["Once", "Once"]
    assert answerer.generator.calls[0][1].max_tokens == 16


def test_reply_ends_before_a_stop_text_and_calls_stay_text(answerer):
    assert ask(answerer, prompt="one two", stop="two") == "(one "
    call = '<tool_call>\n{"name": "f"}\n</tool_call>'
    assert ask(answerer, prompt=call, max_tokens=60) == f"({call})"


def test_prompt_that_fills_the_context_or_is_empty_is_refused(answerer):
    with pytest.raises(RequestError, match="prompt is too long: 120 tokens > 119 maximum"):
        ask(answerer, prompt="x" * 120)
    with pytest.raises(BadRequestError, match="prompt='' must have at least one token"):
        ask(answerer, prompt="")


def test_episodes_do_not_have_the_path():
    async def check():
        async with serve(reply_to) as served:
            answer = await served.post("/v1/completions", {"prompt": "Hi"})
            assert answer.status_code == 404
            assert "does not have this path" in json.loads(answer.text)["error"]["message"]

    asyncio.run(asyncio.wait_for(check(), 60))
