"""What a run decides about the episodes of agents, and what it leaves to clients."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from rl.types import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeSettings:
    """What the run has decided about an episode."""

    sampling: SamplingParams
    """`max_tokens` is the most of one reply."""
    max_context: int
    """Most tokens of a conversation with its reply."""
    max_requests: int
    """Most replies, retries and requests without a reply not counted."""
    max_tokens: int
    """Most tokens of all turns."""
    key: str = field(default_factory=lambda: f"sk-relay-{secrets.token_urlsafe(24)}", repr=False)
    """Secret by which clients name the episode; never logged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientRules:
    """What clients may decide."""

    honours_sampling: bool = False
    """Sample as the client asks; otherwise it is only recorded."""
    announces_tools: bool = True
    """Tell the model which tools a client offers."""
    refuses_long_replies: bool = False
    """Refuse a request for more tokens than are left instead of giving it what is left."""
    models: tuple[str, ...] = ()
    """Model names that are accepted; empty: any."""
    name: str = "policy"
    """Name of the model in replies to a client that names none."""
