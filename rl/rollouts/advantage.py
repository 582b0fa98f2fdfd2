"""Advantages of a group: G completions of one prompt."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(kw_only=True, slots=True)
class GroupAdvantage:
    """Reward minus the group's mean, as in GRPO (arXiv 2402.03300, eq. 2) without the division,
    which Dr. GRPO (arXiv 2503.20783, section 3) shows to weigh easy and hard prompts more."""

    normalization: Literal["mean", "mean_std"] = "mean"
    """`mean_std` divides by the group's standard deviation as well."""
    eps: float = 1e-6
    """Added to the standard deviation."""

    def __post_init__(self) -> None:
        if not 0 <= self.eps < math.inf:
            raise ValueError(f"eps={self.eps}: must be at least 0 and finite")

    def __call__(self, rewards_G: np.ndarray) -> np.ndarray:
        """[G] float32. A group of equal rewards gives exact zeros."""
        centered_G = rewards_G.astype(np.float64) - rewards_G.mean(dtype=np.float64)
        if np.ptp(rewards_G) == 0:
            return np.zeros(len(rewards_G), dtype=np.float32)
        if self.normalization == "mean_std":
            # Bessel-corrected, as in the reference implementations.
            centered_G /= rewards_G.astype(np.float64).std(ddof=1) + self.eps
        return centered_G.astype(np.float32)
