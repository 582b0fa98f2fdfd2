"""What a loss divides by: the length normalisations, of every loss that has them as a setting.

A loss sums over the tokens of a micro-batch and asks for a denominator; micro-batches, calls and ranks are
summed, and the optimizer step divides once. So each of these is that of the whole step, however it is cut.

Shape legend: T packed tokens of one micro-batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from losses.ops import masked_sum, token_shares
from losses.types import LossInputs, LossOutput

Normalization = Literal["token_mean", "sequence_mean", "constant", "none"]


@dataclass(kw_only=True, slots=True)
class NormalizedLoss(ABC):
    """Settings of losses that are sums over tokens. With l_t the loss of a token, n the valid tokens of its
    sequence, S the sequences and N the valid tokens of a step:

        token_mean       sum l_t / N              each token counts alike
        sequence_mean    sum (l_t / n) / S        each sequence counts alike, a token of a long one for less
        constant         sum l_t / (S c)          c = tokens_per_sequence, whatever the lengths turn out to be
        none             sum l_t

    A sequence without a valid token is one of the S and gives nothing.

    Raises:
        ValueError: when made or called, if `constant` has no `tokens_per_sequence` above 0, or another one
            has.
    """

    normalization: Normalization = "token_mean"
    """What the sum over tokens is divided by."""
    tokens_per_sequence: float | None = None
    """The c of `constant`, such as the most tokens of a completion; else None."""

    def __post_init__(self) -> None:
        length = self.tokens_per_sequence
        if self.normalization == "constant":
            if length is None or not 0.0 < length < float("inf"):
                raise ValueError(
                    f"tokens_per_sequence={length}: must be a finite number above 0 with normalization "
                    "'constant', such as the most tokens of a completion"
                )
        elif length is not None:
            raise ValueError(
                f"tokens_per_sequence={length} has no effect with normalization={self.normalization!r}: must "
                "be None, or normalization 'constant'"
            )

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> LossOutput:
        """As `losses.types.Loss`."""

    def shares(self, inputs: LossInputs, valid_T: Tensor) -> Tensor | None:
        """[T] what a token's loss is multiplied by before the sum; None: by 1."""
        return token_shares(valid_T, inputs=inputs) if self.normalization == "sequence_mean" else None

    def denominator(self, inputs: LossInputs, valid_T: Tensor) -> Tensor | None:
        """[] float32, of this micro-batch."""
        if self.normalization == "token_mean":
            return valid_T.sum().float()
        if self.normalization == "none":
            return None
        count = float(inputs.num_sequences)
        if self.normalization == "constant":
            assert self.tokens_per_sequence is not None
            count *= self.tokens_per_sequence
        return torch.full((), count, dtype=torch.float32, device=valid_T.device)


def shared_sum(values_T: Tensor, valid_T: Tensor, shares_T: Tensor | None) -> Tensor:
    """[] over valid tokens, each with its share; the others give exactly 0, to the gradient too."""
    return masked_sum(values_T if shares_T is None else values_T * shares_T, valid_T)
