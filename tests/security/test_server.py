"""What a client can do to the Tinker server: with no key, with a key against others, and to what
the server keeps.
"""

import asyncio
import contextlib
import gc
import itertools
import socket
import stat
import threading
import time
import weakref
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import pytest
from starlette.responses import Response
from tinker.proto import tinker_public_pb2 as pb

from rl.http.keys import Keys
from rl.http.server import listen
from rl.tinker import http_server
from rl.tinker.auth import TinkerGuard
from rl.tinker.base_model import BaseModelFolder
from rl.tinker.http_server import TinkerServer, lock_storage, serve
from rl.tinker.local import LocalTinkerBackend
from rl.tinker.service.futures import REQUEST_BYTES
from rl.tinker.service.service import Service
from rl.tinker.types import Limits
from rl.tinker.wire.codec import PROTOBUF
from tests.support.fake_tinker import FakeBackend, message, service_test
from tests.support.tinker_server import server_process

KEY, OTHER = "tml-" + "k" * 20, "tml-" + "o" * 20
HEALTH = b"GET /api/v1/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF = HEALTH[:-2]
SAMPLE = b'{"prompt": {"chunks": [{"tokens": [%s]}]}, "sampling_params": {}}'


# A server process


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    keys = folder / "keys"
    keys.touch(mode=0o600)
    keys.write_text(f"{KEY}\n{OTHER}\n")
    with server_process(folder / "storage", "--keys_file", str(keys)) as process:
        yield process


def memory_mb(server):
    """Return the server's memory now and its peak, which this call resets."""
    status = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    )
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")
    return SimpleNamespace(
        **{name: int(status[name].split()[0]) / 1000 for name in ("VmRSS", "VmHWM")}
    )


def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def healthy(server):
    return httpx.get(f"{server.url}/api/v1/healthz", timeout=20).json() == {"status": "ok"}


def longest_wait_s(server, call):
    """Return a call's result, and the longest time that a request without a key took meanwhile."""
    waits: list[float] = []
    ended = threading.Event()

    def ask():
        with httpx.Client(timeout=120) as http:
            while not waits or not ended.is_set():
                began = time.monotonic()
                http.get(f"{server.url}/api/v1/healthz")
                waits.append(time.monotonic() - began)
                ended.wait(0.02)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        result = call()
    finally:
        ended.set()
        asking.join()
    return result, max(waits)


def post(server, path, body, kind="application/json"):
    headers = {"x-api-key": KEY, "content-type": kind}
    return httpx.post(f"{server.url}/api/v1/{path}", content=body, headers=headers, timeout=120)


def new_model(server):
    body = b'{"tags": [], "user_metadata": {}, "sdk_version": "1"}'
    session_id = post(server, "create_session", body).json()["session_id"]
    body = b'{"session_id": "%s", "model_seq_id": 0, "base_model": "tiny"}' % session_id.encode()
    return post(server, "create_model", body).json()["model_id"]


@pytest.mark.medium
def test_headers_without_end_close_their_connection(server):
    memory_mb(server)
    before = memory_mb(server).VmRSS
    sent = 0
    with connect(server) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(HALF + b"X: ")
        while sent < 40_000_000:
            sent += connection.send(b"x" * 100_000)
    assert sent < 40_000_000
    assert memory_mb(server).VmHWM - before < 10
    assert healthy(server)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("path", "body", "kind", "status"),
    [
        ("asample", SAMPLE % b",".join([b'"x"'] * 500_000), "application/json", 422),
        (
            "create_session",
            b'{"tags": [%s]}' % b",".join([b"1"] * 4_000_000),
            "application/json",
            413,
        ),
        ("forward_backward", b"\x1a\x00" * 4_000_000, PROTOBUF, 400),
    ],
    ids=["wrong tokens", "large list", "many data"],
)
def test_hostile_body_stops_nobody_and_costs_little(server, path, body, kind, status):
    if kind == PROTOBUF:
        told = {"model_id": new_model(server), "seq_id": 1, "loss_fn": "cross_entropy"}
        body += pb.ForwardBackwardRequest(**told).SerializeToString()
    memory_mb(server)
    before = memory_mb(server).VmRSS
    answer, wait_s = longest_wait_s(server, lambda: post(server, path, body, kind))
    assert wait_s < 1.5
    assert memory_mb(server).VmHWM - before < 300
    assert answer.status_code == status, answer.text
    assert len(answer.text) < 2000


def test_new_storage_folder_is_for_its_user_only(tmp_path):
    with lock_storage(tmp_path / "storage"):
        assert stat.S_IMODE((tmp_path / "storage").stat().st_mode) == 0o700


def test_server_without_keys_and_with_a_folder_of_everybody_warns(tmp_path, capsys):
    storage = tmp_path / "storage"
    storage.mkdir(mode=0o755)
    backend = LocalTinkerBackend.Config(base=BaseModelFolder.Config(folder=str(tmp_path / "none")))
    config = TinkerServer.Config(backend=backend, port=0, storage_folder=str(storage))
    with pytest.raises(ValueError, match="none"):
        config.build().run()
    printed = capsys.readouterr().err
    assert "warning: without keys_file any key is accepted" in printed
    assert f"warning: other users can read checkpoints in {storage}: chmod 700 it" in printed
    assert stat.S_IMODE(storage.stat().st_mode) == 0o755  # the folder may have other uses


# Connections, in this process


def fake_service(folder):
    return Service(backend=cast(Any, FakeBackend()), storage_folder=folder / "storage")


@asynccontextmanager
async def served(service):
    """Serve a service, and yield a function that opens a connection."""
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    with listen("127.0.0.1", 0) as listener:
        running = asyncio.create_task(
            serve(
                service, listener, keys=Keys([KEY]), hosts=None, stop=stop, ready=ready.set_result
            )
        )
        await ready
        async with asyncio.timeout(20):
            yield lambda: asyncio.open_connection(*listener.getsockname()[:2])
        stop.set()
        await running


async def ask(reader, writer, request=HEALTH):
    writer.write(request)
    return await reader.readuntil(b"\r\n")


async def is_closed(reader, writer):
    with contextlib.suppress(ConnectionError):
        return await reader.read(1) == b""
    return True


def test_memory_goes_back_only_while_nothing_waits(tmp_path, monkeypatch):
    service, given_back = fake_service(tmp_path), itertools.count()
    monkeypatch.setattr(http_server, "MEMORY_S", 0.01)
    monkeypatch.setattr(http_server, "give_back_freed_memory", partial(next, given_back))

    async def wait_for_one():
        before = next(given_back)
        async with asyncio.timeout(30):
            while next(given_back) == before + 1:
                before += 1
                await asyncio.sleep(0.01)

    class Body:
        """A refused body that hangs in a cycle with its error."""

        def __init__(self):
            self.error = self

    async def scenario():
        gc.freeze()  # collections look at what is made here only
        body = weakref.ref(Body())
        giving_back = asyncio.create_task(http_server.give_back_memory(service))
        await wait_for_one()
        assert body() is None
        request = service._futures.accept("a:1", owner="me")
        await asyncio.sleep(1)  # one may be under way
        before = next(given_back)
        await asyncio.sleep(0.2)
        assert next(given_back) == before + 1
        service._futures.fail(request, "it was cancelled")
        await wait_for_one()
        giving_back.cancel()

    gc.disable()
    try:
        asyncio.run(scenario())
    finally:
        gc.enable()
        gc.unfreeze()


def test_answer_that_nobody_takes_closes_its_connection(tmp_path, monkeypatch):
    async def scenario():
        monkeypatch.setattr("rl.http.server.WRITE_TIMEOUT_S", 0.2)
        async with served(fake_service(tmp_path)) as connect:
            _, writer = await connect()
            writer.transport.pause_reading()
            writer.write(HEALTH.replace(b"/api/v1/healthz", b"/openapi.json") * 1000)
            with contextlib.suppress(ConnectionError):
                while True:  # until the connection is closed, or the test's time is over
                    writer.write(HEALTH * 1000)
                    await writer.drain()
                    await asyncio.sleep(0.05)

    asyncio.run(scenario())


# Shares


@pytest.mark.parametrize(("connections", "samples"), [(4096, 2000), (200, 84), (10, 1)])
def test_client_is_told_to_wait_for_no_more_samples_than_its_share_of_connections(
    tmp_path, monkeypatch, connections, samples
):
    monkeypatch.setattr("rl.http.open_files.MAX_CONNECTIONS", connections)
    monkeypatch.setattr("resource.getrlimit", lambda which: (10_000, 10_000))
    service = fake_service(tmp_path)
    config = asyncio.run(service.get_client_config(cast(Any, None)))
    assert config.sample_max_concurrent_requests == samples


def test_paths_without_a_key_take_no_body():
    async def forever():
        yield b"x"
        await asyncio.Event().wait()

    async def scenario():
        async def app(scope, receive, send):
            await Response("open")(scope, receive, send)

        guard = TinkerGuard(app, keys=Keys([KEY]), hosts=None, limits=Limits())
        transport = httpx.ASGITransport(guard)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=5
        ) as http:
            async with asyncio.timeout(5):
                answers = [
                    await http.post("/openapi.json", content=content)
                    for content in (b"", b"x", forever())
                ]
        return [answer.status_code for answer in answers]

    assert asyncio.run(scenario()) == [200, 413, 413]


def test_bodies_and_requests_of_one_key_leave_room_for_those_of_another(monkeypatch):
    monkeypatch.setattr("rl.tinker.auth.SMALL_BYTES", 100)
    monkeypatch.setattr("rl.http.guard.ALL_BODIES_BYTES", 300)
    monkeypatch.setattr("rl.http.open_files.MAX_CONNECTIONS", 10)

    async def endless():
        yield b"x" * 60
        await asyncio.Event().wait()

    async def scenario():
        async def app(scope, receive, send):
            await Response("called")(scope, receive, send)

        guard = TinkerGuard(app, keys=Keys([KEY, OTHER]), hosts=None, limits=Limits())
        transport = httpx.ASGITransport(guard)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost/api/v1/"
        ) as http:
            flood = [
                asyncio.create_task(http.post("x", content=endless(), headers={"x-api-key": KEY}))
                for _ in range(20)
            ]
            await asyncio.sleep(0.1)
            refused = [one.result().status_code for one in flood if one.done()]
            other = await http.post("x", content=b"x" * 50, headers={"x-api-key": OTHER})
            for one in flood:
                one.cancel()
            await asyncio.gather(*flood, return_exceptions=True)
            after = await http.post("x", content=b"x" * 100, headers={"x-api-key": KEY})
            return set(refused), len(refused), other.status_code, after.status_code

    # Two bodies of 60 bytes leave 180 bytes; a third would leave less than the key holds.
    assert asyncio.run(scenario()) == ({429}, 18, 200, 200)


@service_test(virtual=False, all_held_bytes=3 * REQUEST_BYTES)
async def test_sparse_tensors_count_as_what_they_become(client):
    model_id = client.model()
    await client.result(f"{model_id}:0")
    client.backend.hold("forward_backward")
    statuses = []
    for seq_id in (1, 2):
        body = message(model_id, seq_id, *range(90))
        targets = body.data[0].loss_fn_inputs["target_tokens"]
        targets.shape[:] = [90, client.backend.base_model.vocab_size]
        targets.sparse_csr.CopyFrom(pb.SparseCsr(crow_indices=np.zeros(91, "<i8").tobytes()))
        statuses.append(
            (await client.post("forward_backward", body.SerializeToString(), PROTOBUF)).status_code
        )
    assert statuses == [200, 429]
