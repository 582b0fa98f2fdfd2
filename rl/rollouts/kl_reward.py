"""A penalty in the reward for moving away from the reference policy, token by token.

Shape legend: C tokens that the model produced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from losses.ops import KL_ESTIMATORS


@dataclass(kw_only=True, slots=True)
class KLReward:
    """Ouyang et al., "Training language models to follow instructions with human feedback"
    (arXiv:2203.02155), section 3.4, token by token: reward_t - coef k_t, of the generator's logprobs."""

    coef: float = 0.0
    """Weight of the penalty; above 0 it needs the reference policy (trainer.reference.enable)."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Of the KL divergence, see `losses.ops`."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.coef < float("inf"):
            raise ValueError(f"coef={self.coef}: must be a finite number of at least 0")

    def estimate(self, *, logprobs_C: np.ndarray, reference_logprobs_C: np.ndarray) -> np.ndarray:
        """[C] float64 nats."""
        kl_C = KL_ESTIMATORS[self.estimator](
            logprobs_T=torch.from_numpy(logprobs_C.astype(np.float64)),
            reference_logprobs_T=torch.from_numpy(reference_logprobs_C.astype(np.float64)),
        )
        return kl_C.numpy()
