"""The clipped policy gradient of GRPO, against the logprobs recorded by the generator.

Shape legend: T packed tokens of one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from losses.correction import CorrectedTokens, ImportanceCorrection
from losses.ops import KL_ESTIMATORS, drawn_tokens, importance_ratios, masked_sum
from losses.types import LossInputs, LossOutput


@dataclass(kw_only=True, slots=True)
class GRPOLoss:
    """Group-relative policy optimisation, averaged over all valid tokens of a step.

    Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language
    Models" (arXiv:2402.03300), equation 3; its KL term is off by default. The surrogate is equation 7 of
    Schulman et al., "Proximal Policy Optimization Algorithms" (arXiv:1707.06347). Two bounds
    as in DAPO (arXiv:2503.14476, equation 8), which also averages over tokens.

    With p the logprob of the policy being trained, q the one recorded when the token was
    drawn, A its advantage and m = mask and finite(q):

        r = exp(clamp(p - q, -20, 20))
        token loss = -m min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + m kl_coef k

    where k estimates the KL divergence from the reference policy, see `losses.ops`.

    With a `correction`, r = exp(clamp(p - p_prox, -20, 20)) and min(...) is multiplied by the weight w of
    p_prox against q, see `losses.correction`: the decoupled clipped objective of Hilton et al.
    (arXiv:2110.00641). Of masked tokens (w = 0) the KL term is left out too; of others it is not weighted,
    unless `kl_importance_weighted`: then by w r, which without bounds is the whole ratio of p against q.

    It asks for the number of valid tokens as denominator, masked ones too. Metrics: `ratio`, r itself, and
    `clipped_fraction`, 1 where the clipped branch is the smaller one, which stops the gradient; with a
    reference policy also `kl`, k itself; with a correction also its metrics.

    Raises:
        ValueError: when made or called, if a bound is negative or `clip_low` is above 1, or `kl_coef` is
            negative, or above 0 and there are no logprobs of a reference policy; or as
            `ImportanceCorrection`.
    """

    uses_reference: ClassVar[bool] = True

    clip_low: float = 0.2
    """The ratio stops paying below 1 - clip_low, for negative advantages."""
    clip_high: float = 0.2
    """The ratio stops paying above 1 + clip_high, for positive advantages."""
    kl_coef: float = 0.0
    """Weight of the KL term; above 0 it needs the reference policy (reference.enable)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """With d = p_ref - p: k1 is -d, k2 is d^2 / 2, k3 is exp(d) - 1 - d."""
    kl_importance_weighted: bool = False
    """Multiply the estimate by r, and by w where there is one: which makes the gradients of k1 and k3
    unbiased; alone, that of k1 is 0 on average."""
    correction: ImportanceCorrection | None = None
    """Weighs data that another policy than the trainer's drew; None: r alone compares p with q."""

    @property
    def uses_proximal(self) -> bool:
        """Whether `proximal_logprobs` are read."""
        return self.correction is not None

    def __post_init__(self) -> None:
        if not 0.0 <= self.clip_low <= 1.0:
            raise ValueError(f"clip_low={self.clip_low}: must be between 0 and 1")
        if not self.clip_high >= 0.0:
            raise ValueError(f"clip_high={self.clip_high}: must be at least 0")
        if not 0.0 <= self.kl_coef < float("inf"):
            raise ValueError(f"kl_coef={self.kl_coef}: must be a finite number of at least 0")

    def __call__(self, inputs: LossInputs) -> LossOutput:
        self.__post_init__()  # A field may have been edited since.
        valid_T = drawn_tokens(mask_T=inputs.mask, generator_logprobs_T=inputs.generator_logprobs)
        corrected = None if self.correction is None else self.correction(inputs, valid_T)
        ratios_T = importance_ratios(
            logprobs_T=inputs.logprobs,
            old_logprobs_T=inputs.generator_logprobs if corrected is None else corrected.proximal_logprobs,
            valid_T=valid_T,
        )
        plain_T = ratios_T * inputs.advantages
        clipped_T = ratios_T.clamp(1.0 - self.clip_low, 1.0 + self.clip_high) * inputs.advantages
        surrogate_T = torch.minimum(plain_T, clipped_T)
        if corrected is not None:
            surrogate_T = corrected.weights * surrogate_T
        loss_sum = -masked_sum(surrogate_T, valid_T)
        metric_sums = _metrics(ratios_T.detach(), clipped_T < plain_T, valid_T)
        if corrected is not None:
            metric_sums |= corrected.metric_sums
        kl_T = self._kl(inputs, ratios_T, valid_T)
        if kl_T is not None:
            metric_sums["kl"] = masked_sum(kl_T.detach(), valid_T)
            if self.kl_coef:
                loss_sum = loss_sum + self.kl_coef * self._kl_sum(kl_T, corrected, valid_T)
        num_tokens = valid_T.sum().float()
        return LossOutput(
            loss_sum=loss_sum, denominator=num_tokens, num_tokens=num_tokens, metric_sums=metric_sums
        )

    def _kl(self, inputs: LossInputs, ratios_T: Tensor, valid_T: Tensor) -> Tensor | None:
        """[T] nats; None without a reference policy."""
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

    def _kl_sum(self, kl_T: Tensor, corrected: CorrectedTokens | None, valid_T: Tensor) -> Tensor:
        """[] over the tokens that a correction does not mask."""
        if corrected is None:
            return masked_sum(kl_T, valid_T)
        if self.kl_importance_weighted:
            kl_T = corrected.weights * kl_T
        return masked_sum(kl_T, valid_T & (corrected.weights != 0.0))


def _metrics(ratios_T: Tensor, is_clipped_T: Tensor, valid_T: Tensor) -> dict[str, Tensor]:
    return {
        "ratio": masked_sum(ratios_T, valid_T),
        "clipped_fraction": (is_clipped_T & valid_T).sum().float(),
    }
