"""Settings of the endpoint of agents."""

from __future__ import annotations

from dataclasses import dataclass

from rl.agents.settings import ClientRules
from rl.config.configurable import Configurable
from rl.config.tree import check_bounds
from rl.types import BranchRole


@dataclass(kw_only=True, slots=True)
class EndpointConfig(Configurable.Config):
    """Where the endpoint listens, how many agents run, and what clients may decide."""

    max_running: int = 64
    """Most agents at the same time."""
    host: str = "127.0.0.1"
    """Address to listen on: loopback for agents that this run starts. Another one lets agents
    in from outside, by plain HTTP, each with the key of its episode."""
    port: int = 0
    """Port to listen on; 0 takes a free one."""
    trained_roles: tuple[BranchRole, ...] = ("main", "sub-agent")
    """Roles of the conversations that are trained on; others are only recorded."""
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
        check_bounds(self, "max_running", "max_body_mib", at_least=1)
        check_bounds(self, "port", at_least=0, at_most=65_535)
        check_bounds(self, "import_timeout_s", above=0)

    @property
    def rules(self) -> ClientRules:
        return ClientRules(
            honours_sampling=self.honours_sampling,
            announces_tools=self.announces_tools,
            refuses_long_replies=self.refuses_long_replies,
            models=self.models,
        )
