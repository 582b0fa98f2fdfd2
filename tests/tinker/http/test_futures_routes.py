"""Long polls: held, given up, and left behind by nobody."""

import asyncio
import json

import numpy as np
from tinker.proto import tinker_public_pb2 as pb

from rl.tinker.service.limits import Limits
from tests.support.tinker_app import ALICE, run
from tests.tinker.http.test_training_routes import fwdbwd


def test_a_result_that_takes_long_is_answered_with_408(tmp_path):
    async def scenario(server):
        server.backend.go_on.clear()
        submitted = (await server.forward_backward(fwdbwd(await server.model()))).json()
        waiting = await server.result(submitted)
        server.backend.go_on.set()
        done = await server.result(submitted)

        assert waiting.status_code == 408
        assert waiting.json() == {
            "type": "try_again",
            "request_id": submitted["request_id"],
            "queue_state": "active",
            "queue_state_reason": "waiting for its turn",
        }
        assert done.json()["metrics"] == {"loss:sum": 7.0}

    run(tmp_path, scenario, poll_s=0.05)


def test_a_held_poll_is_answered_as_soon_as_the_result_is_there(tmp_path):
    async def scenario(server):
        server.backend.go_on.clear()
        submitted = (await server.forward_backward(fwdbwd(await server.model()))).json()
        poll = asyncio.create_task(server.result(submitted))
        await asyncio.sleep(0)
        server.backend.go_on.set()

        assert (await poll).json()["metrics"] == {"loss:sum": 7.0}

    run(tmp_path, scenario, poll_s=40.0)


def test_a_server_that_ends_lets_its_polls_go(tmp_path):
    async def scenario(server):
        server.backend.go_on.clear()
        submitted = (await server.forward_backward(fwdbwd(await server.model()))).json()
        poll = asyncio.create_task(server.result(submitted))
        await asyncio.sleep(0)
        server.context.stopping.set()

        assert (await poll).status_code == 408

    run(tmp_path, scenario, poll_s=40.0)


def test_a_client_that_goes_while_it_waits_leaves_no_task(tmp_path):
    async def scenario(server):
        server.backend.go_on.clear()
        submitted = (await server.forward_backward(fwdbwd(await server.model()))).json()
        body = json.dumps({"request_id": submitted["request_id"]}).encode()
        gone = asyncio.Event()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            pass

        headers = [(b"x-api-key", ALICE.encode()), (b"content-type", b"application/json")]
        scope = {
            "type": "http", "method": "POST", "path": "/api/v1/retrieve_future", "query_string": b"",
            "headers": headers, "scheme": "http", "server": ("127.0.0.1", 80), "http_version": "1.1",
            "root_path": "", "client": ("127.0.0.1", 1),
        }  # fmt: skip
        before = asyncio.all_tasks()
        poll = asyncio.create_task(server.app(scope, receive, send))
        while len(asyncio.all_tasks()) < len(before) + 3:
            await asyncio.sleep(0)
        gone.set()
        await asyncio.wait_for(poll, 5)

        assert asyncio.all_tasks() == before

    run(tmp_path, scenario, poll_s=40.0)


def test_the_size_of_a_large_result_comes_first_where_that_is_asked_for(tmp_path):
    async def scenario(server):
        message = fwdbwd(await server.model(), tokens=tuple(range(100)))
        submitted = (await server.forward_backward(message)).json()
        ask = {"request_id": submitted["request_id"]}
        accept = {"accept": "application/x-protobuf"}
        first = (await server.post("retrieve_future", ask | {"allow_metadata_only": True}, **accept)).json()
        then = await server.post("retrieve_future", ask, **accept)

        assert first == {"status": "complete_metadata", "response_payload_size": len(then.content)}
        read = pb.ForwardBackwardOutput.FromString(then.content)
        data = read.loss_fn_outputs[0].fields["logprobs"].data
        assert np.frombuffer(data, "<f4").tolist() == [-float(i) for i in range(100)]

    run(tmp_path, scenario, inline_bytes=100)


def test_a_limit_on_what_waits_is_429_and_on_what_is_held_403(tmp_path):
    async def scenario(server):
        model_id = await server.model()
        server.backend.go_on.clear()
        answers = [await server.forward_backward(fwdbwd(model_id, seq_id=i)) for i in (1, 2, 3)]
        session_id = model_id.split(":")[0]
        another = await server.post(
            "create_model", {"session_id": session_id, "model_seq_id": 1, "base_model": "plain"}
        )

        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert "waiting" in answers[2].json()["detail"]
        assert another.status_code == 403
        assert "models" in another.json()["detail"]

    run(tmp_path, scenario, limits=Limits(waiting_per_model=2, models=1))


def test_a_sample_can_be_cancelled_and_training_cannot(tmp_path):
    async def scenario(server):
        model_id = await server.model()
        server.backend.go_on.clear()
        session_id = model_id.split(":")[0]
        sampler = await server.ok(
            "create_sampling_session",
            {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "plain"},
        )
        sample = await server.ok(
            "asample",
            {
                "sampling_session_id": sampler["sampling_session_id"],
                "seq_id": 0,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
                "sampling_params": {},
            },
        )
        training = (await server.forward_backward(fwdbwd(model_id))).json()
        cancelled = await server.post("cancel_future", {"request_id": sample["request_id"]})
        refused = await server.post("cancel_future", {"request_id": training["request_id"]})
        failure = await server.result(sample)

        assert [cancelled.status_code, refused.status_code] == [204, 400]
        assert "error" in failure.json()

    run(tmp_path, scenario)
