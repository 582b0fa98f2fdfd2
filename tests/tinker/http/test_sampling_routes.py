"""Sampling sessions, samples and what they are refused for."""

import json

import numpy as np
import pytest
from tinker.proto.response_conv import deserialize_sample_response

from tests.support.tinker_app import run


async def sampler(server):
    created = await server.ok(
        "create_sampling_session",
        {"session_id": await server.session(), "sampling_session_seq_id": 0, "base_model": "plain"},
    )
    return created["sampling_session_id"]


def request(sampler_id, tokens=(1, 5), **fields):
    params = {"max_tokens": 3, "stop": [7], "temperature": 0.5, "top_p": 1.0, "top_k": -1, "seed": 3}
    return {
        "sampling_session_id": sampler_id,
        "seq_id": 0,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]},
        "sampling_params": params,
        "prompt_logprobs": True,
    } | fields


def test_a_sample_comes_with_the_ids_that_were_promised(tmp_path):
    async def scenario(server):
        submitted = await server.ok("asample", request(await sampler(server)))
        done = await server.result(submitted, accept="application/x-protobuf")
        as_json = (await server.result(submitted)).json()

        output = deserialize_sample_response(done.content)
        assert [list(sequence.tokens) for sequence in output.sequences] == [[5, 5, 5], [5, 5, 5]]
        assert output.prompt_logprobs == [None, -5.0]
        assert len(set(submitted["sample_sequence_ids"])) == 2
        assert as_json["sequences"][0] == {
            "stop_reason": "length",
            "tokens": [5, 5, 5],
            "logprobs": [0.0, 0.0, 0.0],
        }
        assert as_json["prompt_logprobs"] == [None, -5.0]

    run(tmp_path, scenario)


def test_a_sampler_says_what_it_samples_from(tmp_path):
    async def scenario(server):
        sampler_id = await sampler(server)

        assert (await server.get(f"samplers/{sampler_id}")).json() == {
            "sampler_id": sampler_id,
            "base_model": "plain",
            "model_path": None,
        }
        assert (await server.get("samplers/nobody")).status_code == 404

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"topk_sample_logprobs": 2}, "topk_sample_logprobs: 2 is not supported"),
        ({"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k: 1"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n: 1"),
        ({"target_prompt_logprobs": {"data": [1]}}, "target_prompt_logprobs: {'data': [1]}"),
        ({"record_stability_info": True}, "record_stability_info: True"),
        ({"model_path": "tinker://x"}, "model_path: 'tinker://x'"),
        ({"sampling_session_id": None}, "sampling_session_id and seq_id: both are needed"),
        (
            {"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}},
            "prompt.chunks[0].type: 'image'; this server takes 'encoded_text' only",
        ),
        ({"prompt": {"chunks": []}}, "prompt: must have at least one token"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, fields, said):
    async def scenario(server):
        answer = await server.post("asample", request(await sampler(server), **fields))

        assert answer.status_code == 400
        assert said in answer.json()["detail"]

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"temperature": -0.5}, "sampling_params.temperature: "),
        ({"temperature": float("inf")}, "sampling_params.temperature: "),
        ({"top_p": 0.0}, "sampling_params.top_p: Input should be greater than 0, not 0.0"),
        ({"max_tokens": 0}, "sampling_params.max_tokens: "),
        ({"stop": ["a", 1]}, "sampling_params.stop"),
        ({"stop": "x" * 2000}, "sampling_params.stop"),
        ({"seed": -1}, "sampling_params.seed: "),
    ],
)
def test_parameters_out_of_range_are_named(tmp_path, params, said):
    async def scenario(server):
        answer = await server.http.post(
            "/api/v1/asample",
            content=json.dumps(request("s", sampling_params=params)),
            headers={"x-api-key": "tml-a", "content-type": "application/json"},
        )

        assert answer.status_code == 422
        assert said in answer.json()["detail"]

    run(tmp_path, scenario)


def test_texts_that_end_a_sample_may_be_one_several_or_none(tmp_path):
    async def scenario(server):
        sampler_id = await sampler(server)
        for seq_id, stop in enumerate(["\n", ["\n", "end"], [], None]):
            body = request(sampler_id, seq_id=seq_id, sampling_params={"stop": stop})
            done = await server.result(await server.ok("asample", body))
            assert len(done.json()["sequences"]) == 2

    run(tmp_path, scenario)


def test_a_token_beyond_the_wires_int32_is_refused(tmp_path):
    async def scenario(server):
        answer = await server.post("asample", request("s", tokens=[2**31]))

        assert answer.status_code == 422
        assert "prompt.chunks.0.tokens.0: " in answer.json()["detail"]
        assert np.iinfo(np.int32).max == 2**31 - 1

    run(tmp_path, scenario)
