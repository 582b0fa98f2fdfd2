"""Settings of the endpoint and of the task."""

from __future__ import annotations

import pytest

from rl.agents.config import EndpointConfig
from rl.agents.players.plays import EPISODE_VARIABLES
from rl.agents.program import make_agent_environment
from rl.agents.task import AgentTask
from rl.tasks.sum_digits import SumDigits


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


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_running": 0}, "max_running=0: must be at least 1"),
        ({"max_body_mib": 513}, "max_body_mib=513: must be at least 1 and at most 512"),
    ],
)
def test_limit_that_could_not_work_is_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        EndpointConfig(**settings)


def test_address_of_all_devices_needs_a_url():
    with pytest.raises(ValueError, match="set url"):
        EndpointConfig(listen="0.0.0.0:8100")
    assert EndpointConfig(listen="0.0.0.0:8100", url="http://head:8100").port == 8100
    for url in ("head:8100", "http://", "http://a b/", "http://head:8100?a=b"):
        with pytest.raises(ValueError, match="must begin with http"):
            EndpointConfig(url=url)
    assert EndpointConfig(url="https://head/relay/").url == "https://head/relay/"


def test_requests_to_the_endpoint_take_no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "intranet")
    monkeypatch.delenv("NO_PROXY", raising=False)
    variables = make_agent_environment(url="http://Head-Node:8100/episodes/k", key="k")
    for name in ("no_proxy", "NO_PROXY"):
        assert variables.pop(name) == "intranet,localhost,127.0.0.1,::1,0.0.0.0,head-node"
    assert {*variables} == {*EPISODE_VARIABLES}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"command": ("a", "b\0")}, r"command=\('a', 'b\\x00'\) must be a tuple of texts without"),
        ({"env": {"A=B": "c"}}, "env={'A=B': 'c'}: name and value must be texts without NUL"),
        ({"env": {"A": "b\0"}}, "env={'A': 'b.x00'}: name and value must be texts without NUL"),
        ({"collect": ("../a",)}, "collect: '../a' must be a relative path in the working folder"),
        ({"max_output_mib": 1e-9}, "max_output_mib=1e-09: must be at least 0.001"),
        ({"max_output_mib": float("inf")}, "max_output_mib=inf: must be .* below inf"),
        ({"max_folder_mib": 2**44}, "max_folder_mib=.*: must be at least 1 and at most"),
        ({"keep_env": ("MY_KEY", "OPENAI_API_KEY")}, "OPENAI_API_KEY is set for each episode"),
        ({"solved_at": float("nan")}, "solved_at=nan: must be"),
    ],
)
def test_task_that_no_agent_could_play_is_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        AgentTask.Config(problems=SumDigits.Config(), **({"command": ("true",)} | settings))


def test_variables_to_keep_must_be_there(monkeypatch):
    monkeypatch.setenv("TEST_KEPT_TOKEN", "kept")
    monkeypatch.delenv("TEST_OTHER_TOKEN", raising=False)
    config = AgentTask.Config(
        problems=SumDigits.Config(), command=("true",), keep_env=("TEST_KEPT_TOKEN",)
    )
    assert config.build().program.keep_env == ("TEST_KEPT_TOKEN",)
    config.keep_env = ("TEST_OTHER_TOKEN",)
    with pytest.raises(
        ValueError, match=r"keep_env=.*the environment has no variable TEST_OTHER_TOKEN"
    ):
        config.build()
