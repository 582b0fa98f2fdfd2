"""Inputs and outputs of every loss. Shape legend: T packed tokens of one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor  # a reward process, which imports this module, needs no torch


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """One packed micro-batch. Entry t of each tensor belongs to target token t."""

    logprobs: Tensor
    """[T] float32, nats: logprobs under the policy being trained; carries the gradient. Meaningless
    where neither `mask` nor `ratio_mask` is True."""
    generator_logprobs: Tensor
    """[T] float32, nats: logprobs recorded when the tokens were sampled; NaN for tokens that no
    generator sampled."""
    advantages: Tensor
    """[T] float32."""
    mask: Tensor
    """[T] bool, True where the loss applies. Padding is always False."""
    sequence_ids: Tensor
    """[T] int64 index of each token's sequence, 0 .. num_sequences - 1; padding holds
    num_sequences. A sequence is a whole episode, which may be several rows of tokens.
    """
    num_sequences: int
    reference_logprobs: Tensor | None = None
    """[T] float32, nats: logprobs under the frozen reference policy, without gradient."""
    proximal_logprobs: Tensor | None = None
    """[T] float32, nats: the trainer's logprobs before its first optimizer step on this data,
    without gradient; None stands for the current `logprobs`."""
    ratio_mask: Tensor | None = None
    """[T] bool, the tokens over which a sequence's ratio is averaged; None selects the trained
    tokens.
    """
    entropy: Tensor | None = None
    """[T] float32, nats: entropy of each token's distribution, with gradient; None unless the loss
    reads it.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """A sum over tokens and its denominator; the caller divides once per optimizer step."""

    loss_sum: Tensor
    """[] float32, summed over valid tokens; carries the gradient."""
    denominator: Tensor | None
    """[] float32, this micro-batch's part of the step's denominator; None leaves the sum undivided.
    """
    num_tokens: Tensor
    """[] float32, number of valid tokens: the weight of this micro-batch in averaged metrics."""
    metric_sums: Mapping[str, Tensor] = field(default_factory=dict)
    """[] float32 each, summed over valid tokens, without gradient. A step reports the means over
    its valid tokens as `loss/<name>` (`ratio` as `loss/ratio_mean`)."""


class Loss(Protocol):
    """A callable settings dataclass: pure, without modules, collectives or I/O.

    A micro-batch may hold no valid token, and on a rank that has run out of data no sequence. The
    sum, the denominator and every metric are then 0.

    Losses announce optional inputs by attributes or properties: `uses_reference`, `uses_proximal`
    and `uses_entropy`, all False by default.

    An attribute or property `sequence_setting` names the setting by which the loss reads sequences,
    such as "normalization='sequence_mean'", or is None for a loss that reads none: neither
    `sequence_ids` nor `num_sequences`. A loss without it counts as one that reads them.
    """

    def __call__(self, inputs: LossInputs) -> LossOutput: ...


def uses_proximal_logprobs(loss: Loss) -> bool:
    """Return whether the loss reads `proximal_logprobs`."""
    # Computed only for batches with several optimizer steps: in the first, p itself is p_prox.
    return bool(getattr(loss, "uses_proximal", False))


def uses_entropy(loss: Loss) -> bool:
    """Return whether the loss reads `entropy`."""
    # Entropy costs memory and time in the output head, so it is computed only if it is read.
    return bool(getattr(loss, "uses_entropy", False))


def get_sequence_setting(loss: Loss) -> str | None:
    """Return the setting by which the loss reads sequences; None if it reads none."""
    # Only a loss that says so may see the rows of an episode in several micro-batches.
    default = f"{type(loss).__name__} (it has no sequence_setting)"
    setting: str | None = getattr(loss, "sequence_setting", default)
    return setting
