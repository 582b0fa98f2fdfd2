"""Tokens in, tokens out: bodies, the record of such turns, and the train client of verifiers."""

from __future__ import annotations

import asyncio
import copy
import json
import math

import numpy as np
import pytest

from rl.agents.dialects import tokens
from rl.agents.dialects.reply_reader import ParsedReply
from rl.agents.endpoint.branches import list_conversations
from rl.agents.endpoint.record import EpisodeRecord
from rl.agents.types import BadRequestError, ChatRequest, RequestError, TokenPiece
from rl.rollouts.renderer import RendererConfig, make_renderer
from rl.types import Completion, Message
from tests.support.agent_endpoint import make_qwen_renderer, serve
from tests.support.agent_replies import make_reply, make_request
from tools.agents_contract.scripted import reply_to

MARKS = ["<|endoftext|>"]
for _name in ("think", "tool_call", "tool_response"):
    MARKS += [f"<{_name}>", f"</{_name}>"]
PATH = "/inference/v1/generate"
NOTHING = ParsedReply(parts=())


# Bodies


def test_request_is_read():
    request = make_request(
        "tokens",
        token_ids=[5, 6],
        model="m",
        sampling_params={"max_tokens": 7, "stop": ["x"], "logprobs": 1, "stop_token_ids": [2]},
        cache_salt="s",
    )
    assert (request.token_ids, request.messages) == ((5, 6), ())
    assert (request.model, request.max_tokens, request.stop) == ("m", 7, ("x",))
    assert request.wants == {"logprobs", "token_names"}
    assert request.asked == {"stop_token_ids": [2]}
    assert request.harmless == ("cache_salt",)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (None, "token_ids"),
        ([], "token_ids"),
        ("12", "token_ids"),
        ([1, True], "token_ids[1]"),
        ([-1], "token_ids[0]"),
        ([2**31], "token_ids[0]"),
        ([1.0], "token_ids[0]"),
    ],
)
def test_prompt_that_is_no_list_of_token_ids_is_refused(given, field):
    with pytest.raises(BadRequestError) as caught:
        make_request("tokens", token_ids=given)
    assert caught.value.field == field
    assert field in caught.value.message


def test_reply_has_the_names_of_vllm_and_of_its_clients():
    request = make_request("tokens", sampling_params={"logprobs": 1}, return_token_ids=True)
    body = tokens.make_body(make_reply(NOTHING), request, NOTHING)
    assert body["request_id"] == "r1"
    assert body["output_mode"] == "tokens"
    assert body["prompt_token_ids"] == [4, 5, 6]
    assert body["usage"]["completion_tokens"] == 4
    (choice,) = body["choices"]
    assert choice["token_ids"] == [7, 8, 9, 2]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    first = choice["logprobs"]["content"][0]
    named = {"token": "token_id:7", "token_id": 7, "logprob": -0.5, "bytes": None}
    assert first == named | {"top_logprobs": [named]}


def test_reply_without_extras_has_none():
    request = make_request("tokens")
    body = tokens.make_body(make_reply(NOTHING, finish_reason="length"), request, NOTHING)
    assert body["prompt_token_ids"] is None
    (choice,) = body["choices"]
    assert (choice["logprobs"], choice["finish_reason"]) == (None, "length")


def test_logprobs_are_finite_numbers():
    class Reply:
        tokens = TokenPiece(token_ids=[7], logprobs=[-math.inf])

    request = make_request("tokens", sampling_params={"logprobs": 0})
    content = tokens._describe_logprobs(Reply.tokens, request)["content"]
    assert content[0]["logprob"] == -9999.0


def test_stream_is_one_chunk_the_usage_and_the_end():
    request = make_request("tokens", stream=True, stream_options={"include_usage": True})
    frames = tokens.stream_body(make_reply(NOTHING), request, NOTHING).split(b"\n\n")
    first, last = (json.loads(frame.removeprefix(b"data: ")) for frame in frames[:2])
    assert first["choices"][0]["token_ids"] == [7, 8, 9, 2]
    assert (last["choices"], last["usage"]["prompt_tokens"]) == ([], 3)
    assert frames[2:] == [b"data: [DONE]", b""]


def test_error_of_a_stream_is_an_error_of_openai():
    error = RequestError("no", status=409, code="episode_ended")
    frames = tokens.stream_error(error, make_request("tokens"))
    assert b'"type":"conflict_error"' in frames
    assert frames.endswith(b"data: [DONE]\n\n")


@pytest.mark.medium
def test_vllm_reads_the_reply():
    # Importing it takes seconds.
    from vllm.entrypoints.scale_out.token_in_token_out import protocol

    request = make_request("tokens", sampling_params={"logprobs": 1}, return_token_ids=True)
    body = tokens.make_body(make_reply(NOTHING), request, NOTHING)
    read = protocol.GenerateTokensResponse.model_validate(body)
    assert read.choices[0].token_ids == [7, 8, 9, 2]
    assert read.choices[0].logprobs.content[0].token_id == 7


# The record


class Talk:
    """An episode of prompts as tokens."""

    def __init__(self):
        self.record = EpisodeRecord(renderer=make_qwen_renderer())

    def ask(self, *prompt, reply, messages=()):
        """Record a reply to a prompt and return the plan of its turn."""
        token_ids = None if messages else prompt
        plan = self.record.plan(ChatRequest(messages=messages, token_ids=token_ids))
        completion = Completion(
            token_ids=np.array(reply, np.int32),
            logprobs=np.full(len(reply), -0.5, np.float32),
            policy_versions=np.zeros(len(reply), np.int32),
            finish_reason="stop",
        )
        told = Message(role="assistant", content=f"{reply}")
        self.record.add(plan, completion, text="", told=told)
        self.record.undelivered.discard(plan.number)
        return plan

    def list_branches(self):
        found = list_conversations(self.record, trained=())
        return [(branch.turns, branch.role, branch.cause) for branch in found.branches]


@pytest.fixture
def talk():
    return Talk()


def test_prompt_continues_the_turn_whose_tokens_it_begins_with(talk):
    talk.ask(1, 2, reply=[3])
    plan = talk.ask(1, 2, 3, 4, 5, reply=[6])
    assert plan.parent == 0
    assert plan.prompt_ids.tolist() == [4, 5]
    assert plan.context_ids.tolist() == [1, 2, 3, 4, 5]
    assert talk.list_branches() == [((0, 1), "main", "")]


def test_the_longest_beginning_counts(talk):
    talk.ask(1, 2, reply=[3])
    talk.ask(1, 2, 3, 4, reply=[5])
    assert talk.ask(1, 2, 3, 4, 5, 6, reply=[7]).parent == 1
    assert talk.ask(1, 2, 3, 4, 5, 6, 7, 8, reply=[9]).parent == 2
    # Another continuation of the first turn.
    plan = talk.ask(1, 2, 3, 9, reply=[8])
    assert (plan.parent, plan.prompt_ids.tolist()) == (0, [9])
    assert talk.list_branches() == [((0, 1, 2, 3), "main", ""), ((0, 4), "main", "fork")]


def test_a_reply_that_was_cut_off_is_continued_without_new_tokens(talk):
    talk.ask(1, 2, reply=[3])
    plan = talk.ask(1, 2, 3, reply=[4])
    assert (plan.parent, plan.prompt_ids.tolist()) == (0, [])
    assert talk.list_branches() == [((0, 1), "main", "")]


def test_the_same_prompt_again_supersedes_the_first_reply(talk):
    talk.ask(1, 2, reply=[3])
    talk.ask(1, 2, reply=[4])
    talk.ask(1, 2, 4, 5, reply=[6])
    assert talk.list_branches() == [((0,), "superseded", ""), ((1, 2), "main", "again")]


def test_a_history_that_was_rendered_anew_is_a_branch_of_its_conversation(talk):
    talk.ask(1, 2, reply=[3, 4])
    # As if the client had left the thought 3 out.
    plan = talk.ask(1, 2, 4, 5, reply=[6])
    assert (plan.parent, plan.relation, plan.prompt_ids.tolist()) == (
        None,
        "rewritten",
        [1, 2, 4, 5],
    )
    assert talk.list_branches() == [((0,), "main", ""), ((1,), "main", "rewritten")]


def test_another_prompt_is_another_conversation(talk):
    talk.ask(1, 2, reply=[3])
    plan = talk.ask(7, 8, reply=[9])
    assert (plan.parent, plan.relation) == (None, "")
    assert talk.list_branches() == [((0,), "main", ""), ((1,), "sub-agent", "agent")]


def test_a_turn_of_messages_is_continued_by_its_tokens(talk):
    first = talk.ask(reply=[3], messages=(Message(role="user", content="Hi"),))
    plan = talk.ask(*first.context_ids.tolist(), 3, 10, reply=[4])
    assert (plan.parent, plan.prompt_ids.tolist()) == (0, [10])


def test_tokens_that_the_tokenizer_does_not_have_are_refused(talk):
    most = len(talk.record.renderer.tokenizer)
    with pytest.raises(BadRequestError, match=f"token_ids has {most}, but the tokenizer"):
        talk.ask(most, reply=[1])


# Over HTTP


def run(scenario, **options):
    async def serve_it():
        async with serve(reply_to, max_reply=256, **options) as served:
            return await asyncio.wait_for(scenario(served), 60)

    return asyncio.run(serve_it())


def test_tokens_are_answered_with_the_tokens_of_the_record():
    async def scenario(served):
        ids = make_qwen_renderer().opening([Message(role="user", content="What is 2 + 3?")])
        body = {
            "model": "m",
            "token_ids": ids.tolist(),
            "sampling_params": {"temperature": 0.5, "max_tokens": 20, "logprobs": 1},
        }
        answer = await served.post(PATH, body)
        (choice,) = answer.json()["choices"]
        (turn,) = served.episode.list_conversations(trained=("main",)).turns
        assert turn.prompt_ids.tolist() == ids.tolist()
        assert turn.completion.token_ids.tolist() == choice["token_ids"]
        assert turn.text == "The sum is 5."
        assert turn.messages[0].content.startswith("<|im_start|>user\nWhat is 2 + 3?<|im_end|>")
        sampling = served.generator.calls[0][1]
        assert (sampling.temperature, sampling.max_tokens) == (1.0, 20)
        # The same bytes are the same request, here as elsewhere.
        assert (await served.post(PATH, body)).json() == answer.json()
        assert served.episode.counts["retries"] == 1
        streamed = await served.post(PATH, body | {"stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        long = await served.post(PATH, body | {"token_ids": [1] * 3000})
        assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")

    run(scenario)


@pytest.mark.medium
def test_train_client_of_verifiers_is_served(tmp_path, monkeypatch):
    from verifiers.v1.clients.train import TrainClient  # It takes seconds.
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.graph import prepare_turn
    from verifiers.v1.trace import Trace
    from verifiers.v1.types import SamplingConfig, Tool, ToolMessage, UserMessage

    renderer = make_token_renderer(tmp_path)
    add = Tool(name="add", description="Add.", parameters={"type": "object", "properties": {}})
    sampling = SamplingConfig(temperature=0.7, max_tokens=200, top_k=-1, min_p=0.0)

    async def scenario(served):
        monkeypatch.setenv("RELAY_KEY", served.key)
        config = TrainClientConfig(
            base_url=f"{served.url}/v1",
            api_key_var="RELAY_KEY",
            renderer={"name": "qwen3"},
            renderer_model_name=str(tmp_path),
        )
        client = TrainClient(config)
        trace = Trace.model_construct(nodes=[], tools=[])
        prompt = [UserMessage(content="What is 2 + 3?")]
        for _ in range(2):
            turn = prepare_turn(trace, prompt, [add])
            response = await client.get_response(
                ChatDialect(), {"model": "m"}, sampling, session_id="s", turn=turn
            )
            turn.commit(response)
            prompt.append(response.message)
            for call in response.message.tool_calls or []:
                prompt.append(ToolMessage(tool_call_id=call.id, content="5"))
        await client.close()
        return response, trace

    async def check(served):
        response, trace = await scenario(served)
        assert response.message.content == "The sum is 5."
        found = served.episode.list_conversations(trained=("main",))
        assert [branch.turns for branch in found.branches] == [(0, 1)]
        # What the client would train on is what the episode has recorded.
        recorded = []
        for turn in found.turns:
            recorded += [*turn.prompt_ids.tolist(), *turn.completion.token_ids.tolist()]
        assert [token for node in trace.nodes for token in node.token_ids] == recorded
        assert response.tokens.completion_ids == found.turns[1].completion.token_ids.tolist()
        assert response.tokens.completion_logprobs == found.turns[1].completion.logprobs.tolist()
        assert served.episode.counts["harmless/sampling_params.skip_special_tokens"] == 2

    run(check, renderer=renderer)


def make_token_renderer(folder):
    """Return a renderer of Qwen3's template with a token for each mark, in a folder."""
    tokenizer = copy.deepcopy(make_qwen_renderer().tokenizer)
    tokenizer.add_tokens(MARKS)
    tokenizer.save_pretrained(folder)
    return make_renderer(
        RendererConfig(keep_replies=True),
        tokenizer=tokenizer,
        stop_token_ids=(tokenizer.eos_token_id,),
    )
