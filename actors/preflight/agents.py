"""Checks of what agents need of the machine, before anything starts."""

from __future__ import annotations

import socket

from actors.config import RunConfig
from rl.agents.task import AgentTask
from rl.utils.proxies import is_loopback


def check_address(config: RunConfig) -> None:
    """Raise ValueError if the agents' endpoint cannot listen at `agents.listen` on this machine."""
    agents, launch = config.agents, config.launch
    if agents is None or launch.on_cluster:
        return
    # In a network of their own, actors find every port of loopback free.
    needs_network = isinstance(config.task, AgentTask.Config) and config.task.needs_network
    may_be_isolated = (
        is_loopback(agents.host) and launch.isolate_network is not False and not needs_network
    )
    family = socket.AF_INET6 if ":" in agents.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((agents.host, 0 if may_be_isolated else agents.port))
    except OSError as error:
        raise ValueError(
            f"agents.listen={agents.listen!r}: cannot listen there: {error.strerror}; give an "
            "address of this machine and a free port"
        ) from None
