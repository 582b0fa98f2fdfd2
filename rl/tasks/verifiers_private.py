"""Private names of verifiers 0.4 that relay needs, each with its reason.

verifiers has no public way to serve a rollout's model requests from another program, or to ask an
environment which agents it plays. `rl.tasks.verifiers_task` refuses other versions, because these
names may change with any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def get_agent_specs(env: Any) -> Mapping[str, Any]:
    """Return the settings of each agent by its seat.

    The config, which is public, holds them among all its other fields.
    """
    specs: Mapping[str, Any] = env._agent_specs
    return specs


def get_harness(env: Any, seat: str) -> Any:
    """Return the harness of an agent: whether it can play a task is checked before the run."""
    return env._harnesses[seat]


def get_state_secrets(env: Any) -> tuple[str, ...]:
    """Return the secrets of the tool servers that all rollouts share.

    The interception server accepts a tool server's state by its secret.
    """
    secrets = []
    for server in env._shared_tools.values():
        if server.state_secret:
            secrets.append(server.state_secret)
    return tuple(secrets)


def make_server(*, client: Any, config: Any, secrets: tuple[str, ...]) -> Any:
    """Return an interception server that asks `client` when an agent's client is `config`.

    verifiers makes its clients from their configs, in a private method, and has no config for a
    client that exists.
    """
    from verifiers.v1.interception import InterceptionServer

    class Server(InterceptionServer):
        def _client(self, given: Any) -> Any:
            return client if given == config else super()._client(given)

    return Server(state_service_secrets=secrets)


def use_server(env: Any, server: Any) -> None:
    """Let the agents of an environment use this interception server.

    `Env.serving`, which starts one of its own, has no argument for it.
    """
    env._interception = server


def make_toolset(cls: Any, config: str) -> Any:
    """Make a toolset of a class from its config as JSON.

    The class of the config is known to the toolset alone.
    """
    return cls(cls._config_cls().model_validate_json(config))
