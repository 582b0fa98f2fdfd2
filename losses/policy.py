"""What all policy losses have in common; the file of an algorithm has its surrogate and its own settings.

With p the logprob of the policy being trained, q the one recorded when the token was drawn, A its advantage
and m = mask and finite(q), an algorithm gives a token's surrogate J, which is to grow, made of A and a ratio

        r = exp(clamp(p - q, -20, 20))

or a sequence's. The loss of a token is then

        l = m (-J + kl_coef k - entropy_coef H)

where k estimates the KL divergence from the reference policy, see `losses.ops`, and H is the entropy of the
policy at that token. What the sum of l is divided by says `losses.normalization`.

With a `correction`, p_prox takes the place of q in the ratio, and J is multiplied by the weight w of p_prox
against q, see `losses.correction`: the decoupled objective of Hilton et al. (arXiv:2110.00641). Of masked
tokens (w = 0) KL and entropy are left out too; of others they are not weighted, except the KL with
`kl_importance_weighted`: then by w r, which without bounds is the whole ratio of p against q.

Shape legend: T packed tokens of one micro-batch.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from losses.correction import ImportanceCorrection
from losses.normalization import NormalizedLoss, shared_sum
from losses.ops import (
    KL_ESTIMATORS,
    MAX_LOG_RATIO,
    drawn_tokens,
    importance_ratios,
    masked_sum,
    over_sequences,
)
from losses.types import LossInputs, LossOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTokens:
    """The tokens of a micro-batch, as a surrogate sees them."""

    inputs: LossInputs
    valid: Tensor
    """[T] bool, m."""
    old_logprobs: Tensor
    """[T] nats, what p is compared with: q, or p_prox; anything where not valid."""

    @property
    def advantages(self) -> Tensor:
        """[T]"""
        return self.inputs.advantages

    @property
    def logprobs(self) -> Tensor:
        """[T] p with gradient; 0 without gradient where not valid."""
        return torch.where(self.valid, self.inputs.logprobs, 0.0)

    @property
    def log_ratios(self) -> Tensor:
        """[T] p - p_old; 0 without gradient where not valid."""
        return torch.where(self.valid, self.inputs.logprobs - self.old_logprobs, 0.0)

    def ratios(self) -> Tensor:
        """[T] r of each token."""
        return importance_ratios(
            logprobs_T=self.inputs.logprobs, old_logprobs_T=self.old_logprobs, valid_T=self.valid
        )

    def sequence_ratios(self) -> Tensor:
        """[T] each token's sequence's product of ratios; the log clamped to +-20."""
        log_ratios_T = over_sequences(self.log_ratios, self.valid, inputs=self.inputs, mean=False)
        return log_ratios_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

    def mean_ratios(self) -> Tensor:
        """[T] the geometric mean of the ratios of each token's sequence; the log clamped to +-20.

        Over the valid tokens, or with a `ratio_mask` those of it that were drawn; 1 where there is none, and
        where not valid.
        """
        inputs, counted_T = self.inputs, self.valid
        if inputs.ratio_mask is not None:
            counted_T = drawn_tokens(mask_T=inputs.ratio_mask, generator_logprobs_T=inputs.generator_logprobs)
        log_ratios_T = torch.where(counted_T, inputs.logprobs - self.old_logprobs, 0.0)
        means_T = over_sequences(log_ratios_T, counted_T, inputs=inputs, mean=True, to_T=self.valid)
        return means_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@dataclass(frozen=True, kw_only=True, slots=True)
class Surrogate:
    """What an algorithm makes of the tokens; where they are not valid, anything."""

    values: Tensor
    """[T] J."""
    ratios: Tensor
    """[T] with gradient: what `kl_importance_weighted` multiplies by, and the metric."""
    is_clipped: Tensor
    """[T] bool, where a bound took effect."""


@dataclass(kw_only=True, slots=True)
class PolicyLoss(NormalizedLoss):
    """Settings of every policy loss.

    Metrics: `ratio`, and `clipped_fraction`, the share of tokens where a bound took effect; with a reference
    policy also `kl`, k itself; with a correction also its metrics.

    Raises:
        ValueError: when made or called, if a setting is out of range, or what a setting needs is not there:
            logprobs of a reference policy with `kl_coef` above 0, the entropy with `entropy_coef` above 0; or
            as `NormalizedLoss` and `ImportanceCorrection`.
    """

    uses_reference: ClassVar[bool] = True

    kl_coef: float = 0.0
    """Weight of the KL term; above 0 it needs the reference policy (reference.enable)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """With d = p_ref - p: k1 is -d, k2 is d^2 / 2, k3 is exp(d) - 1 - d."""
    kl_importance_weighted: bool = False
    """Multiply the estimate by r, and by w where there is one: which makes the gradients of k1 and k3
    unbiased; alone, that of k1 is 0 on average."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, which keeps the policy from narrowing down."""
    correction: ImportanceCorrection | None = None
    """Weighs data that another policy than the trainer's drew; None: r alone compares p with q."""

    @property
    def uses_proximal(self) -> bool:
        """Whether `proximal_logprobs` are read."""
        return self.correction is not None

    @property
    def uses_entropy(self) -> bool:
        """Whether `entropy` is read."""
        return self.entropy_coef != 0.0

    def __post_init__(self) -> None:
        NormalizedLoss.__post_init__(self)
        for name in ("kl_coef", "entropy_coef"):
            value = getattr(self, name)
            if not 0.0 <= value < float("inf"):
                raise ValueError(f"{name}={value}: must be a finite number of at least 0")

    @abstractmethod
    def surrogate(self, tokens: PolicyTokens) -> Surrogate:
        """The algorithm: what is to grow, of each token."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        self.__post_init__()  # A field may have been edited since.
        valid_T = drawn_tokens(mask_T=inputs.mask, generator_logprobs_T=inputs.generator_logprobs)
        shares_T = self.shares(inputs, valid_T)
        corrected = None if self.correction is None else self.correction(inputs, valid_T)
        old_T = inputs.generator_logprobs if corrected is None else corrected.proximal_logprobs
        surrogate = self.surrogate(PolicyTokens(inputs=inputs, valid=valid_T, old_logprobs=old_T))
        values_T = surrogate.values if corrected is None else corrected.weights * surrogate.values
        loss_sum = -shared_sum(values_T, valid_T, shares_T)
        metric_sums = {
            "ratio": masked_sum(surrogate.ratios.detach(), valid_T),
            "clipped_fraction": (surrogate.is_clipped & valid_T).sum().float(),
        }
        counted_T = valid_T
        if corrected is not None:
            counted_T = valid_T & (corrected.weights != 0.0)
            metric_sums |= corrected.metric_sums
        kl_T = self._kl(inputs, surrogate.ratios, valid_T)
        if kl_T is not None:
            metric_sums["kl"] = masked_sum(kl_T.detach(), valid_T)
            if self.kl_coef:
                if corrected is not None and self.kl_importance_weighted:
                    kl_T = corrected.weights * kl_T
                loss_sum = loss_sum + self.kl_coef * shared_sum(kl_T, counted_T, shares_T)
        if self.entropy_coef:
            loss_sum = loss_sum - self.entropy_coef * shared_sum(_entropy(inputs), counted_T, shares_T)
        return LossOutput(
            loss_sum=loss_sum,
            denominator=self.denominator(inputs, valid_T),
            num_tokens=valid_T.sum().float(),
            metric_sums=metric_sums,
        )

    def _kl(self, inputs: LossInputs, ratios_T: Tensor, valid_T: Tensor) -> Tensor | None:
        """[T] nats, times the ratio where that is asked for; None without a reference policy."""
        if inputs.reference_logprobs is None:
            if self.kl_coef:
                raise ValueError(
                    f"kl_coef={self.kl_coef}: needs the logprobs of a reference policy: must be 0, or "
                    "reference.enable True, or the samples must bring their reference_logprobs"
                )
            return None
        # Where not valid both are 0, so that a NaN there reaches no gradient.
        logprobs_T = torch.where(valid_T, inputs.logprobs, 0.0)
        reference_T = torch.where(valid_T, inputs.reference_logprobs, 0.0)
        estimate = KL_ESTIMATORS[self.kl_estimator]
        kl_T = estimate(logprobs_T=logprobs_T, reference_logprobs_T=reference_T)
        return ratios_T * kl_T if self.kl_importance_weighted else kl_T


def _entropy(inputs: LossInputs) -> Tensor:
    """[T] nats, with gradient."""
    if inputs.entropy is None:
        raise ValueError(
            "entropy_coef is above 0, but LossInputs.entropy is None: whoever calls the loss must bring it, "
            "as the training engine does for a loss whose uses_entropy is True"
        )
    return inputs.entropy
