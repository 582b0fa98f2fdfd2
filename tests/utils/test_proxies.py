"""Requests to this machine in an environment with proxies, which lead nowhere here."""

import asyncio
import os
import urllib.request

import httpx
import pytest
from tinker import _base_client
from tinker._client import AsyncTinker
from tinker.types import ClientConfigResponse

from rl.tinker import compat
from rl.utils.proxies import allow_loopback, find_proxy, leads_here, make_loopback_exemption
from tests.support.json_server import JsonServer

DEAD = "http://user:secret@127.0.0.1:9"
HERE = "localhost,127.0.0.1,::1,0.0.0.0"


class Answering(JsonServer):
    def answer(self, method, path, body, headers):
        return 200, {"asked": f"{method} {path}"}


@pytest.fixture
def proxied(monkeypatch):
    """Environment with a dead proxy of every kind."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    for name in ("http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, DEAD)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "internal.example")
    # urllib keeps the proxies of its first request for all later ones of the process.
    monkeypatch.setattr(urllib.request, "_opener", None)
    return monkeypatch


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HOME": "/root", "NO_PROXY": "a"}, {}),
        ({"http_proxy": ""}, {}),
        ({"HTTPS_PROXY": DEAD}, {"no_proxy": HERE, "NO_PROXY": HERE}),
        (
            {"all_proxy": DEAD, "NO_PROXY": "a, b"},
            {"no_proxy": f"a,b,{HERE}", "NO_PROXY": f"a,b,{HERE}"},
        ),
        ({"all_proxy": DEAD, "no_proxy": "*"}, {"no_proxy": "*", "NO_PROXY": "*"}),
        (
            {"all_proxy": DEAD, "no_proxy": "::1,127.0.0.1", "NO_PROXY": "b"},
            {"no_proxy": "::1,127.0.0.1,localhost,0.0.0.0", "NO_PROXY": f"b,{HERE}"},
        ),
    ],
)
def test_this_machine_is_added_to_the_hosts_without_a_proxy(environment, expected):
    assert make_loopback_exemption(environment) == expected
    assert make_loopback_exemption(environment | expected) == expected


def test_clients_reach_this_machine_and_others_go_through_the_proxy(proxied):
    allow_loopback()
    with Answering() as server:
        for url in (server.url, server.url.replace("127.0.0.1", "localhost")):
            assert httpx.get(url).json() == {"asked": "GET /"}
            with urllib.request.urlopen(url, timeout=5) as answer:
                assert b"GET" in answer.read()
    assert find_proxy(server.url) is None
    assert find_proxy("https://hub.example/x") == "https_proxy=http://127.0.0.1:9"
    assert find_proxy("http://internal.example") is None


@pytest.mark.parametrize(
    ("host", "is_here"),
    [
        ("[::1]", True),
        ("0.0.0.0", True),
        ("127.0.1.1", True),
        ("Node-7", True),
        ("node-7.example", False),
        ("localhost.example", False),
    ],
)
def test_address_of_this_machine_is_known_by_its_host(monkeypatch, host, is_here):
    monkeypatch.setattr("socket.gethostname", lambda: "Node-7")
    assert leads_here(f"http://{host}:8/v1") == is_here


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("p:1", "http://p:1"),
        ("socks5://user:se/cret@p:1", "socks5://p:1"),
        ("http://[::1", "http://[::1"),
    ],
)
def test_proxy_is_shown_as_it_is_given_without_its_password(proxied, address, shown):
    proxied.setenv("http_proxy", address)
    assert find_proxy("http://hub.example") == f"http_proxy={shown}"


@pytest.mark.parametrize("proxy", [DEAD, "socks5://127.0.0.1:9"])
def test_official_client_reads_no_proxy_for_a_server_on_this_machine(proxied, proxy):
    proxied.setenv("ALL_PROXY", proxy)
    proxied.setattr(_base_client, "AsyncHttpxClientWrapper", _base_client.AsyncHttpxClientWrapper)
    # As a client in this process does: its first calls go through httpx, later ones through
    # pyqwest.
    allow_loopback()
    compat.keep_clients_direct()

    async def ask(url):
        first = ClientConfigResponse(use_pyqwest_transport=False)
        clients = [AsyncTinker(base_url=url, api_key="tml-" + "a" * 16, _client_config=first)]
        clients.append(AsyncTinker(base_url=url, api_key="tml-" + "a" * 16))
        return [(await client._client.get("/x")).json() for client in clients]

    with Answering() as server:
        assert asyncio.run(ask(server.url)) == [{"asked": "GET /x"}] * 2
