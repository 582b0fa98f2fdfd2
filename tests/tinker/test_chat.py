"""Conversations of other APIs' clients with the service: models, owners, weights, ends."""

import asyncio
from dataclasses import replace

import pytest

from rl.models.files.tokenizer import build_byte_tokenizer
from rl.tinker.types import BusyError
from tests.support.fake_tinker import BASE, ME, YOU, service_test, settled

URL = "http://127.0.0.1"
MODEL = "tinker://00000000-0000000000000000:train:0"
HI = {"role": "user", "content": "Hi"}
PATHS = ("/oai/api/v1/chat/completions", "/oai/api/v1/responses", "/anthropic/api/v1/messages")

COMPLETIONS = "/oai/api/v1/completions"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    build_byte_tokenizer(folder)
    return folder


def offer(client, tokenizer, **changes):
    """Give the fake backend a tokenizer of bytes, whose token n is byte n."""
    base = replace(BASE, tokenizer_folder=str(tokenizer), **changes)
    client.backend.base_model = base


async def chat(client, model="tiny", *, path=PATHS[0], **fields):
    body = {"model": model, "messages": [HI], "max_tokens": 4} | fields
    return await client.post(f"{URL}{path}", body)


async def save_weights(client, name="a"):
    """Return the path of a fresh model's weights, whose samples are byte 0."""
    return await client.saved_sampler(client.model(), 1, name)


def run(scenario, **limits):
    @service_test(virtual=False, **limits)
    async def test(client):
        await scenario(client)
        await settled()  # The watch over each connection ends after the answer.

    test()


def test_base_model_and_saved_weights_answer_by_their_names(tokenizer):
    async def scenario(client):
        offer(client, tokenizer, aliases=("Qwen/Qwen3-8B",))
        path = await save_weights(client)
        for model in ("tiny", "Qwen/Qwen3-8B", path, f"tiny;{path}", f"Qwen/Qwen3-8B;{path}"):
            answer = await chat(client, model)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == model
            # The fake model replies with one token.
            assert answer.json()["usage"]["completion_tokens"] == 1
        listed = await client.get(f"{URL}/oai/api/v1/models")
        assert [one["id"] for one in listed.json()["data"]] == ["tiny", "Qwen/Qwen3-8B"]

    run(scenario)


def test_weights_of_another_owner_are_as_unknown_as_those_that_never_were(tokenizer):
    async def scenario(client):
        offer(client, tokenizer)
        path = await save_weights(client, "secret")
        never = path.replace("secret", "nothing")
        for api in PATHS:
            body = {"input": "Hi"} if "responses" in api else {"messages": [HI], "max_tokens": 4}
            answers = []
            for model in (path, never):
                answer = await client.of(YOU).post(f"{URL}{api}", body | {"model": model})
                answers.append((answer.status_code, answer.text.replace(model, "MODEL")))
            assert answers[0] == answers[1]
            assert answers[0][0] == 404
            assert "does not exist here: there is no checkpoint" in answers[0][1]
        assert "open" not in client.backend.names()

    run(scenario)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("gpt-7", "must be tiny, or the path of sampler weights"),
        ("", "must be tiny, or the path of sampler weights"),
        ("tinker://x", "must have the form tinker://"),
        (f"{MODEL}/weights/a", "has weights for training"),
        (f"other;{MODEL}/sampler_weights/a", "must be tiny, or the path"),
        (f"{MODEL}/sampler_weights/../a", "must have the form"),
    ],
)
def test_unknown_models_are_not_found_in_every_dialect(tokenizer, model, said):
    async def scenario(client):
        offer(client, tokenizer)
        by_openai = await chat(client, model)
        assert by_openai.status_code == 404
        assert by_openai.json()["error"]["code"] == "model_not_found"
        assert said in by_openai.json()["error"]["message"]
        by_anthropic = await chat(client, model, path=PATHS[2])
        assert by_anthropic.status_code == 404
        assert by_anthropic.json()["error"]["type"] == "not_found_error"
        count = {"model": model, "messages": [HI]}
        counted = await client.post(f"{URL}{PATHS[2]}/count_tokens", count)
        assert counted.status_code == 404

    run(scenario)


def test_deleted_weights_are_not_found(tokenizer):
    async def scenario(client):
        offer(client, tokenizer)
        path = await save_weights(client)
        assert (await chat(client, path)).status_code == 200
        run_id = path.removeprefix("tinker://").partition("/")[0]
        runs = client.service.runs
        await runs.delete_checkpoint(run_id, "sampler_weights", "a", owner=ME)
        assert (await chat(client, path)).status_code == 404
        await settled()
        assert "forget" in client.backend.names()

    run(scenario)


def test_weights_of_conversations_count_for_the_limit_of_their_owner(tokenizer):
    async def scenario(client):
        offer(client, tokenizer)
        paths = [await save_weights(client, name) for name in ("a", "b")]
        for path in (*paths, paths[0]):
            assert (await chat(client, path)).status_code == 200
        await settled()
        # The second closed the first, and was closed by it in turn.
        assert client.backend.names().count("open") == 3
        assert client.backend.names().count("forget") == 2

    run(scenario, samplers=1)


def test_model_without_a_chat_template_is_a_clear_400(tokenizer, tmp_path):
    async def scenario(client):
        build_byte_tokenizer(tmp_path)
        (tmp_path / "chat_template.jinja").unlink()
        offer(client, tmp_path)
        answer = await chat(client)
        assert answer.status_code == 400
        assert "model 'tiny' has no usable chat template" in answer.json()["error"]["message"]
        # A template that appears later is found.
        build_byte_tokenizer(tmp_path)
        assert (await chat(client)).status_code == 200

    run(scenario)


def test_prompt_beyond_the_context_is_refused_before_weights_are_loaded(tokenizer):
    async def scenario(client):
        offer(client, tokenizer)
        path = await save_weights(client)
        num_opened = client.backend.names().count("open")
        long = [{"role": "user", "content": "x" * 100}]
        answer = await chat(client, path, messages=long)
        assert answer.status_code == 400
        assert "prompt is too long: 119 tokens > 99 maximum" in answer.text
        assert client.backend.names().count("open") == num_opened

    run(scenario)


def test_completions_continue_a_text_or_tokens_of_any_weights(tokenizer):
    async def scenario(client):
        offer(client, tokenizer)
        path = await save_weights(client)
        for model, prompt in (("tiny", "Hi"), (path, [72, 105])):
            body = {"model": model, "prompt": prompt, "max_tokens": 3, "logprobs": 1}
            answer = await client.post(f"{URL}{COMPLETIONS}", body)
            assert answer.status_code == 200
            usage = answer.json()["usage"]
            # No template is written around the two letters.
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 1)
            assert len(answer.json()["choices"][0]["logprobs"]["token_logprobs"]) == 1
        for fields, status, said in (
            ({"prompt": "x" * 100}, 400, "prompt is too long: 100 tokens > 99 maximum"),
            ({"prompt": "x", "model": "gpt-7"}, 404, "must be tiny, or the path"),
            ({"prompt": ["x", "y"]}, 400, "prompt has 2 prompts: a request has one reply"),
        ):
            answer = await client.post(f"{URL}{COMPLETIONS}", {"model": "tiny"} | fields)
            assert (answer.status_code, said in answer.json()["error"]["message"]) == (status, True)

    run(scenario)


def test_client_that_disconnects_ends_its_sample_and_frees_its_weights(tokenizer):
    async def scenario(client):
        offer(client, tokenizer)
        path = await save_weights(client)
        client.backend.hold("sample")
        asking = asyncio.create_task(chat(client, path))
        while not client.backend.num_sampling.total():
            await asyncio.sleep(0.001)
        assert client.service.has_work
        asking.cancel()
        await asyncio.wait([asking])
        await settled()
        assert client.backend.num_sampling.total() == 0
        assert not client.service.has_work

    run(scenario)


def test_service_that_closes_ends_conversations_with_503(tokenizer):
    async def scenario(client):
        offer(client, tokenizer)
        client.backend.hold("sample")
        asking = asyncio.create_task(chat(client))
        while not client.backend.num_sampling.total():
            await asyncio.sleep(0.001)
        client.service.stop_waiting()
        answer = await asking
        assert (answer.status_code, (await chat(client)).status_code) == (503, 503)
        assert "the server is closing" in answer.text

    run(scenario)


def test_errors_of_the_backend_have_their_status_and_no_internals(tokenizer):
    async def scenario(client):
        offer(client, tokenizer)
        client.backend.fail("sample", BusyError("too much waits"))
        busy = await chat(client)
        assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")
        client.backend.fail("sample", RuntimeError("/secret/path"))
        failed = await chat(client, path=PATHS[2])
        assert failed.status_code == 500
        assert failed.json()["error"]["message"] == "the server failed; its log has the reason"

    run(scenario)


def test_conversation_may_be_as_large_as_a_sample(tokenizer):
    async def scenario(client):
        offer(client, tokenizer)
        longest = 2 * 2**20
        for num_bytes, status in ((longest - 1000, 400), (longest, 413)):
            long = [{"role": "user", "content": "x" * num_bytes}]
            answer = await chat(client, messages=long)
            assert answer.status_code == status
            # In the form of the dialect, also what the guard refuses.
            assert answer.json()["error"]["type"] == "invalid_request_error"

    run(scenario)


def test_each_owner_waits_for_one_conversation_of_another(tokenizer):
    """The order in which conversations are rendered: in turns of the owners."""

    async def scenario(client):
        offer(client, tokenizer)
        assert (await chat(client)).status_code == 200  # The renderer is there.
        chats, order = client.service.chats, []
        gate = asyncio.Event()

        async def render(owner, number):
            answerer = await chats.open("tiny", owner)
            async with answerer.turn():
                order.append((owner, number))
                await gate.wait()

        tasks = [asyncio.create_task(render(ME, number)) for number in range(3)]
        await settled()
        tasks.append(asyncio.create_task(render(YOU, 0)))
        await settled()
        gate.set()
        await asyncio.gather(*tasks)
        assert order == [(ME, 0), (ME, 1), (YOU, 0), (ME, 2)]

    run(scenario)
