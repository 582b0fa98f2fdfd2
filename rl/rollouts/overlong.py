"""DAPO's soft overlong punishment: a completion that nearly ran out of tokens is worth less."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rl.config.effect import only_if

OVERLONG = "overlong"
"""The part of a score that a completion's length takes off."""


def overlong_punishment(num_tokens: int, *, max_tokens: int, cache_tokens: int) -> float:
    """Of a completion of `num_tokens`: 0 up to max_tokens - cache_tokens, then falling to -1 at max_tokens.

    Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (arXiv 2503.14476),
    equation 13, where cache_tokens is L_cache.

    Raises:
        ValueError: cache_tokens is not from 1 to max_tokens.
    """
    if not 1 <= cache_tokens <= max_tokens:
        raise ValueError(
            f"cache_tokens={cache_tokens}: must be from 1 to {max_tokens}, the most tokens of a completion"
        )
    over = num_tokens - (max_tokens - cache_tokens)
    return 0.0 - min(max(over / cache_tokens, 0.0), 1.0)


@dataclass(kw_only=True, slots=True)
class OverlongPunishment:
    """What is added to the reward of a long completion; nothing unless it is enabled.

    Raises:
        ValueError: when made or called, if a field is out of range; when called, if `buffer_tokens` is more
            than a completion may have.
    """

    enable: bool = False
    """Take something off the reward of completions that end within the buffer."""
    buffer_tokens: int | None = field(default=4096, metadata=only_if("enable", True))
    """The last tokens that a completion may have, over which the punishment grows: DAPO's L_cache; None: a
    quarter of what it may have."""
    penalty: float = field(default=1.0, metadata=only_if("enable", True))
    """What it grows to, in units of reward."""

    def __post_init__(self) -> None:
        if self.buffer_tokens is not None and self.buffer_tokens < 1:
            raise ValueError(f"buffer_tokens={self.buffer_tokens}: must be at least 1")
        if not 0 <= self.penalty < math.inf:
            raise ValueError(f"penalty={self.penalty}: must be a finite number of at least 0")

    def check(self, *, max_tokens: int) -> None:
        """Raise ValueError if the buffer is longer than a completion of at most `max_tokens`."""
        self.__post_init__()  # A field may have been edited since.
        if self.enable and self.buffer_tokens is not None and self.buffer_tokens > max_tokens:
            raise ValueError(
                f"buffer_tokens={self.buffer_tokens}: must be at most {max_tokens}, the most tokens of a "
                "completion"
            )

    def __call__(self, num_tokens: int, *, max_tokens: int) -> float:
        """To be added to the reward of a completion of `num_tokens`, of which it may have `max_tokens`."""
        self.check(max_tokens=max_tokens)
        if not self.enable:
            return 0.0
        buffer_tokens = max(1, max_tokens // 4) if self.buffer_tokens is None else self.buffer_tokens
        return self.penalty * overlong_punishment(
            num_tokens, max_tokens=max_tokens, cache_tokens=buffer_tokens
        )
