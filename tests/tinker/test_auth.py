"""API keys and their owners, and the guard in front of the application."""

import asyncio
import json
from dataclasses import replace

import pytest

from rl.tinker.auth import AccessGuard, Keys, read_keys
from rl.tinker.types import HttpLimits

ALICE, BOB = "tml-" + "a" * 20, "tml-" + "b" * 20


def write(folder, text, mode=0o600):
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_each_key_has_an_owner_that_hides_it(tmp_path):
    in_file = read_keys(write(tmp_path, f"# for the notebook\n{ALICE}\n\n  {BOB}  # second\n"))
    alice, bob = (in_file.owner(key.encode()) for key in (ALICE, BOB))
    assert alice != bob
    assert alice is not None
    assert bob is not None
    # Training runs that were saved earlier carry this hash.
    assert alice.startswith("8601cb65ef48")
    unknown = (b"", b"tml-", b"# for the notebook", ALICE.encode()[:-1], ALICE.encode() + b" ", b"\xff\x00")
    assert [in_file.owner(key) for key in unknown] == [None] * 6


def test_without_configured_keys_each_key_is_its_own_owner():
    assert not Keys().configured
    assert Keys().owner(b"tml-x") != Keys().owner(b"tml-y")
    assert Keys().owner(b"") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there are none"),
        ("sk-aaaaaaaaaaaaaaaaaaaaaaaa", "API key 1: must be 'tml-' and 16 or more printable ASCII"),
        (f"{ALICE}\ntml-short", "API key 2: must be"),
        ("tml-aaaaaaaaaaaaaaaaa aaaaaa", "API key 1"),
    ],
)
def test_unsafe_key_is_refused_and_not_shown(tmp_path, text, said):
    with pytest.raises(ValueError, match="keys_file=") as error:
        read_keys(write(tmp_path, text))
    assert said in str(error.value)
    assert not any(line in str(error.value) for line in text.splitlines())


def test_missing_keys_and_files_that_others_can_read_are_refused(tmp_path):
    with pytest.raises(ValueError, match="others may read or write it; chmod 600"):
        read_keys(write(tmp_path, ALICE, 0o640))
    with pytest.raises(ValueError, match=r"none.: .*No such file"):
        read_keys(str(tmp_path / "none"))


# AccessGuard

KEY = "tml-" + "k" * 20
LIMITS = HttpLimits(body_bytes=100, json_bytes=40, held_bytes=1000, body_timeout_s=10.0)


class Inner:
    """Application that answers with the owner when `go_on` is set."""

    def __init__(self):
        self.bodies = []
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def __call__(self, scope, receive, send):
        self.bodies.append((await receive())["body"])
        await self.go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["state"]["owner"].encode()})


def guard(inner, *, keys=None, hosts=None, **limits):
    return AccessGuard(inner, keys=keys or Keys(), hosts=hosts, limits=replace(LIMITS, **limits))


async def call(app, *, chunks=(b"",), headers=None, path="/api/v1/x", ends=True):
    """Return status and body; with `ends=False` the client stops sending and stays connected."""
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


def run(*, chunks=(b"",), headers=None, ends=True, **settings):
    async def once():
        inner = Inner()
        status, body = await call(guard(inner, **settings), chunks=chunks, headers=headers, ends=ends)
        return status, body, inner

    return asyncio.run(once())


def test_body_arrives_whole_with_its_owner():
    status, owner, inner = run(chunks=(b"ab", b"c"))

    expected = Keys().owner(KEY.encode())
    assert expected is not None
    assert (status, owner) == (200, expected.encode())
    assert inner.bodies == [b"abc"]


@pytest.mark.parametrize("key", ["", "tml-other-key-of-somebody", "k" * 5000, "tml-\xff"])
def test_unknown_key_is_refused_before_the_body(key):
    sent: dict[str, str] = {"x-api-key": key}
    status, detail, inner = run(keys=Keys([KEY]), headers=sent)

    assert status == 401
    assert inner.bodies == []
    assert not key or key not in detail


def test_large_body_is_refused_and_one_that_may_be_json_sooner():
    protobuf = {"content-type": "Application/X-Protobuf; v=1"}
    by_header = run(headers=protobuf | {"content-length": "101"})
    by_bytes = run(chunks=(b"x" * 60, b"x" * 41), headers=protobuf)
    lied = run(chunks=(b"x" * 60, b"x" * 41), headers=protobuf | {"content-length": "5"})
    most = run(chunks=(b"x" * 60, b"x" * 40), headers=protobuf)
    json_bytes = [
        run(chunks=(b"x" * 41,), headers={"content-type": kind}) for kind in ("application/json", "")
    ]

    assert [one[0] for one in (by_header, by_bytes, lied, *json_bytes, most)] == [413] * 5 + [200]
    assert "larger than the allowed 100 bytes" in by_bytes[1]
    assert by_bytes[2].bodies == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-length": "9" * 5000}, 413),
        ({"content-length": "1e3"}, 200),
        ({"content-length": "\xb2"}, 200),
        ({"host": "localhost"}, 200),
        ({"host": "LOCALHOST:1"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "evil.example"}, 421),
        ({"host": "127.0.0.1.evil.example:8000"}, 421),
        ({"host": ""}, 421),
    ],
)
def test_headers_are_checked(headers, status):
    assert run(hosts=("localhost", "127.0.0.1", "::1"), headers=headers)[0] == status


def test_body_that_does_not_arrive_times_out():
    status, detail, _ = run(chunks=(b"a",), ends=False, body_timeout_s=0.05)
    assert (status, detail) == (408, "the body did not arrive within 0.05 s")


def test_size_limit_counts_all_unanswered_bodies_together():
    async def scenario():
        inner = Inner()
        app = guard(inner, held_bytes=45)
        inner.go_on.clear()
        first = asyncio.create_task(call(app, chunks=(b"x" * 30,)))
        while not inner.bodies:
            await asyncio.sleep(0)
        second = await call(app, chunks=(b"x" * 16,))
        inner.go_on.set()
        return [(await first)[0], second[0], (await call(app, chunks=(b"x" * 30,)))[0]]

    assert asyncio.run(scenario()) == [200, 429, 200]
