"""Routes: bodies, results, statuses and refusals."""

import asyncio

from tinker.proto.response_conv import deserialize_forward_backward_output

from rl.tinker.auth import Keys
from rl.tinker.codec import PROTOBUF
from rl.tinker.futures import REQUEST_BYTES
from tests.support.fake_tinker import message, service_test

SECRET = "a password in a traceback"


def loss_of(answer):
    return deserialize_forward_backward_output(answer.content).metrics["loss:sum"]


def step(model_id, seq_id, **adam):
    return {"model_id": model_id, "seq_id": seq_id, "adam_params": adam}


# Training


@service_test(virtual=False)
async def test_number_that_is_not_finite_reaches_the_client(client):
    model_id = client.model()
    await client.result(f"{model_id}:0")
    client.backend.weights[model_id] = float("nan")
    broken = await client.retrieved(client.step(model_id, 1))
    assert '"grad_norm:mean": NaN' in broken.text  # JSON null would not be a number


@service_test(virtual=False)
async def test_error_of_the_server_is_a_500_without_its_text(client):
    def broken(*args, **kwargs):
        raise RuntimeError(SECRET)

    client.service.sessions.live = broken
    answer = await client.post("session_heartbeat", {"session_id": "s"})
    assert answer.status_code == 500
    assert answer.json() == {"detail": "an error in the server, which has logged it"}


@service_test(virtual=False)
async def test_malformed_fields_and_bodies_are_named(client):
    for path, body, said in (
        ("save_weights", {"seq_id": "one"}, "body.seq_id: Input should be a valid integer"),
        ("save_weights", {"seq_id": 1, "momentum": 0.9}, "body.momentum: Extra inputs are not permitted"),
        ("optim_step", {"seq_id": 1}, "Field required"),
        ("get_info", {"type": 3}, "body.type: "),
    ):
        answer = await client.post(path, {"model_id": "m"} | body)
        assert (answer.status_code, said in answer.json()["detail"]) == (422, True), answer.text


@service_test(virtual=False, poll_s=5.0)
async def test_unsupported_variants_are_refused_by_name_and_use_up_their_seq_ids(client):
    model_id, load = client.model(), {"path": "p", "optimizer": True}
    for path, body, said in (
        ("optim_step", {"seq_id": 1, "optimizer_params": {"type": "dimuon"}}, "Adam only"),
        ("save_weights_for_sampler", {"seq_id": 2, "path": "p", "kind": "inflight"}, "'inflight'"),
        ("load_weights", load | {"model_id": None}, "must have either session_id and"),
        ("load_weights", load | {"model_seq_id": 1, "seq_id": 3}, "must have either session_id and"),
        ("load_weights", load | {"seq_id": 4, "weights_access_token": "t"}, "weights_access_token"),
        ("save_weights", {"seq_id": 5, "ttl_seconds": 0}, "ttl_seconds=0"),
    ):
        answer = await client.post(path, {"model_id": model_id} | body)
        assert (answer.status_code, said in answer.json()["detail"]) == (400, True), answer.text
    assert (await client.result(client.step(model_id, 6))).metrics


# Results


@service_test(virtual=False, poll_s=0.05)
async def test_unfinished_result_is_answered_with_408(client):
    gate = client.backend.hold("forward_backward")
    body = message(client.model(), 1, 3, 4).SerializeToString()
    request_id = (await client.post("forward_backward", body, PROTOBUF)).json()["request_id"]
    waiting = await client.retrieved(request_id)
    gate.set()
    assert waiting.status_code == 408
    assert waiting.json() == {
        "type": "try_again",
        "request_id": request_id,
        "queue_state": "active",
        "queue_state_reason": "waiting for its turn",
    }
    assert loss_of(await client.retrieved(request_id)) == 7.0


@service_test(virtual=False, poll_s=40.0)
async def test_long_poll_ends_with_the_result_and_with_the_server(client):
    gate = client.backend.hold("forward_backward")
    model_id = client.model()
    poll = asyncio.create_task(client.retrieved(client.add(model_id, 1, 3, 4)))
    await asyncio.sleep(0)
    gate.set()
    assert loss_of(await poll) == 7.0
    gate.clear()
    poll = asyncio.create_task(client.retrieved(client.add(model_id, 2, 3, 4)))
    await asyncio.sleep(0)
    client.service.stop_waiting()
    assert (await poll).status_code == 410


@service_test(virtual=False, waiting_bytes=2 * REQUEST_BYTES, models=1)
async def test_limit_on_waiting_work_is_429_and_on_held_state_403(client):
    model_id = client.model()
    await client.result(f"{model_id}:0")
    client.backend.hold("forward_backward")
    answers = [await client.post("optim_step", step(model_id, i)) for i in (2, 3, 4)]
    body = {"session_id": model_id.split(":")[0], "model_seq_id": 1, "base_model": "tiny"}
    another = await client.post("create_model", body)
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert another.status_code == 403


@service_test(virtual=False, keys=Keys(["tml-" + "k" * 20]))
async def test_only_health_and_the_description_need_no_key(client):
    paths = ["/api/v1/healthz", "/openapi.json", "/api/v1/checkpoints", "/api/v1/client/config", "/docs", "/"]
    statuses = [(await client.send("GET", path, headers={"x-api-key": ""})).status_code for path in paths]
    assert statuses == [200, 200, 401, 401, 401, 401]
    assert (await client.get("checkpoints")).status_code == 401  # with an unknown key


@service_test(virtual=False)
async def test_unsupported_calls_are_refused_by_name(client):
    publish = await client.post("training_runs/r/checkpoints/weights/n/publish", {})
    method = await client.get("asample")
    assert [publish.status_code, method.status_code] == [400, 405]
    assert publish.json()["detail"].endswith("/publish: this server does not support this call")
