"""Penalties on rewards: DAPO's soft overlong punishment, and the KL divergence from the reference policy.

Shape legend: C tokens of a completion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from losses.ops import KL_ESTIMATORS
from rl.config.configurable import only_if, unless
from rl.config.tree import check_bounds


@dataclass(kw_only=True, slots=True)
class OverlongPunishment:
    """Addition to the reward of a long completion; 0 unless enabled.

    Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (arXiv 2503.14476), equation 13.
    """

    enable: bool = False
    """Lower the reward of completions that end within the buffer."""
    buffer_tokens: int | None = field(default=4096, metadata=only_if("enable", True))
    """Last tokens of a completion's limit, over which the punishment grows: DAPO's L_cache. None: a quarter
    of the limit."""
    penalty: float = field(default=1.0, metadata=only_if("enable", True))
    """Largest punishment, in units of reward."""

    def __post_init__(self) -> None:
        check_bounds(self, "buffer_tokens", at_least=1)
        check_bounds(self, "penalty", at_least=0, below=math.inf)

    def check(self, *, max_tokens: int) -> None:
        """Raise ValueError if the buffer is longer than a completion of at most `max_tokens`."""
        if self.enable and self.buffer_tokens is not None and self.buffer_tokens > max_tokens:
            raise ValueError(f"buffer_tokens={self.buffer_tokens}: must be at most max_tokens={max_tokens}")

    def __call__(self, num_tokens: int, *, max_tokens: int) -> float:
        """Return 0 up to `max_tokens` less the buffer, then a value that falls to -`penalty` at `max_tokens`."""
        if not self.enable:
            return 0.0
        buffer_tokens = self.buffer_tokens or max(1, max_tokens // 4)
        share = (num_tokens - (max_tokens - buffer_tokens)) / buffer_tokens
        return self.penalty * (0.0 - min(max(share, 0.0), 1.0))


@dataclass(kw_only=True, slots=True)
class KLReward:
    """Penalty on the reward of each token: coef times `kl_penalty` of the generator's logprobs.

    Ouyang et al., "Training language models to follow instructions with human feedback" (arXiv 2203.02155),
    section 3.4, token by token.
    """

    coef: float = 0.0
    """Weight of the penalty; above 0 it needs the reference policy (trainer.reference.enable)."""
    estimator: Literal["k1", "k2", "k3"] = field(default="k1", metadata=unless("coef", 0.0))
    """Estimator of the KL divergence; k1 gives its gradient on average, k2 and k3 do not."""

    def __post_init__(self) -> None:
        check_bounds(self, "coef", at_least=0, below=math.inf)


def kl_penalty(
    logprobs_C: np.ndarray, reference_logprobs_C: np.ndarray, estimator: Literal["k1", "k2", "k3"] = "k1"
) -> np.ndarray:
    """Return [C] float64, an estimate of KL(policy || reference) at each token, see `losses.ops`.

    A reward has no gradient of its own, it only weights that of the policy: k1 then gives, on average, the
    gradient of the divergence, which it does not as a term of a loss; k2 and k3 do not (Tang and Munos, "On a
    few pitfalls in KL divergence gradient estimation for RL", arXiv 2506.09477).

    Args:
        logprobs_C: nats, of the policy that drew the tokens.
        reference_logprobs_C: nats, of the reference policy.

    Raises:
        ValueError: a logprob is not finite.
    """
    if not (np.isfinite(logprobs_C).all() and np.isfinite(reference_logprobs_C).all()):
        raise ValueError("logprobs must be finite for all tokens that the model produced")
    penalty_C: np.ndarray = KL_ESTIMATORS[estimator](
        logprobs_T=torch.from_numpy(logprobs_C.astype(np.float64)),
        reference_logprobs_T=torch.from_numpy(reference_logprobs_C.astype(np.float64)),
    ).numpy()
    return penalty_C
