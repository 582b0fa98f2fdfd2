"""Settings of the endpoint of agents."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import get_args

from rl.agents.settings import ClientRules
from rl.config.configurable import Configurable
from rl.config.tree import check_bounds
from rl.types import BranchRole


@dataclass(kw_only=True, slots=True)
class EndpointConfig(Configurable.Config):
    """Where the endpoint listens, how many agents run, and what clients may decide."""

    max_running: int = 64
    """Most agents at the same time."""
    listen: str = "127.0.0.1:0"
    """Address and port to listen on; port 0 is a free one. Loopback is for agents on this machine;
    another address, such as 0.0.0.0:8100, lets agents in from containers and other machines, by
    plain HTTP, each with the key of its episode."""
    url: str | None = None
    """URL of the endpoint as agents reach it, such as http://head-node:8100; None: the address that
    it listens on."""
    trained_roles: tuple[BranchRole, ...] = ("main", "sub-agent")
    """Roles of the conversations that are trained on; others are only recorded. A function of the
    task's may choose instead (`task.choose_branches`)."""
    models: tuple[str, ...] = ()
    """Model names that agents may ask for; empty: any, all of which are this run's model."""
    honours_sampling: bool = False
    """Sample as agents ask (temperature, top_p, top_k, seed) instead of only recording it.
    Refused for training, because logprobs must be those of the policy."""
    announces_tools: bool = True
    """Tell the model which tools an agent offers, as its chat template does. Off for a model
    that was trained on its tools without words."""
    refuses_long_replies: bool = False
    """Refuse a request for more tokens than are left, instead of giving it what is left."""
    max_body_mib: int = 32
    """Largest request, in MiB."""
    import_timeout_s: float = 300.0
    """Longest time to import the agent's function."""

    def __post_init__(self) -> None:
        check_bounds(self, "max_running", at_least=1)
        # One key may hold half of the bytes of all requests (`rl.http.guard`).
        check_bounds(self, "max_body_mib", at_least=1, at_most=512)
        roles = get_args(BranchRole)
        if not self.trained_roles or not set(self.trained_roles) <= {*roles}:
            raise ValueError(
                f"trained_roles={self.trained_roles}: must be one or more of {', '.join(roles)}"
            )
        if not (0 <= self.port <= 65_535 and self.host):
            raise ValueError(
                f"listen={self.listen!r}: must be an address and a port up to 65535, such as "
                "127.0.0.1:0 or [::1]:8100"
            )
        if self.url is None and self.host in ("0.0.0.0", "::"):
            raise ValueError(
                f"listen={self.listen!r} is no address that agents could ask: set url to the one "
                "by which they reach this machine, such as http://head-node:8100"
            )
        if self.url is not None and not re.match(r"https?://[^/?#@\s]+(/[^?#\s]*)?$", self.url):
            raise ValueError(
                f"url={self.url!r}: must begin with http:// or https:// and a host, such as "
                "http://head-node:8100"
            )
        check_bounds(self, "import_timeout_s", above=0)

    @property
    def host(self) -> str:
        """Address of `listen`; empty if it has none."""
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """Port of `listen`; -1 if it has none."""
        port = self.listen.rpartition(":")[2]
        return int(port) if port.isdecimal() and len(port) <= 5 else -1

    @property
    def rules(self) -> ClientRules:
        return ClientRules(
            honours_sampling=self.honours_sampling,
            announces_tools=self.announces_tools,
            refuses_long_replies=self.refuses_long_replies,
            models=self.models,
        )
