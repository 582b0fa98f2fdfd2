"""Direct reward optimisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from losses.policy import PolicyLoss, PolicyTokens, Surrogate


@dataclass(kw_only=True, slots=True)
class DROLoss(PolicyLoss):
    """J = A p - beta / 2 (p - q)^2.

    Richemond et al., "Offline Regularised Reinforcement Learning for Large Language Models Alignment"
    (arXiv:2405.19107): the mean squared error of its policy loss, (R - V - beta (p - q))^2 / (2 beta), less
    what does not depend on p; with A for R - V, by token, and the generator as the policy not to leave. The
    maximum is p = q + A / beta. It takes data as it was drawn: a `correction` is refused.
    """

    beta: float = 0.05
    """Weight of the square that holds p near q."""

    def __post_init__(self) -> None:
        PolicyLoss.__post_init__(self)
        if not 0.0 <= self.beta < float("inf"):
            raise ValueError(f"beta={self.beta}: must be a finite number of at least 0")
        if self.correction is not None:
            raise ValueError(
                "correction: must be None with DRO, which has no ratio to correct: it is a regression over "
                "the data as it was drawn, and its square compares p with the generator's q"
            )

    def surrogate(self, tokens: PolicyTokens) -> Surrogate:
        square_T = tokens.log_ratios.square()
        return Surrogate(
            values=tokens.logprobs * tokens.advantages - 0.5 * self.beta * square_T,
            ratios=tokens.ratios(),
            is_clipped=torch.zeros_like(tokens.valid),
        )
