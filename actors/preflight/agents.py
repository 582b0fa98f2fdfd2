"""Checks of what agents need of the machine, before anything starts."""

from __future__ import annotations

import os
import resource
import socket

from actors.config import RunConfig
from rl.agents.task import AgentTask
from rl.http.open_files import OPEN_FILES, limit_connections
from rl.utils.proxies import is_loopback

CONNECTIONS_OF_AGENT = 2
"""Connections that an agent may hold: a client keeps one open, and a stream is another."""
PROCESSES_OF_AGENT = 2
"""Processes of an agent that starts no others: itself and its guard."""


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


def check_agent_limits(config: RunConfig) -> None:
    """Raise ValueError for more agents than this machine's limits on files and processes permit."""
    agents, launch = config.agents, config.launch
    if agents is None or launch.on_cluster:
        return
    files = min(OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    connections = limit_connections(files)
    most = connections // CONNECTIONS_OF_AGENT
    if agents.max_running > most:
        raise ValueError(
            f"agents.max_running={agents.max_running}: must be at most {most}, as agents hold "
            f"{CONNECTIONS_OF_AGENT} connections each, and the endpoint takes {connections} with "
            f"{files} open files (ulimit -Hn, at most {OPEN_FILES})"
        )
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    # The limit does not bind root.
    if processes == resource.RLIM_INFINITY or os.geteuid() == 0:
        return
    most = processes // PROCESSES_OF_AGENT
    if agents.max_running >= most:
        raise ValueError(
            f"agents.max_running={agents.max_running}: must be less than {most}, as agents have "
            f"{PROCESSES_OF_AGENT} processes each, and a user may have {processes} (ulimit -u)"
        )
