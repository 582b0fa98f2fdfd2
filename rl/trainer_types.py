"""Settings and results of a trainer's calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimParams:
    """Settings of one optimizer step; None keeps the configured value."""

    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    momentum: float | None = None
    """Momentum of Muon; ignored by other optimizers."""
    max_norm: float | None = None
    """Gradient clip norm; `inf` measures and does not clip."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLoad:
    """Balance of a mixture of experts: 1 is even, the number of experts is the worst value."""

    busiest_mean: float
    """Tokens of the busiest expert divided by the mean over experts, averaged over the layers."""
    busiest_max: float
    """The same ratio in the layer where it is largest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Sizes of the micro-batches of a call, over all data-parallel ranks."""

    num_micro_batches: int
    """Micro-batches of each rank; the same number on all."""
    num_packed: int
    """Tokens that went through the model, without padding; a shared prompt counts once."""
    num_padding: int
    """Padding tokens that went through the model."""
    num_room: int
    """Capacity of the micro-batches in tokens, by max_tokens_per_microbatch."""
    num_attended: int = 0
    """Sum over packed tokens of the tokens attended to, the token itself included; 0 if not
    counted.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Bytes on the GPU of the rank that used most."""

    allocated: float
    """Peak of the tensors."""
    reserved: float
    """Peak of what PyTorch's allocator had taken from the GPU for them."""
    total: float
    """Memory of the GPU."""

    @classmethod
    def of_numbers(cls, numbers: Sequence[float]) -> DeviceMemory:
        allocated, reserved, total = numbers
        return cls(allocated=allocated, reserved=reserved, total=total)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainedTokens:
    """What the loss has read of a sample's tokens; NaN for tokens that it was not applied to.

    With K targets the arrays are [T, K].
    """

    logprobs: np.ndarray
    """[T] float32, nats, of the pass that computed the gradient."""
    advantages: np.ndarray
    """[T] float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBackwardResult:
    """Result of a `forward_backward` or `forward` call, over all ranks."""

    loss_sum: float
    """Sum of token losses, not yet divided."""
    denominator: float
    """Addition to the step's denominator; 0 for a loss that is a plain sum."""
    num_samples: int
    """Episodes: the rows of an episode are one sample."""
    num_tokens: int
    """Input tokens of all samples, without padding; a shared prompt counts for each sample."""
    num_valid_tokens: int
    """Tokens that the loss was summed over; with K targets the number of targets."""
    ratio_mean: float
    clipped_fraction: float
    entropy_mean: float
    """Nats a token."""
    logprob_diff_mean: float
    """Mean over valid tokens of |trainer logprob - generator logprob|, nats."""
    logprob_diff_max: float
    logprobs_identical: bool
    """True if both logprobs of every valid token are bit-identical."""
    num_trained_tokens: int = 0
    """Tokens of the samples' masks, over all micro-batches that the loss has read."""
    advantage_sum: float = 0.0
    """Sum of these tokens' advantages, as the loss has read them."""
    loss_metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the loss itself, averaged over valid tokens."""
    expert_load: ExpertLoad | None = None
    """Load of the experts; None for a model without experts and for `forward`."""
    packing: Packing | None = None
    """Packing of the micro-batches; None for a trainer that does not pack."""
    memory: DeviceMemory | None = field(default=None, compare=False)
    """Peak memory since the beginning of the latest optimizer step; None on a CPU."""
    logprobs: tuple[np.ndarray, ...] | None = field(default=None, compare=False)
    """[T] float32 nats of each requested sample, entry t for token t, entry 0 is 0; [T, K] with K
    targets. None if no logprobs were requested."""
    trained: tuple[TrainedTokens, ...] | None = field(default=None, compare=False)
    """Of each requested sample; None if none was requested."""

    @property
    def loss_mean(self) -> float:
        """The loss as optimised."""
        return self.loss_sum / self.denominator if self.denominator else self.loss_sum


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundingResult:
    """What rounding to bfloat16 did to the updates of an optimizer step, over all ranks."""

    rounded_away: float
    """Share of the weights with an update whose stored number stayed the same."""
    applied: float
    """Sum of the changes of the stored numbers, in the directions of their updates, over the sum of
    the updates: about 1 with stochastic rounding, about 0 if updates are lost for good."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimStepResult:
    """Result of an `optim_step` call, the same on every rank."""

    grad_norm: float
    """Gradient norm after the division by the denominator and before clipping."""
    lr: float
    policy_version: int
    """Version of the weights after this step; each step increments it."""
    rounding: RoundingResult | None = None
    """Effect of rounding; None for weights in float32."""
