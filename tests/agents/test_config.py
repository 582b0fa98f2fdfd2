"""Settings of the endpoint."""

from __future__ import annotations

import pytest

from rl.agents.config import EndpointConfig


@pytest.mark.parametrize(
    ("listen", "host", "port"),
    [("127.0.0.1:0", "127.0.0.1", 0), ("[::1]:8100", "::1", 8100), ("node:65535", "node", 65535)],
)
def test_address_and_port_are_read(listen, host, port):
    config = EndpointConfig(listen=listen)
    assert (config.host, config.port) == (host, port)


@pytest.mark.parametrize("listen", ["", "127.0.0.1", ":80", "host:", "host:-1", "host:65536"])
def test_address_without_a_port_is_refused(listen):
    with pytest.raises(ValueError, match=r"listen=.*must be an address and a port"):
        EndpointConfig(listen=listen)


@pytest.mark.parametrize("roles", [(), ("mian",), ("main", "mian")])
def test_roles_that_cannot_be_trained_are_refused(roles):
    with pytest.raises(
        ValueError,
        match=r"trained_roles=.*must be one or more of main, sub-agent, auxiliary, superseded",
    ):
        EndpointConfig(trained_roles=roles)


def test_address_of_all_devices_needs_a_url():
    with pytest.raises(ValueError, match="set url"):
        EndpointConfig(listen="0.0.0.0:8100")
    assert EndpointConfig(listen="0.0.0.0:8100", url="http://head:8100").port == 8100
    with pytest.raises(ValueError, match="must begin with http"):
        EndpointConfig(url="head:8100")
