"""Settings of the ledger."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rl.config.configurable import only_if
from rl.config.tree import check_bounds


@dataclass(kw_only=True, slots=True)
class LedgerConfig:
    """What a run records of its trained tokens, as proof of what was trained."""

    enable: bool = False
    """Write ledger/, which `python -m rl.ledger` checks."""
    share: float = field(default=1.0, metadata=only_if("enable", True))
    """Share of the groups whose tokens are recorded, chosen by the number of their problem. Below 1
    nothing is proved about the tokens of the others, nor that the trainer's sums are theirs."""
    max_gigabytes: float = field(default=16.0, metadata=only_if("enable", True))
    """Largest size; beyond it the oldest steps are removed, and the proof begins after them."""

    def __post_init__(self) -> None:
        check_bounds(self, "share", above=0, at_most=1)
        check_bounds(self, "max_gigabytes", above=0, below=math.inf)
