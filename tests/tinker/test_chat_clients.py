"""The real clients of OpenAI and Anthropic against a server in a process of its own."""

import json
from concurrent.futures import ThreadPoolExecutor

import anthropic
import httpx
import openai
import pytest
from tinker import types

from tests.support.tinker_data import done, floats, ints, learn, lora

pytestmark = [pytest.mark.medium, pytest.mark.timeout(240)]
HI = [{"role": "user", "content": "Hi"}]
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def open_openai(server, key="tml-test"):
    # Without the proxies of the environment, which lead nowhere from here.
    http = openai.DefaultHttpxClient(trust_env=False, timeout=60)
    url = f"{server.url}/oai/api/v1"
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, http_client=http)


def open_anthropic(server, key="tml-test"):
    http = anthropic.DefaultHttpxClient(trust_env=False, timeout=60)
    url = f"{server.url}/anthropic/api"
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, http_client=http)


def chat(client, model="tiny", messages=HI, **fields):
    how = {"max_tokens": 8, "seed": 1} | fields
    return client.chat.completions.create(model=model, messages=messages, **how)


def test_openai_chat_is_the_same_whole_and_streamed(server):
    client = open_openai(server)
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))

    assert (whole.model, whole.choices[0].finish_reason) == ("tiny", "length")
    # ChatML around two letters: 15 of the tokens are letters and line ends, 3 frame the turns.
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (21, 8)
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert chat(client, seed=2).choices[0].message.content != whole.choices[0].message.content
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_openai_completions_are_the_same_whole_and_streamed_of_text_and_of_tokens(server):
    client = open_openai(server)
    how = {"model": "tiny", "max_tokens": 8, "seed": 1, "logprobs": 1}
    whole = client.completions.create(prompt="Hi", **how)
    of_tokens = client.completions.create(prompt=list(b"Hi"), **how)
    chunks = list(client.completions.create(prompt="Hi", stream=True, **how))
    (choice,) = whole.choices
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (2, 8)
    assert (choice.finish_reason, len(choice.logprobs.token_logprobs)) == ("length", 8)
    assert of_tokens.choices == whole.choices
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    with pytest.raises(openai.BadRequestError, match="prompt is too long: 1024 tokens > 1023"):
        client.completions.create(prompt="x" * 1024, **how)


def test_openai_responses_are_whole_and_streamed(server):
    client = open_openai(server)
    how = {"model": "tiny", "input": "Hi", "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(**how)
    with client.responses.stream(**how) as stream:
        events = list(stream)
    assert whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert whole.usage.input_tokens == 21


def test_anthropic_messages_are_whole_and_streamed_and_counted(server):
    client = open_anthropic(server)
    # The client has no argument for the temperature.
    greedy = {"temperature": 0}
    how = {"model": "tiny", "messages": HI, "max_tokens": 8, "extra_body": greedy}
    whole = client.messages.create(**how)
    with client.messages.stream(**how) as stream:
        streamed = stream.get_final_message()
    assert (whole.stop_reason, whole.usage.input_tokens) == ("max_tokens", 21)
    assert streamed.content[0].text == whole.content[0].text
    assert client.messages.count_tokens(model="tiny", messages=HI).input_tokens == 21
    assert [model.id for model in client.models.list()] == ["tiny"]


@pytest.fixture(scope="module")
def calling(server):
    """Path of weights that answer with a call of the tool."""
    service = server.client()
    model = lora(service, rank=32)
    extra = {"return_token_ids": True}
    asked = chat(open_openai(server), tools=[TOOL], max_tokens=1, extra_body=extra)
    prompt = asked.model_extra["prompt_token_ids"]
    tokenizer = model.get_tokenizer()
    reply = [*tokenizer.encode(CALL, add_special_tokens=False), tokenizer.eos_token_id]
    whole, unlearned = [*prompt, *reply], len(prompt) - 1
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={
            "target_tokens": ints(whole[1:]),
            "weights": floats([0.0] * unlearned + [1.0] * len(reply)),
        },
    )
    learn(model, [datum], steps=36, lr=4e-3)
    return done(model.save_weights_for_sampler("calling")).path


def test_trained_weights_call_a_tool_of_openais_client(server, calling):
    client = open_openai(server)
    how = {"model": calling, "tools": [TOOL], "temperature": 0, "max_tokens": 80}
    first = chat(client, **how)
    (choice,) = first.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"a": 1})
    streamed = [chunk.choices[0].delta.tool_calls for chunk in chat(client, stream=True, **how)]
    ((again,),) = filter(None, streamed)
    assert again.function == type(again.function)(**call.function.model_dump())

    # The client's own loop: the call and its result go back as history.
    message = choice.message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    later = chat(client, calling, [*HI, message, result], tools=[TOOL])
    assert later.usage.prompt_tokens > first.usage.total_tokens
    assert later.choices[0].finish_reason in ("length", "stop")


def test_trained_weights_call_a_tool_of_anthropics_client(server, calling):
    tool = {"name": "f", "input_schema": {"type": "object", "properties": {}}}
    message = open_anthropic(server).messages.create(
        model=calling, messages=HI, tools=[tool], max_tokens=80, extra_body={"temperature": 0}
    )
    (block,) = message.content
    assert (message.stop_reason, block.type, block.input) == ("tool_use", "tool_use", {"a": 1})


def test_errors_are_those_that_the_clients_know(server, calling):
    mine, theirs = open_openai(server), open_openai(server, key="tml-somebody-else")
    long = [{"role": "user", "content": "x" * 2000}]
    with pytest.raises(openai.NotFoundError, match="model 'gpt' does not exist here"):
        chat(mine, "gpt")
    with pytest.raises(openai.NotFoundError) as foreign:
        chat(theirs, calling)
    with pytest.raises(openai.NotFoundError) as unknown:
        chat(theirs, calling.replace("calling", "none"))
    assert str(foreign.value).replace("calling", "none") == str(unknown.value)
    for error, ask in (
        (openai.BadRequestError, lambda: chat(mine, messages=long)),
        (
            anthropic.BadRequestError,
            lambda: open_anthropic(server).messages.create(
                model="tiny", messages=long, max_tokens=8
            ),
        ),
    ):
        with pytest.raises(error, match="prompt is too long: 2019 tokens > 1023 maximum"):
            ask()
    with pytest.raises(openai.BadRequestError, match=r"frequency_penalty=0\.5"):
        chat(mine, frequency_penalty=0.5)


def test_a_key_is_needed(server):
    for path, kind in (
        ("/oai/api/v1/chat/completions", "authentication_error"),
        ("/anthropic/api/v1/messages", "authentication_error"),
    ):
        body = {"model": "tiny", "messages": HI, "max_tokens": 4}
        answer = httpx.post(f"{server.url}{path}", json=body, trust_env=False)
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, kind)


def test_two_owners_at_once_get_what_each_gets_alone(server):
    clients = [open_openai(server, key=f"tml-owner-{name}") for name in ("one", "two")]
    alone = [chat(client, seed=5, max_tokens=40) for client in clients]

    def ask(number):
        return chat(clients[number % 2], seed=5, max_tokens=40)

    with ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(ask, range(8)))
    texts = {reply.choices[0].message.content for reply in (*alone, *replies)}
    assert len(texts) == 1
