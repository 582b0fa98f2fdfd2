"""The policy gradient of data that another policy drew, without bounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from losses.policy import PolicyLoss, PolicyTokens, Surrogate


@dataclass(kw_only=True, slots=True)
class ImportanceSamplingLoss(PolicyLoss):
    """J = r A.

    The surrogate of conservative policy iteration, Kakade and Langford (2002), as in Schulman et al.
    (arXiv:1707.06347), equation 6. On policy its gradient is that of REINFORCE. Nothing bounds r but the
    clamp of its log; a `correction` bounds what the data's age adds to it.
    """

    def surrogate(self, tokens: PolicyTokens) -> Surrogate:
        ratios_T = tokens.ratios()
        return Surrogate(
            values=ratios_T * tokens.advantages,
            ratios=ratios_T,
            is_clipped=torch.zeros_like(tokens.valid),
        )
