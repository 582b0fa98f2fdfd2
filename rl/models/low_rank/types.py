"""Adapters of a sampler, of which each row of a batch has its own: what all kinds of them share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from rl.models.low_rank.layer import Factors

NONE = -1
"""Version of rows without an adapter."""
HEAD = "lm_head"
"""Name of the output head, whose product is added to the rows that a caller has selected."""


class Bank(Protocol):
    """Adapters by version: `AdapterBank`, or `PlainBank` for devices without its kernel."""

    @property
    def versions(self) -> Mapping[int, object]: ...

    def has(self, layer: str) -> bool: ...

    def count_bytes(self, factors: Mapping[str, Factors]) -> int: ...

    def load(self, version: int, factors: Mapping[str, Factors]) -> None: ...

    def drop(self, version: int) -> None: ...

    def begin(self, versions_T: np.ndarray) -> None: ...

    def add_to_rows(
        self, name: str, x_TI: Tensor, out_TO: Tensor, versions_T: np.ndarray
    ) -> None: ...
