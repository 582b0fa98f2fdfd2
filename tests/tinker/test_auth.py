"""API keys and their owners, and the guard in front of the application."""

import asyncio
from dataclasses import replace

import httpx
import pytest
from starlette.responses import Response

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
PROTOBUF = {"content-type": "Application/X-Protobuf; v=1"}


class Guarded:
    """Application behind a guard that answers with the owner and the body when `go_on` is set."""

    def __init__(self, *, keys=None, hosts=None, **limits):
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.num_calls = 0
        self._guard = AccessGuard(
            self._answer, keys=keys or Keys(), hosts=hosts, limits=replace(LIMITS, **limits)
        )

    async def _answer(self, scope, receive, send):
        self.num_calls += 1
        body = (await receive())["body"]
        await self.go_on.wait()
        await Response(f"{scope['state']['owner']} {body.decode()}")(scope, receive, send)

    async def post(self, body=b"", **headers):
        transport = httpx.ASGITransport(self._guard)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
            return await http.post("/api/v1/x", content=body, headers={"x-api-key": KEY} | headers)


def post(body=b"", headers=None, **settings):
    async def once():
        return await Guarded(**settings).post(body, **(headers or {}))

    return asyncio.run(once())


async def chunks(*parts, ends=True):
    for part in parts:
        yield part
    if not ends:
        await asyncio.Event().wait()


def test_body_arrives_whole_with_its_owner():
    assert post(chunks(b"ab", b"c")).text == f"{Keys().owner(KEY.encode())} abc"


@pytest.mark.parametrize("key", ["", "tml-other-key-of-somebody", "k" * 5000, "tml-\xff"])
def test_unknown_key_is_refused_before_the_body(key):
    answer = post(b"x" * 2000, {"x-api-key": key.encode("latin-1")}, keys=Keys([KEY]))
    assert answer.status_code == 401
    assert not key or key not in answer.text


def test_large_body_is_refused_and_one_that_may_be_json_sooner():
    large = post(chunks(b"x" * 60, b"x" * 41), PROTOBUF)
    others = [
        post(b"x" * 101, PROTOBUF),
        post(chunks(b"x" * 60, b"x" * 41), PROTOBUF | {"content-length": "5"}),
        post(b"x" * 41, {"content-type": "application/json"}),
        post(b"x" * 41),
        post(headers={"content-length": "9" * 5000}),
    ]
    assert [one.status_code for one in (large, *others)] == [413] * 6
    assert "larger than the allowed 100 bytes" in large.text
    assert post(b"x" * 100, PROTOBUF).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("[::1]:8000", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example:8000", 421),
        ("", 421),
    ],
)
def test_host_is_checked(host, status):
    assert post(headers={"host": host}, hosts=("localhost", "127.0.0.1", "::1")).status_code == status


def test_body_that_does_not_arrive_times_out():
    answer = post(chunks(b"a", ends=False), body_timeout_s=0.05)
    assert answer.status_code == 408
    assert answer.json() == {"detail": "the body did not arrive within 0.05 s"}


def test_size_limit_counts_all_unanswered_bodies_together():
    async def scenario():
        app = Guarded(held_bytes=45)
        app.go_on.clear()
        first = asyncio.create_task(app.post(b"x" * 30))
        while not app.num_calls:
            await asyncio.sleep(0)
        second = await app.post(b"x" * 16)
        app.go_on.set()
        return [one.status_code for one in (await first, second, await app.post(b"x" * 30))]

    assert asyncio.run(scenario()) == [200, 429, 200]
