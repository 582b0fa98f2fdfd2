"""Supervised learning: the negative log-likelihood of given tokens."""

from __future__ import annotations

from dataclasses import dataclass

from losses.ops import masked_sum
from losses.types import LossInputs, LossOutput


@dataclass(kw_only=True, slots=True)
class CrossEntropyLoss:
    """-p of every token under the mask, averaged over all of them in a step.

    Shannon's cross entropy of the data under the model; neither advantages nor the
    generator's logprobs enter.
    """

    def __call__(self, inputs: LossInputs) -> LossOutput:
        num_tokens = inputs.mask.sum().float()
        return LossOutput(
            loss_sum=-masked_sum(inputs.logprobs, inputs.mask),
            denominator=num_tokens,
            num_tokens=num_tokens,
        )
