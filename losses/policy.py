"""Policy-gradient losses: PPO, GRPO, Dr. GRPO, DAPO, CISPO, GSPO, RLOO, REINFORCE++, importance
sampling, DRO.

With p the logprob under the policy being trained, q the logprob recorded when the token was
sampled, A the advantage and m = mask and finite(q), each algorithm defines a token's surrogate J,
to be maximised, from A and the token's ratio

        r = exp(clamp(p - q, -20, 20))

or a ratio of its sequence. The loss of a token is

        l = m (-J + kl_coef k - entropy_coef H)

where k estimates the KL divergence from the reference policy (`losses.ops`) and H is the entropy of
the policy at that token. `losses.ops.NormalizedLoss` defines the divisor of the sum of l.

With a `correction` p_prox replaces q in the ratio, and J is multiplied by the weight w of p_prox
against q (`losses.correction`): the decoupled objective of Hilton et al. (arXiv:2110.00641). Masked
tokens (w = 0) also lose their KL and entropy terms. Those terms are not weighted otherwise, except
the KL with `kl_importance_weighted`: by w r, which without bounds is the whole ratio of p against
q.

Shape legend: T packed tokens of one micro-batch.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from losses.correction import ImportanceCorrection
from losses.ops import (
    KL_ESTIMATORS,
    Normalization,
    NormalizedLoss,
    bounded_exp,
    drawn_tokens,
    masked_sum,
    name_sequence_normalization,
    over_sequences,
)
from losses.types import LossInputs, LossOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTokens:
    """Tokens of a micro-batch, prepared for a surrogate."""

    inputs: LossInputs
    valid: Tensor
    """[T] bool, m."""
    old_logprobs: Tensor
    """[T] nats, q or p_prox: the denominator of the ratio; arbitrary for invalid tokens."""

    @property
    def logprobs(self) -> Tensor:
        """[T] p with gradient; 0 without gradient for invalid tokens."""
        return torch.where(self.valid, self.inputs.logprobs, 0.0)

    @property
    def log_ratios(self) -> Tensor:
        """[T] p - p_old; 0 without gradient for invalid tokens."""
        return torch.where(self.valid, self.inputs.logprobs - self.old_logprobs, 0.0)

    def ratios(self) -> Tensor:
        """Return r of each token, [T]; 1 without gradient for invalid tokens."""
        # Invalid entries are replaced before the exponential: a NaN there would reach the gradient
        # as 0 * NaN.
        return bounded_exp(self.log_ratios)

    def mean_ratios(self) -> Tensor:
        """Return the geometric mean of the ratios of each token's sequence, [T].

        Its log is clamped to +-20. The mean runs over the valid tokens or, with a `ratio_mask`,
        over the sampled tokens under that mask. It is 1 for sequences without such tokens and for
        invalid tokens.
        """
        inputs, counted_T = self.inputs, self.valid
        if inputs.ratio_mask is not None:
            counted_T = drawn_tokens(
                mask_T=inputs.ratio_mask, generator_logprobs_T=inputs.generator_logprobs
            )
        log_ratios_T = torch.where(counted_T, inputs.logprobs - self.old_logprobs, 0.0)
        # All valid tokens receive the mean, also those outside the `ratio_mask`.
        means_T = over_sequences(log_ratios_T, counted_T, inputs=inputs, mean=True, to_T=self.valid)
        return bounded_exp(means_T)


@dataclass(frozen=True, kw_only=True, slots=True)
class Surrogate:
    """Objective of each token; arbitrary for invalid tokens."""

    values: Tensor
    """[T] J."""
    ratios: Tensor
    """[T] ratio with gradient: a metric, and the factor of `kl_importance_weighted`."""
    is_clipped: Tensor | None = None
    """[T] bool, tokens at which a bound took effect; None if there are no bounds."""


@dataclass(kw_only=True, slots=True)
class PolicyLoss(NormalizedLoss):
    """Base of all policy losses: everything around the surrogate.

    Metrics: `ratio`, and `clipped_fraction`, the share of tokens at which a bound took effect; `kl`
    with a reference policy; the correction's metrics with a correction.

    Raises:
        ValueError: if a setting is out of range; when called, if `kl_coef` or `entropy_coef` is
            above 0 and the inputs hold no reference logprobs or no entropy.
    """

    uses_reference: ClassVar[bool] = True

    kl_coef: float = 0.0
    """Weight of the KL term; above 0 it needs the reference policy (reference.enable)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """KL estimator; with d = p_ref - p: k1 is -d, k2 is d^2 / 2, k3 is exp(d) - 1 - d."""
    kl_importance_weighted: bool = False
    """Multiply the estimate by r, and by w with a correction, which makes the gradients of k1 and
    k3 unbiased. Without it the gradient of k1 is 0 on average."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, which keeps the policy from narrowing down."""
    correction: ImportanceCorrection | None = None
    """Weighting of data that another policy sampled; None leaves the comparison of p with q to r
    alone.
    """

    @property
    def uses_proximal(self) -> bool:
        return self.correction is not None

    @property
    def uses_entropy(self) -> bool:
        return self.entropy_coef != 0.0

    @property
    def sequence_setting(self) -> str | None:
        if self.correction is not None and self.correction.level != "token":
            return f"correction.level={self.correction.level!r}"
        return name_sequence_normalization(self.normalization)

    def __post_init__(self) -> None:
        NormalizedLoss.__post_init__(self)
        for name in ("kl_coef", "entropy_coef"):
            value = getattr(self, name)
            if not 0.0 <= value < float("inf"):
                raise ValueError(f"{name}={value}: must be a finite number of at least 0")

    @abstractmethod
    def surrogate(self, tokens: PolicyTokens) -> Surrogate:
        """Compute the objective of each token."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        valid_T = drawn_tokens(mask_T=inputs.mask, generator_logprobs_T=inputs.generator_logprobs)
        shares_T = self.shares(inputs, valid_T)

        # With a correction the ratio compares p with p_prox, and the weights p_prox with q.
        corrected = None if self.correction is None else self.correction(inputs, valid_T)
        old_T = inputs.generator_logprobs if corrected is None else corrected.proximal_logprobs
        surrogate = self.surrogate(PolicyTokens(inputs=inputs, valid=valid_T, old_logprobs=old_T))
        values_T = surrogate.values if corrected is None else corrected.weights * surrogate.values
        loss_sum = -masked_sum(values_T, valid_T, shares_T=shares_T)

        # A loss without bounds reports 0, so that all policy losses have the same metrics.
        is_clipped_T = surrogate.is_clipped
        if is_clipped_T is None:
            is_clipped_T = torch.zeros_like(valid_T)
        metric_sums = {
            "ratio": masked_sum(surrogate.ratios.detach(), valid_T),
            "clipped_fraction": (is_clipped_T & valid_T).sum().float(),
        }

        # A token that the correction masks trains nothing, so its KL and entropy do not count.
        counted_T = valid_T
        if corrected is not None:
            counted_T = valid_T & (corrected.weights != 0.0)
            metric_sums |= corrected.metric_sums

        # With a reference policy the KL is measured, even where it has no weight in the loss.
        kl_T = self._estimate_kl(inputs, surrogate.ratios, valid_T)
        if kl_T is not None:
            metric_sums["kl"] = masked_sum(kl_T.detach(), valid_T)
            if self.kl_coef:
                if corrected is not None and self.kl_importance_weighted:
                    kl_T = corrected.weights * kl_T
                loss_sum = loss_sum + self.kl_coef * masked_sum(kl_T, counted_T, shares_T=shares_T)

        if self.entropy_coef:
            if inputs.entropy is None:
                raise ValueError(
                    f"entropy_coef={self.entropy_coef}: needs the inputs' entropy, which is None"
                )
            loss_sum = loss_sum - self.entropy_coef * masked_sum(
                inputs.entropy, counted_T, shares_T=shares_T
            )

        # Valid tokens, with masked ones among them: masking does not enlarge the other steps.
        return LossOutput(
            loss_sum=loss_sum,
            denominator=self.denominator(inputs, valid_T),
            num_tokens=valid_T.sum().float(),
            metric_sums=metric_sums,
        )

    def _estimate_kl(self, inputs: LossInputs, ratios_T: Tensor, valid_T: Tensor) -> Tensor | None:
        """Return the KL estimate, [T] nats, times the ratio if configured; None if no reference."""
        if inputs.reference_logprobs is None:
            if self.kl_coef:
                raise ValueError(
                    f"kl_coef={self.kl_coef}: needs the logprobs of a reference policy "
                    "(reference.enable)"
                )
            return None
        # Both are masked before the estimate, so that a NaN in an invalid token reaches no
        # gradient.
        kl_T = KL_ESTIMATORS[self.kl_estimator](
            logprobs_T=torch.where(valid_T, inputs.logprobs, 0.0),
            reference_logprobs_T=torch.where(valid_T, inputs.reference_logprobs, 0.0),
        )
        return ratios_T * kl_T if self.kl_importance_weighted else kl_T


@dataclass(kw_only=True, slots=True)
class PPOLoss(PolicyLoss):
    """J = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    Schulman et al., "Proximal Policy Optimization Algorithms" (arXiv:1707.06347), equation 7. There
    is no critic: the samples bring their advantages.
    """

    clip_low: float = 0.2
    """Distance of the lower bound from 1; below 1 - clip_low tokens with negative advantage get no
    gradient.
    """
    clip_high: float = 0.2
    """Distance of the upper bound from 1; above 1 + clip_high tokens with positive advantage get no
    gradient.
    """

    def __post_init__(self) -> None:
        PolicyLoss.__post_init__(self)
        if not 0.0 <= self.clip_low <= 1.0:
            raise ValueError(f"clip_low={self.clip_low}: must be between 0 and 1")
        if not self.clip_high >= 0.0:
            raise ValueError(f"clip_high={self.clip_high}: must be at least 0")

    def ratios(self, tokens: PolicyTokens) -> Tensor:
        """Return the ratios to clip, [T]; 1 for invalid tokens."""
        return tokens.ratios()

    def clip(self, ratios_T: Tensor) -> Tensor:
        """Return the ratios within the bounds, [T]."""
        return ratios_T.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)

    def surrogate(self, tokens: PolicyTokens) -> Surrogate:
        # The minimum is pessimistic: a bound takes effect only where crossing it would help J, and
        # never keeps a token from returning within the bounds.
        ratios_T = self.ratios(tokens)
        plain_T = ratios_T * tokens.inputs.advantages
        clipped_T = self.clip(ratios_T) * tokens.inputs.advantages
        return Surrogate(
            values=torch.minimum(plain_T, clipped_T),
            ratios=ratios_T,
            is_clipped=clipped_T < plain_T,
        )


@dataclass(kw_only=True, slots=True)
class GRPOLoss(PPOLoss):
    """PPO's surrogate with advantages relative to a group, averaged over all valid tokens of a
    step.

    With the defaults, for the N tokens of a step that are in the mask and were sampled:

        loss = sum over tokens of  -min(r A, clip(r, 0.8, 1.2) A)  /  N

    where r = exp(p - q), p is the logprob under the policy being trained, q the logprob recorded
    when the token was sampled, and A the advantage of its rollout. `PPOLoss.surrogate` has the
    minimum, `PolicyLoss.__call__` the sum, `NormalizedLoss.denominator` this micro-batch's part of
    N; the trainer divides once, when all micro-batches and ranks of the step have added theirs.

    Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language
    Models" (arXiv:2402.03300), equation 3. The paper averages by sequence (`normalization`
    "sequence_mean") and has `kl_coef` 0.04 with k3; the defaults here are DAPO's token mean and no
    KL term.
    """


@dataclass(kw_only=True, slots=True)
class DrGRPOLoss(PPOLoss):
    """PPO's surrogate, divided by the number of sequences times `tokens_per_sequence`.

    Liu et al., "Understanding R1-Zero-Like Training: A Critical Perspective" (arXiv:2503.20783),
    section 3.2: a mean over each sequence's own tokens makes long wrong answers cheap, so the sum
    is divided by a constant, the generation budget. The other half of the method, no division by
    the standard deviation, is part of the advantage.
    """

    normalization: Normalization = "constant"
    """Divisor of the sum over tokens."""


@dataclass(kw_only=True, slots=True)
class DAPOLoss(PPOLoss):
    """PPO's surrogate with a higher upper bound, averaged over all valid tokens of a step.

    Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (arXiv:2503.14476),
    equation 8: the bounds are its section 3.1, the token mean its section 3.3. The other two parts
    are dynamic sampling (the loop drops groups with equal rewards) and the soft overlong punishment
    (`rl.rollouts.advantage`).
    """

    clip_high: float = 0.28
    """Distance of the upper bound from 1; above 1 + clip_high tokens with positive advantage get no
    gradient.
    """


@dataclass(kw_only=True, slots=True)
class CISPOLoss(PPOLoss):
    """J = sg(clip(r, 1 - clip_low, 1 + clip_high)) A p, with sg the stop-gradient.

    MiniMax, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention"
    (arXiv:2506.13585), equations 4 and 5. A token with a ratio out of bounds keeps its gradient,
    weighted by the bound; in PPO it loses its gradient.
    """

    clip_low: float = 1.0
    """Distance of the lower bound from 1; 1 for none, as in the paper."""
    clip_high: float = 3.0
    """Distance of the upper bound from 1."""

    def surrogate(self, tokens: PolicyTokens) -> Surrogate:
        # The gradient comes from the logprob alone; the clipped ratio is its constant weight.
        ratios_T = self.ratios(tokens)
        weights_T = self.clip(ratios_T).detach()
        return Surrogate(
            values=weights_T * tokens.inputs.advantages * tokens.logprobs,
            ratios=ratios_T,
            is_clipped=weights_T != ratios_T,
        )


@dataclass(kw_only=True, slots=True)
class GSPOLoss(PPOLoss):
    """PPO's surrogate with the geometric mean of a sequence's ratios in place of a token's ratio:

        s   = exp(mean over the sequence of p - q)            level "sequence"
        s_t = sg(s) exp(p - sg(p))                            level "token", sg: stop-gradient

    Zheng et al., "Group Sequence Policy Optimization" (arXiv:2507.18071), equations 5 and 7;
    equations 13 and 14 for the token variant. Both levels have the same values, and the same
    gradients if the advantages within each sequence are equal. Otherwise a token's advantage moves
    its whole sequence at level "sequence" and only the token itself at level "token". The log of s
    is clamped to +-20 nats. Samples may restrict the mean to some tokens by a `ratio_mask`; the
    default is the trained tokens.
    """

    normalization: Normalization = "sequence_mean"
    """Divisor of the sum over tokens."""
    clip_low: float = 3e-4
    """Distance of the lower bound from 1; below 1 - clip_low tokens with negative advantage get no
    gradient.
    """
    clip_high: float = 4e-4
    """Distance of the upper bound from 1; above 1 + clip_high tokens with positive advantage get no
    gradient.
    """
    level: Literal["sequence", "token"] = "sequence"
    """Tokens that a token's advantage moves: its whole sequence, or itself."""

    @property
    def sequence_setting(self) -> str:
        return "GSPOLoss, whose ratio is that of a sequence"

    def ratios(self, tokens: PolicyTokens) -> Tensor:
        ratios_T = tokens.mean_ratios()
        if self.level == "sequence":
            return ratios_T
        # The factor is 1; it carries the gradient of the token's own logprob.
        logprobs_T = tokens.logprobs
        return ratios_T.detach() * torch.exp(logprobs_T - logprobs_T.detach())


@dataclass(kw_only=True, slots=True)
class RLOOLoss(PPOLoss):
    """PPO's surrogate with a whole sequence as one action: the product of its tokens' ratios.

    Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from
    Human Feedback in LLMs" (arXiv:2402.14740), the RLOO estimator: the mean over the k samples y of
    a prompt of

        (R(y) - mean of the other samples' R) grad log p(y)

    The leave-one-out baseline, after Kool et al. (2019), is part of the advantage. On policy the
    ratio is 1 and the gradient is the estimator; the clip serves further steps on the same data.
    The log of the ratio is clamped to +-20 nats.
    """

    normalization: Normalization = "sequence_mean"
    """Divisor of the sum over tokens."""

    @property
    def sequence_setting(self) -> str:
        return "RLOOLoss, whose ratio is that of a sequence"

    def ratios(self, tokens: PolicyTokens) -> Tensor:
        return bounded_exp(
            over_sequences(tokens.log_ratios, tokens.valid, inputs=tokens.inputs, mean=False)
        )


@dataclass(kw_only=True, slots=True)
class ReinforcePlusPlusLoss(PPOLoss):
    """PPO's surrogate with advantages normalized over the whole batch.

    Hu et al., "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Normalization"
    (arXiv:2501.03262). The method is its advantage: for token t of a sample with reward R

        A_t = R - beta (sum of the KL penalties k1 from t on),  (A_t - mean) / std over the batch's
        tokens

    The variant with a baseline subtracts the group's mean from R, divides by the batch's standard
    deviation, and puts the KL into the loss, as k2.
    """

    kl_estimator: Literal["k1", "k2", "k3"] = "k2"
    """KL estimator; with d = p_ref - p: k1 is -d, k2 is d^2 / 2, k3 is exp(d) - 1 - d."""


@dataclass(kw_only=True, slots=True)
class ImportanceSamplingLoss(PolicyLoss):
    """J = r A.

    The surrogate of conservative policy iteration, Kakade and Langford (2002), in the notation of
    Schulman et al. (arXiv:1707.06347), equation 6. On policy its gradient is that of REINFORCE.
    Only the clamp of log r bounds the ratio; a `correction` bounds the part that stems from stale
    data.
    """

    def surrogate(self, tokens: PolicyTokens) -> Surrogate:
        ratios_T = tokens.ratios()
        return Surrogate(
            values=ratios_T * tokens.inputs.advantages,
            ratios=ratios_T,
        )


@dataclass(kw_only=True, slots=True)
class DROLoss(PolicyLoss):
    """J = A p - beta / 2 (p - q)^2.

    Richemond et al., "Offline Regularised Reinforcement Learning for Large Language Models
    Alignment" (arXiv:2405.19107): the mean squared error of its policy loss, (R - V - beta (p -
    q))^2 / (2 beta), without the terms that do not depend on p, by token, with A for R - V and the
    generator as the reference. The maximum is p = q + A / beta. Data counts as it was sampled: a
    `correction` is refused.
    """

    beta: float = 0.05
    """Weight of the squared distance between p and q."""

    def __post_init__(self) -> None:
        PolicyLoss.__post_init__(self)
        if not 0.0 <= self.beta < float("inf"):
            raise ValueError(f"beta={self.beta}: must be a finite number of at least 0")
        if self.correction is not None:
            raise ValueError(
                "correction: must be None with DRO, which has no ratio to correct: it is a "
                "regression on the data as sampled, and its square compares p with the generator's "
                "q"
            )

    def surrogate(self, tokens: PolicyTokens) -> Surrogate:
        # Of the log ratio as it is: the square needs no clamp, as nothing is exponentiated.
        square_T = tokens.log_ratios.square()
        return Surrogate(
            values=tokens.logprobs * tokens.inputs.advantages - 0.5 * self.beta * square_T,
            ratios=tokens.ratios(),
        )
