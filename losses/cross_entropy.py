"""Supervised learning: the negative log-likelihood of given tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from losses.normalization import NormalizedLoss, shared_sum
from losses.types import LossInputs, LossOutput


@dataclass(kw_only=True, slots=True)
class CrossEntropyLoss(NormalizedLoss):
    """-w p of every token under the mask, averaged over all of them in a step.

    Shannon's cross entropy of the data under the model, where w is 1; the generator's logprobs do not enter.
    With `weights` "advantages" w is what the samples hold there, of any sign, such as the gradient of a loss
    with respect to p that somebody else computed. Weights do not change the denominator.
    """

    weights: Literal["one", "advantages"] = "one"
    """What a token's logprob is multiplied by."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        self.__post_init__()  # A field may have been edited since.
        shares_T = self.shares(inputs, inputs.mask)
        values_T = inputs.logprobs
        if self.weights == "advantages":
            # 0 where not valid, so that a NaN there reaches no gradient.
            values_T = values_T * torch.where(inputs.mask, inputs.advantages, 0.0)
        return LossOutput(
            loss_sum=-shared_sum(values_T, inputs.mask, shares_T),
            denominator=self.denominator(inputs, inputs.mask),
            num_tokens=inputs.mask.sum().float(),
        )
