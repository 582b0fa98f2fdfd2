"""Supervised learning: negative log-likelihood of given tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from losses.ops import NormalizedLoss, masked_sum
from losses.types import LossInputs, LossOutput


@dataclass(kw_only=True, slots=True)
class CrossEntropyLoss(NormalizedLoss):
    """-w p for every token under the mask, by default averaged over all of them in a step.

    With w = 1 this is Shannon's cross entropy of the data under the model. With `weights`
    "advantages" w is the sample's advantage, of any sign: for example the gradient of a loss with
    respect to p that a caller computed elsewhere. The generator's logprobs are not read, and
    weights do not change the denominator.
    """

    weights: Literal["one", "advantages"] = "one"
    """Factor of each token's logprob."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        values_T = inputs.logprobs
        if self.weights == "advantages":
            # Masked before the product, so that a NaN outside the mask reaches no gradient.
            values_T = values_T * torch.where(inputs.mask, inputs.advantages, 0.0)
        return LossOutput(
            loss_sum=-masked_sum(values_T, inputs.mask, shares_T=self.shares(inputs, inputs.mask)),
            denominator=self.denominator(inputs, inputs.mask),
            num_tokens=inputs.mask.sum().float(),
        )
