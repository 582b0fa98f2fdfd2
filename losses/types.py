"""What every loss takes and gives. Shape legend: T packed tokens of one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """One micro-batch, packed. Entry t of each tensor is about target token t."""

    logprobs: Tensor
    """[T] float32, nats, of the policy being trained; carries the gradient."""
    generator_logprobs: Tensor
    """[T] float32, nats, recorded when the token was drawn; NaN where nothing was drawn."""
    advantages: Tensor
    """[T] float32."""
    mask: Tensor
    """[T] bool, True where the loss applies. Padding is False here and nowhere else."""
    sequence_ids: Tensor
    """[T] int64, which sequence of the micro-batch a token belongs to: 0 .. num_sequences - 1;
    padding holds num_sequences."""
    num_sequences: int
    reference_logprobs: Tensor | None = None
    """[T] float32, nats, of the frozen reference policy, without gradient; None where there is none."""
    proximal_logprobs: Tensor | None = None
    """[T] float32, nats, of the trainer's policy before its first optimizer step on this data, without
    gradient; None: `logprobs` as they are now are those."""
    ratio_mask: Tensor | None = None
    """[T] bool, the tokens that a sequence's ratio is the mean over; None: those that the loss applies to."""
    entropy: Tensor | None = None
    """[T] float32, nats, of the distribution that each token is of, with gradient; None where the loss does
    not ask for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """A token sum and the denominator it asks for; the caller divides once for a whole step."""

    loss_sum: Tensor
    """[] float32, summed over valid tokens; carries the gradient."""
    denominator: Tensor | None
    """[] float32, what this micro-batch adds to the step's denominator (valid tokens,
    sequences, a constant for each); None asks for no division: the gradient of the plain sum."""
    num_tokens: Tensor
    """[] float32, valid tokens: those the sum was taken over, and what metrics are averaged over."""
    metric_sums: Mapping[str, Tensor] = field(default_factory=dict)
    """[] float32 each, summed over valid tokens, without gradient; a step reports their means over
    its valid tokens as `loss/<name>` (`ratio` as `loss/ratio_mean`)."""


class Loss(Protocol):
    """A settings dataclass that is callable: pure, no module, no collective, no I/O.

    A micro-batch may hold no valid token and, on a rank that has none left, no sequence:
    then the sum, the denominator and every metric are 0 and finite.

    One that reads `reference_logprobs` says so by a class attribute, `uses_reference = True`; one that reads
    `proximal_logprobs` by an attribute or a property `uses_proximal`, one that reads `entropy` by
    `uses_entropy`.
    """

    def __call__(self, inputs: LossInputs) -> LossOutput: ...


def uses_proximal_logprobs(loss: Loss) -> bool:
    """Whether `loss` needs the logprobs from before the first optimizer step on its data, where more than
    one step is taken on it."""
    return bool(getattr(loss, "uses_proximal", False))


def uses_entropy(loss: Loss) -> bool:
    """Whether `loss` needs the entropy with its gradient, which costs memory and time in the output head."""
    return bool(getattr(loss, "uses_entropy", False))
