"""Collaborators that the calls of the service share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rl.tinker.backend import TinkerBackend
from rl.tinker.service.futures import Background, Futures
from rl.tinker.service.sessions import Sessions
from rl.tinker.service.storage import Storage
from rl.tinker.types import Limits


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Collaborators of the calls about training, sampling and checkpoints.

    The parts do not know this class: each gets what it needs of the others one by one.
    """

    backend: TinkerBackend
    storage: Storage
    sessions: Sessions
    futures: Futures
    limits: Limits
    wall_time_s: Callable[[], float]
    """Unix time, by which checkpoints are stamped and expire."""
    background: Background = field(default_factory=Background)
