"""Advantages of a batch (replaced when the losses are merged)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(kw_only=True, slots=True)
class Advantage:
    baseline: Literal["group_mean"] = "group_mean"
    credit: Literal["sequence", "token"] = "sequence"

    def __call__(self, rewards_PG: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
        out = []
        for group in rewards_PG:
            r = np.array([x.sum() for x in group])
            a = np.zeros(len(r)) if len(r) == 0 or np.ptp(r) == 0 else r - r.mean(dtype=np.float64)
            out.append([np.full(len(x), v, dtype=np.float32) for x, v in zip(group, a, strict=True)])
        return out
