"""Turns of an episode, planned and answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from rl.agents.endpoint.canonical import Digests
from rl.types import Message, Turn

Relation = Literal["", "rewritten", "system", "tools"]
"""What a conversation without a recorded beginning has changed of one with a beginning.

rewritten: its history; system, tools: its system message or its tools; "": it has nothing in common
with any.
"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedTurn:
    """A turn without its reply."""

    number: int
    """Place in the order of the requests."""
    parent: int | None
    """Number of the turn that it continues; None: it begins a conversation."""
    relation: Relation
    origin: int | None
    """Number of a turn of the conversation that `relation` speaks of."""
    messages: tuple[Message, ...]
    """Messages since the parent's reply, or the whole conversation."""
    prompt_ids: np.ndarray
    """[N] int32, these messages as tokens."""
    context_ids: np.ndarray
    """[T] int32, every token that the model reads."""
    digests: Digests
    num_recorded: int
    """Turns that were answered when it was planned."""
    has_tools: bool
    model: str
    """Model that the client asked for."""
    role: str = ""
    """Role of the conversation as the client named it; empty: it did not."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RecordedTurn:
    """A turn with its reply."""

    plan: PlannedTurn
    turn: Turn
