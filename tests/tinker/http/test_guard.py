"""What a request has to pass, driven as a server drives an application."""

import asyncio
import json

import pytest

from rl.tinker.http.auth import Keys
from rl.tinker.http.guard import Guard

KEY = "tml-" + "k" * 20


SETTINGS = ("keys", "hosts", "max_body_bytes", "max_held_bytes", "body_timeout_s")


class Inner:
    """Answers with the body's length and the owner, once it is let to."""

    def __init__(self):
        self.bodies = []
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def __call__(self, scope, receive, send):
        self.bodies.append((await receive())["body"])
        await self.go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["state"]["owner"].encode()})


def guard(inner, *, keys=None, hosts=None, max_body_bytes=100, max_held_bytes=1000, body_timeout_s=10.0):
    return Guard(
        inner,
        keys=keys or Keys(),
        hosts=hosts,
        max_body_bytes=max_body_bytes,
        max_held_bytes=max_held_bytes,
        body_timeout_s=body_timeout_s,
    )


async def call(app, *, chunks=(b"",), headers=None, path="/api/v1/x", ends=True):
    """Status and body; `ends` False: the client sends no more, and stays."""
    messages = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    messages[-1]["more_body"] = not ends
    left, sent = list(messages), []

    async def receive():
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    async def send(message):
        sent.append(message)

    named = {"host": "127.0.0.1:8000", "x-api-key": KEY} | (headers or {})
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in named.items()],
    }
    await asyncio.wait_for(app(scope, receive, send), 30)
    body = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], body if sent[0]["status"] == 200 else json.loads(body)["detail"]


def run(**kwargs):
    async def once():
        inner = Inner()
        settings = {name: kwargs.pop(name) for name in list(kwargs) if name in SETTINGS}
        status, body = await call(guard(inner, **settings), **kwargs)
        return status, body, inner

    return asyncio.run(once())


def test_a_body_arrives_whole_with_its_owner():
    status, owner, inner = run(chunks=(b"ab", b"c"))

    expected = Keys().owner(KEY.encode())
    assert expected is not None
    assert (status, owner) == (200, expected.encode())
    assert inner.bodies == [b"abc"]


@pytest.mark.parametrize("key", ["", "tml-other-key-of-somebody", "k" * 5000, "tml-\xff"])
def test_a_key_that_is_not_known_is_refused_before_the_body(key):
    sent: dict[str, str] = {"x-api-key": key}
    status, detail, inner = run(keys=Keys([KEY]), headers=sent)

    assert status == 401
    assert inner.bodies == []
    assert not key or key not in detail


def test_a_large_body_is_refused_by_its_header_and_by_its_bytes():
    by_header = run(headers={"content-length": "101"})
    by_bytes = run(chunks=(b"x" * 60, b"x" * 41))
    lied = run(chunks=(b"x" * 60, b"x" * 41), headers={"content-length": "5"})
    most = run(chunks=(b"x" * 60, b"x" * 40))

    assert [by_header[0], by_bytes[0], lied[0], most[0]] == [413, 413, 413, 200]
    assert "larger than the 100 bytes" in by_bytes[1]
    assert by_bytes[2].bodies == []


@pytest.mark.parametrize("length", ["9" * 5000, "1e3", "-1", "\xb2"])
def test_lengths_that_are_no_numbers_do_no_harm(length):
    assert run(headers={"content-length": length})[0] in (200, 413)


def test_an_encoding_that_is_not_read_is_refused():
    status, detail, _ = run(headers={"content-encoding": "zstd"})

    assert (status, detail) == (415, "Content-Encoding: 'zstd', must be identity")


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "[::1]:8000", "LOCALHOST:1"])
def test_names_of_this_machine_are_let_in(host):
    assert run(hosts=("localhost", "127.0.0.1", "::1"), headers={"host": host})[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8000", ""])
def test_a_name_that_leads_here_from_elsewhere_is_refused(host):
    assert run(hosts=("localhost", "127.0.0.1"), headers={"host": host})[0] == 421


def test_a_body_that_does_not_come_is_given_up():
    status, detail, _ = run(chunks=(b"a",), ends=False, body_timeout_s=0.05)

    assert (status, detail) == (408, "the body did not arrive within 0.05 s")


def test_bodies_being_worked_on_count_together_until_they_are_answered():
    async def scenario():
        inner = Inner()
        app = guard(inner, max_held_bytes=150)
        inner.go_on.clear()
        first = asyncio.create_task(call(app, chunks=(b"x" * 100,)))
        while not inner.bodies:
            await asyncio.sleep(0)
        second = await call(app, chunks=(b"x" * 51,))
        inner.go_on.set()
        return [(await first)[0], second[0], (await call(app, chunks=(b"x" * 100,)))[0]]

    assert asyncio.run(scenario()) == [200, 429, 200]
