"""Models over HTTP: what becomes of bodies, results and failures."""

import json

import numpy as np
import pytest
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.response_conv import deserialize_forward_backward_output

from tests.support.plain_backend import BUG_RANK, SECRET
from tests.support.tinker_app import BOB, run

PROTOBUF = {"accept": "application/x-protobuf"}


def fwdbwd(model_id, *, seq_id=1, loss="cross_entropy", tokens=(3, 4)):
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn=loss)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
    datum.loss_fn_inputs["target_tokens"].CopyFrom(
        pb.Tensor(dense=np.array(tokens, "<i8").tobytes(), dtype=pb.DTYPE_INT64, shape=[len(tokens)])
    )
    return message


def test_a_model_is_made_trained_saved_and_loaded(tmp_path):
    async def scenario(server):
        model_id = await server.model(lora_config={"rank": 4, "seed": 7}, user_metadata={"for": "a test"})
        step = {"model_id": model_id, "seq_id": 2, "adam_params": {"learning_rate": 0.5}}
        done = await server.result((await server.forward_backward(fwdbwd(model_id))).json(), **PROTOBUF)
        await server.result(await server.ok("optim_step", step))
        saved = await server.ok("save_weights", {"model_id": model_id, "seq_id": 3, "path": "first"})
        path = (await server.result(saved)).json()["path"]
        load = {"session_id": model_id.split(":")[0], "model_seq_id": 1, "path": path, "optimizer": True}
        loaded = (await server.result(await server.ok("load_weights", load))).json()
        info = await server.ok("get_info", {"model_id": loaded["model_id"]})

        output = deserialize_forward_backward_output(done.content)
        assert done.headers["content-type"] == "application/x-protobuf"
        assert output.metrics == {"loss:sum": 7.0}
        assert output.loss_fn_outputs[0]["logprobs"].tolist() == [-3.0, -4.0]
        assert path == f"tinker://{model_id}/weights/first"
        assert "optim_step 0.5" in server.backend.calls
        assert "load_state 12345 True" in server.backend.calls
        assert (info["is_lora"], info["lora_rank"], info["model_data"]["tokenizer_id"]) == (True, 4, "/plain")

    run(tmp_path, scenario)


def test_rank_0_and_no_lora_are_full_models(tmp_path):
    async def scenario(server):
        for lora in ({"rank": 0}, None):
            info = await server.ok("get_info", {"model_id": await server.model(lora_config=lora)})
            assert (info["is_lora"], info["lora_rank"]) == (False, None)

    run(tmp_path, scenario)


def test_results_are_json_where_protobuf_is_not_accepted(tmp_path):
    async def scenario(server):
        model_id = await server.model()
        submitted = (await server.forward_backward(fwdbwd(model_id))).json()
        step = await server.ok("optim_step", {"model_id": model_id, "seq_id": 2})

        assert (await server.result(submitted)).json() == {
            "loss_fn_output_type": "ArrayRecord",
            "loss_fn_outputs": [{"logprobs": {"data": [-3.0, -4.0], "dtype": "float32", "shape": [2]}}],
            "metrics": {"loss:sum": 7.0},
        }
        # A metric that is no number stays one that is no number.
        assert (await server.result(step)).text == '{"metrics": {"grad_norm": NaN}}'

    run(tmp_path, scenario)


def test_a_repeated_request_is_the_same_one(tmp_path):
    async def scenario(server):
        model_id = await server.model()
        first = (await server.forward_backward(fwdbwd(model_id))).json()
        again = (await server.forward_backward(fwdbwd(model_id, tokens=(9,)))).json()

        assert first == again
        assert (await server.result(again)).json()["metrics"] == {"loss:sum": 7.0}
        assert server.backend.calls.count("forward_backward") == 1

    run(tmp_path, scenario)


def test_failures_say_whose_they_are_and_no_more(tmp_path):
    async def scenario(server):
        model_id = await server.model()
        crash = (await server.forward_backward(fwdbwd(model_id, loss="crash"))).json()
        refuse = (await server.forward_backward(fwdbwd(model_id, loss="refuse", seq_id=2))).json()
        crashed, refused = await server.result(crash, **PROTOBUF), await server.result(refuse, **PROTOBUF)

        assert (crashed.status_code, crashed.json()["category"]) == (200, "server")
        assert SECRET not in crashed.text
        assert refused.json() == {"error": "loss_fn: refused while at work", "category": "user"}

    run(tmp_path, scenario)


def test_what_is_not_there_or_another_keys_is_not_found(tmp_path):
    async def scenario(server):
        model_id = await server.model()
        submitted = (await server.forward_backward(fwdbwd(model_id))).json()
        await server.result(submitted)
        request = {"request_id": submitted["request_id"]}
        answers = [
            await server.post("get_info", {"model_id": "nobody:train:0"}),
            await server.post("get_info", {"model_id": model_id}, key=BOB),
            await server.forward_backward(fwdbwd(model_id, seq_id=2), key=BOB),
            await server.post("retrieve_future", request, key=BOB),
            await server.post("optim_step", {"model_id": model_id, "seq_id": 2}, key=BOB),
            await server.get(f"training_runs/{model_id}", key=BOB),
            await server.get(f"sessions/{model_id.split(':')[0]}", key=BOB),
        ]

        assert [answer.status_code for answer in answers] == [404] * len(answers)
        assert server.backend.calls.count("forward_backward") == 1

    run(tmp_path, scenario)


def test_what_has_ended_is_gone(tmp_path):
    async def scenario(server):
        model_id = await server.model()
        session_id = model_id.split(":")[0]
        finished = await server.post(
            f"sessions/{session_id}/finish", {"reason": {"type": "success"}, "detail": None}
        )
        heartbeat = await server.post("session_heartbeat", {"session_id": session_id})
        step = await server.post("optim_step", {"model_id": model_id, "seq_id": 1})

        assert [finished.status_code, heartbeat.status_code, step.status_code] == [204, 410, 410]

    run(tmp_path, scenario)


def test_an_error_of_the_server_is_a_500_without_what_it_was(tmp_path, caplog):
    async def scenario(server):
        body = {"session_id": await server.session(), "model_seq_id": 0, "base_model": "plain"}
        answer = await server.post("create_model", body | {"lora_config": {"rank": BUG_RANK}})

        assert answer.status_code == 500
        assert answer.json() == {"detail": "an error in the server, which has logged it"}
        assert SECRET in caplog.text

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("optim_step", {"seq_id": 1, "adam_params": {"beta1": float("nan")}}, "body.adam_params.beta1: "),
        ("optim_step", {"seq_id": 10**400}, "body.seq_id: "),
        ("optim_step", {"seq_id": True}, "body.seq_id: Input should be a valid integer, not True"),
        ("optim_step", {"seq_id": "1"}, "body.seq_id: Input should be a valid integer, not '1'"),
        ("optim_step", {"seq_id": 1, "momentum": 0.9}, "body.momentum: Extra inputs are not permitted"),
        ("optim_step", {}, "body.seq_id: Field required"),
        ("save_weights", {"seq_id": 1, "path": "\ud800"}, "body.path: "),
        ("save_weights", {"seq_id": 1, "ttl_seconds": 0}, "body.ttl_seconds: "),
        ("get_info", {"type": 3}, "body.type: "),
    ],
)  # fmt: skip
def test_a_field_that_is_not_of_its_form_is_named_with_its_value(tmp_path, path, body, said):
    async def scenario(server):
        # Python's own JSON, which has NaN, huge numbers and lone surrogates.
        answer = await server.http.post(
            f"/api/v1/{path}",
            content=json.dumps({"model_id": "m"} | body),
            headers={"x-api-key": "tml-a", "content-type": "application/json"},
        )

        assert answer.status_code == 422
        assert said in answer.json()["detail"]

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    "content",
    [b"{", b'{"model_id": "\xff"}', b"[" * 100_000, b"1" * 10_000, b"null", b"", b'{"model_id": 1e999}'],
)
def test_bodies_that_are_no_json_object_are_refused(tmp_path, content):
    async def scenario(server):
        answer = await server.http.post(
            "/api/v1/get_info",
            content=content,
            headers={"x-api-key": "tml-a", "content-type": "application/json"},
        )

        assert answer.status_code in (400, 422)
        assert answer.json()["detail"]

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("create_model", {"session_id": "s", "model_seq_id": 0, "base_model": "plain",
                          "optimizer_config": {"type": "dimuon", "version": 1}}, "'dimuon', must be 'adamw'"),
        ("optim_step", {"model_id": "m", "seq_id": 1, "optimizer_params": {"type": "dimuon"}}, "Adam only"),
        ("save_weights_for_sampler", {"model_id": "m", "seq_id": 1, "path": "p", "kind": "inflight"},
         "'inflight' is not supported"),
        ("load_weights", {"path": "tinker://m/weights/a", "optimizer": True}, "needs session_id and"),
        ("load_weights", {"path": "tinker://m/weights/a", "optimizer": True, "session_id": "s",
                          "model_seq_id": 0, "model_id": "m", "seq_id": 1}, "and not of both"),
        ("load_weights", {"path": "tinker://m/weights/a", "optimizer": True, "session_id": "s",
                          "model_seq_id": 0, "weights_access_token": "t"}, "weights_access_token"),
    ],
)  # fmt: skip
def test_variants_that_are_not_supported_are_refused_by_name(tmp_path, path, body, said):
    async def scenario(server):
        answer = await server.post(path, body)

        assert answer.status_code == 400
        assert said in answer.json()["detail"]

    run(tmp_path, scenario)


def test_a_forward_backward_of_another_content_type_is_refused(tmp_path):
    async def scenario(server):
        answer = await server.post("forward_backward", {"model_id": "m"})

        assert answer.status_code == 415
        assert "must be application/x-protobuf" in answer.json()["detail"]

    run(tmp_path, scenario)
