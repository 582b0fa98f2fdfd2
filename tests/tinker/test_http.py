"""The HTTP application: keys and their owners, the guard, and statuses, bodies and refusals of the
routes.
"""

import asyncio

import httpx
import pytest
from starlette.responses import Response
from tinker.proto.response_conv import deserialize_forward_backward_output

from rl.http.guard import Shares
from rl.http.keys import Keys, read_keys
from rl.tinker.auth import KEY_PREFIX, TinkerGuard
from rl.tinker.service.futures import REQUEST_BYTES
from rl.tinker.types import Limits
from rl.tinker.wire.codec import PROTOBUF
from tests.support.fake_tinker import message, service_test, settled

ALICE, BOB = "tml-" + "a" * 20, "tml-" + "b" * 20


def write(folder, text, mode=0o600):
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_each_key_has_an_owner_that_hides_it(tmp_path):
    keys = read_keys(write(tmp_path, f"# for the notebook\n{ALICE}\n\n  {BOB}  # second\n"))
    alice, bob = (keys.find_owner(key.encode()) or "" for key in (ALICE, BOB))
    # Training runs that were saved earlier carry this hash.
    assert alice.startswith("8601cb65ef48")
    assert bob not in ("", alice)
    unknown = (
        b"",
        b"tml-",
        b"# for the notebook",
        ALICE.encode()[:-1],
        ALICE.encode() + b" ",
        b"\xff\x00",
    )
    assert [keys.find_owner(key) for key in unknown] == [None] * 6
    assert Keys().find_owner(b"tml-x") != Keys().find_owner(b"tml-y")
    assert Keys().find_owner(b"") is None


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("", 0o600, "there are none"),
        (
            "sk-aaaaaaaaaaaaaaaaaaaaaaaa",
            0o600,
            "API key 1: must be 'tml-' and 16 or more printable ASCII",
        ),
        (f"{ALICE}\ntml-short", 0o600, "API key 2: must be"),
        ("tml-aaaaaaaaaaaaaaaaa aaaaaa", 0o600, "API key 1"),
        (ALICE, 0o640, "others may read or write it; chmod 600"),
    ],
)
def test_unsafe_key_is_refused_and_not_shown(tmp_path, text, mode, said):
    with pytest.raises(ValueError, match="keys_file=") as error:
        read_keys(write(tmp_path, text, mode), prefix=KEY_PREFIX)
    assert said in str(error.value)
    assert not any(line in str(error.value) for line in text.splitlines())
    with pytest.raises(ValueError, match=r"none.: .*No such file"):
        read_keys(str(tmp_path / "none"))


# Guard


@pytest.fixture
def small_bodies(monkeypatch):
    """Permit bodies of 100 bytes with tensors, 60 of a sample, 40 of others, and 1,000 of all."""
    for name, value in (("JSON_BYTES", 60), ("SMALL_BYTES", 40)):
        monkeypatch.setattr(f"rl.tinker.auth.{name}", value)
    monkeypatch.setattr("rl.http.guard.ALL_BODIES_BYTES", 1000)


TENSORS, SAMPLE = "/api/v1/forward_backward", "/api/v1/asample"


class Guarded:
    """Application behind a guard that answers with the owner and the body when `go_on` is set."""

    def __init__(self, *, keys=None, hosts=None):
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.num_calls = 0
        self._guard = TinkerGuard(
            self._answer, keys=keys or Keys(), hosts=hosts, limits=Limits(body_bytes=100)
        )

    async def _answer(self, scope, receive, send):
        self.num_calls += 1
        body = (await receive())["body"]
        await self.go_on.wait()
        await Response(f"{scope.get('state', {}).get('owner')} {body.decode()}")(
            scope, receive, send
        )

    async def post(self, body=b"", path="/api/v1/x", **headers):
        transport = httpx.ASGITransport(self._guard)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
            return await http.post(path, content=body, headers={"x-api-key": ALICE} | headers)


def post(body=b"", headers=None, path="/api/v1/x", **settings):
    async def once():
        return await Guarded(**settings).post(body, path, **(headers or {}))

    return asyncio.run(once())


async def chunks(*parts, ends=True):
    for part in parts:
        yield part
    if not ends:
        await asyncio.Event().wait()


def test_body_arrives_whole_with_its_owner():
    assert post(chunks(b"ab", b"c")).text == f"{Keys().find_owner(ALICE.encode())} abc"


@pytest.mark.parametrize("key", ["", "tml-other-key-of-somebody", "k" * 5000, "tml-\xff"])
def test_unknown_key_is_refused_before_the_body_except_for_health_and_description(key):
    settings = {"headers": {"x-api-key": key.encode("latin-1")}, "keys": Keys([ALICE])}
    answer = post(b"x" * 2000, **settings)
    assert answer.status_code == 401
    assert not key or key not in answer.text
    paths = ("/api/v1/healthz", "/openapi.json", "/api/v1/checkpoints", "/docs", "/")
    assert [post(path=path, **settings).status_code for path in paths] == [200, 200, 401, 401, 401]


def test_paths_of_other_clients_take_the_key_as_these_clients_send_it():
    def ask(key, path="/oai/api/v1/chat/completions", kind="Bearer"):
        headers = {"x-api-key": "", "authorization": f"{kind} {key}"}
        return post(path=path, keys=Keys([ALICE]), headers=headers)

    statuses = [ask(ALICE).status_code, ask(BOB).status_code, ask(ALICE, kind="Basic").status_code]
    assert statuses == [200, 401, 401]
    assert ask(ALICE, path="/v1/models").status_code == 200
    refused = "Authorization: Bearer: must be an API key that this server knows"
    assert ask(BOB).json()["error"]["message"] == refused
    assert ask(BOB, path="/anthropic/api/v1/messages").json() == {
        "type": "error",
        "error": {"type": "authentication_error", "message": refused},
    }
    assert ask(BOB, path="/v1/models").json() == {"detail": refused}
    assert ask(ALICE, path="/api/v1/checkpoints").status_code == 401


@pytest.mark.usefixtures("small_bodies")
def test_large_body_is_refused_sooner_where_it_is_json():
    large = post(chunks(b"x" * 60, b"x" * 41), path=TENSORS)
    others = [
        post(b"x" * 101, path=TENSORS),
        post(chunks(b"x" * 60, b"x" * 41), {"content-length": "5"}, path=TENSORS),
        post(b"x" * 61, path=SAMPLE),
        post(b"x" * 41, {"content-type": PROTOBUF}),
        post(headers={"content-length": "9" * 5000}),
    ]
    assert [one.status_code for one in (large, *others)] == [413] * 6
    assert "larger than the allowed 100 bytes" in large.text
    fits = [post(b"x" * 100, path=TENSORS), post(b"x" * 60, path=SAMPLE), post(b"x" * 40)]
    assert [one.status_code for one in fits] == [200] * 3


def test_host_is_checked():
    own = ("localhost", "LOCALHOST:1", "[::1]:8000")
    foreign = ("evil.example", "127.0.0.1.evil.example:8000", "")
    hosts = ("localhost", "127.0.0.1", "::1")
    statuses = [post(headers={"host": host}, hosts=hosts).status_code for host in (*own, *foreign)]
    assert statuses == [200] * 3 + [421] * 3


def test_body_that_does_not_arrive_times_out(monkeypatch):
    monkeypatch.setattr("rl.http.guard.BODY_TIMEOUT_S", 0.05)
    answer = post(chunks(b"a", ends=False))
    assert answer.status_code == 408
    assert answer.json() == {"detail": "the body did not arrive within 0.05 s"}


def test_share_of_an_owner_is_what_remains_free():
    shares = Shares(300)
    taken = [
        shares.take(*one)
        for one in (("a", 151), ("a", 150), ("b", 76), ("b", 75), ("a", 1), ("a", 0))
    ]
    assert taken == [False, True, False, True, False, True]
    shares.give_back("a", 150)
    assert shares.take("b", 75)
    assert not shares.take("b", 1)


def test_key_holds_at_most_the_bytes_that_it_leaves_free(monkeypatch):
    monkeypatch.setattr("rl.http.guard.ALL_BODIES_BYTES", 200)

    async def scenario():
        app = Guarded()
        app.go_on.clear()
        first = asyncio.create_task(app.post(b"x" * 90, TENSORS))
        while not app.num_calls:
            await asyncio.sleep(0)
        second = await app.post(b"x" * 11)
        other = asyncio.create_task(app.post(b"x" * 40, **{"x-api-key": BOB}))
        while app.num_calls < 2:
            await asyncio.sleep(0)
        app.go_on.set()
        answers = (await first, second, await other, await app.post(b"x" * 90, TENSORS))
        return [one.status_code for one in answers]

    assert asyncio.run(scenario()) == [200, 429, 200, 200]


# Routes


@service_test(virtual=False, body_bytes=100)
async def test_limits_of_the_service_hold_for_its_application(client):
    answers = [await client.post("forward_backward", b"x" * size, PROTOBUF) for size in (100, 101)]
    assert [answer.status_code for answer in answers] == [404, 413]  # the first names no session


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
        raise RuntimeError("a password in a traceback")

    client.service.sessions.find_live = broken
    answer = await client.post("session_heartbeat", {"session_id": "s"})
    assert answer.status_code == 500
    assert answer.json() == {"detail": "an error in the server, which has logged it"}


@service_test(virtual=False)
async def test_malformed_fields_and_unsupported_calls_are_named(client):
    for path, body, status, said in (
        ("save_weights", {"seq_id": "one"}, 422, "body.seq_id: Input should be a valid integer"),
        (
            "save_weights",
            {"seq_id": 1, "momentum": 1},
            422,
            "body.momentum: Extra inputs are not permitted",
        ),
        ("optim_step", {"seq_id": 1}, 422, "Field required"),
        ("get_info", {"type": 3}, 422, "body.type: "),
        ("training_runs/r/publish", {}, 400, "/publish: this server does not support this call"),
        ("training_runs", {}, 405, "Method Not Allowed"),
    ):
        answer = await client.post(path, {"model_id": "m"} | body)
        assert (answer.status_code, said in answer.json()["detail"]) == (status, True), answer.text


@service_test(virtual=False)
async def test_paths_without_the_prefix_of_an_api_name_the_prefixes(client):
    answer = await client.post("http://127.0.0.1/v1/chat/completions", {"model": "tiny"})
    assert answer.status_code == 404
    assert "POST /v1/chat/completions: this server does not have this path" in answer.text
    assert "under /oai/api/v1, those of Anthropic's under /anthropic/api" in answer.text
    # Below the prefixes errors have the form that their clients read.
    answer = await client.post("http://127.0.0.1/oai/api/v1/embeddings", {})
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"


@service_test(virtual=False, poll_s=5.0)
async def test_unsupported_variants_are_refused_by_name_and_use_up_their_seq_ids(client):
    model_id, load, sampler = (
        client.model(),
        {"path": "p", "optimizer": True},
        "save_weights_for_sampler",
    )
    for path, body, said in (
        ("optim_step", {"seq_id": 1, "optimizer_params": {"type": "dimuon"}}, "Adam only"),
        (sampler, {"seq_id": 2, "path": "p", "kind": "inflight"}, "'inflight'"),
        (sampler, {"seq_id": 3}, "give one of them"),
        (sampler, {"seq_id": 4, "path": "a", "sampling_session_seq_id": 0}, "give one of them"),
        ("load_weights", load | {"model_id": None}, "must have either session_id and"),
        (
            "load_weights",
            load | {"model_seq_id": 1, "seq_id": 5},
            "must have either session_id and",
        ),
        ("load_weights", load | {"seq_id": 6, "weights_access_token": "t"}, "weights_access_token"),
        ("save_weights", {"seq_id": 7, "ttl_seconds": 0}, "ttl_seconds=0"),
        ("save_weights", {"seq_id": 8, "ttl_seconds": 10**12}, "ttl_seconds=1000000000000"),
    ):
        answer = await client.post(path, {"model_id": model_id} | body)
        assert (answer.status_code, said in answer.json()["detail"]) == (400, True), answer.text
    assert (await client.result(client.step(model_id, 9))).metrics


@service_test(virtual=False, poll_s=0.05)
async def test_unfinished_result_is_answered_with_408(client):
    client.backend.hold("forward_backward")
    request_id = client.add(client.model(), 1, 3, 4)
    waiting = await client.retrieved(request_id)
    assert waiting.status_code == 408
    assert waiting.json() == {
        "type": "try_again",
        "request_id": request_id,
        "queue_state": "active",
        "queue_state_reason": "waiting for its turn",
    }


@service_test(virtual=False, poll_s=40.0)
async def test_result_is_answered_with_its_tensors_as_soon_as_there_is_one(client):
    gate = client.backend.hold("forward_backward")
    body = message(client.model(), 1, 3, 4).SerializeToString()
    request_id = (await client.post("forward_backward", body, PROTOBUF)).json()["request_id"]
    poll = asyncio.create_task(client.retrieved(request_id))
    await settled()
    assert not poll.done()
    gate.set()
    async with asyncio.timeout(20):
        answer = await poll
    assert deserialize_forward_backward_output(answer.content).metrics["loss:sum"] == 7.0


@service_test(virtual=False, all_held_bytes=2 * REQUEST_BYTES, models=1)
async def test_limit_on_waiting_work_is_429_on_held_state_403_and_closing_410(client):
    model_id = client.model()
    await client.result(f"{model_id}:0")
    client.backend.hold("forward_backward")
    steps = [{"model_id": model_id, "seq_id": seq_id, "adam_params": {}} for seq_id in (2, 3, 4)]
    answers = [await client.post("optim_step", step) for step in steps]
    body = {"session_id": model_id.split(":")[0], "model_seq_id": 1, "base_model": "tiny"}
    answers.append(await client.post("create_model", body))
    poll = asyncio.create_task(client.retrieved(f"{model_id}:2"))
    await asyncio.sleep(0)
    client.service.stop_waiting()
    assert [answer.status_code for answer in (*answers, await poll)] == [200, 200, 429, 403, 410]
