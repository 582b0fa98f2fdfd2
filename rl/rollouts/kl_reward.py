"""The KL divergence from the reference policy as something to take off a reward, token by token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from losses.ops import KL_ESTIMATORS
from rl.config.effect import unless


def kl_penalty(
    logprobs_C: np.ndarray, reference_logprobs_C: np.ndarray, estimator: Literal["k1", "k2", "k3"] = "k1"
) -> np.ndarray:
    """[C] float64, an estimate of KL(policy || reference) at each token, see `losses.ops`.

    A reward has no gradient of its own, only weighs that of the policy: k1 then gives, on average, the
    gradient of the divergence, which as a term of a loss it does not; k2 and k3 do not (Tang and Munos, "On a
    few pitfalls in KL divergence gradient estimation for RL", arXiv 2506.09477).

    Args:
        logprobs_C: nats, of the policy that drew the tokens.
        reference_logprobs_C: nats, of the reference policy.

    Raises:
        ValueError: for shapes that differ, an unknown estimator, or a logprob that is not finite.
    """
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"estimator={estimator!r}: must be one of {', '.join(KL_ESTIMATORS)}")
    if logprobs_C.shape != reference_logprobs_C.shape:
        raise ValueError(
            f"{logprobs_C.shape} logprobs of the policy for {reference_logprobs_C.shape} of the reference "
            "policy: must be the same tokens"
        )
    for name, values_C in (("logprobs", logprobs_C), ("reference_logprobs", reference_logprobs_C)):
        if not np.isfinite(values_C).all():
            raise ValueError(f"{name} must be finite: those of tokens that the model produced")
    estimate = KL_ESTIMATORS[estimator]
    penalty_C: np.ndarray = estimate(
        logprobs_T=torch.from_numpy(logprobs_C.astype(np.float64)),
        reference_logprobs_T=torch.from_numpy(reference_logprobs_C.astype(np.float64)),
    ).numpy()
    return penalty_C


@dataclass(kw_only=True, slots=True)
class KLReward:
    """What is taken off the reward of each token: coef times `kl_penalty`, of the generator's logprobs.

    Ouyang et al., "Training language models to follow instructions with human feedback" (arXiv 2203.02155),
    section 3.4, token by token.
    """

    coef: float = 0.0
    """Weight of the penalty; above 0 it needs the reference policy (trainer.reference.enable)."""
    estimator: Literal["k1", "k2", "k3"] = field(default="k1", metadata=unless("coef", 0.0))
    """Of the KL divergence; k1 gives its gradient on average, k2 and k3 do not."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.coef < float("inf"):
            raise ValueError(f"coef={self.coef}: must be a finite number of at least 0")
