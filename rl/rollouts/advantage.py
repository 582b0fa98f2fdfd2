"""Advantages from rewards, and penalties on rewards.

Shape legend: P groups of a batch (one prompt each), G samples of a group, C tokens of a sample that
the model produced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import numpy as np
import torch

from losses.ops import KL_ESTIMATORS
from rl.config.configurable import only_if, unless
from rl.config.tree import check_bounds
from rl.rollouts.reward_values import MAX_REWARD

MAX_TOKEN_REWARD = 1e20
"""Largest magnitude of a token's reward. It leaves room above `MAX_REWARD` for the sums over the
turns of a rollout; squares in float64, and returns of 1e18 tokens in float32, stay finite."""


@dataclass(kw_only=True, slots=True)
class Advantage:
    """Advantage estimator: A = (value - baseline) / scale, over all samples of a batch.

    With `credit` "sequence" the value is the sum of a sample's rewards, and means and standard
    deviations are over samples. With "token" each token's value is the discounted sum of the
    rewards at it and after it, and they are over tokens, so that a long sample counts for more.

    The default is GRPO's (arXiv 2402.03300, section 4.1.2) without the division, which Dr. GRPO
    (arXiv 2503.20783, section 3) shows to weigh easy and hard prompts more. `scale` "group_std"
    divides as GRPO does; "leave_one_out" is RLOO's (arXiv 2402.14740); "batch_mean" with
    "batch_std" and `credit` "token" is REINFORCE++ (arXiv 2501.03262), "group_mean" with
    "batch_std" its form with a baseline.

    Against a baseline of its group, a group in which all samples have the same sum of rewards gets
    exact zeros. If all values are equal, a baseline leaves exact zeros, and a scale changes
    nothing.

    Raises:
        ValueError: a field is out of range or has no effect; when called, a reward is not finite,
            or so large that float32 cannot hold an advantage.
    """

    baseline: Literal["group_mean", "leave_one_out", "batch_mean", "none"] = "group_mean"
    """Baseline that is subtracted: the mean over the group, the group's other samples or the batch;
    or nothing.
    """
    scale: Literal["none", "group_std", "batch_std"] = "none"
    """Divisor: nothing, or the standard deviation over the group or the batch."""
    credit: Literal["sequence", "token"] = "sequence"
    """Tokens that get a reward: all of the sample, or those up to the reward."""
    discount: float = 1.0
    """Factor by which a reward counts less for each token earlier; only with credit "token"."""
    eps: float = 1e-6
    """Added to the standard deviation."""

    def __post_init__(self) -> None:
        check_bounds(self, "eps", at_least=0, below=math.inf)
        check_bounds(self, "discount", above=0, at_most=1)
        if self.discount != 1 and self.credit != "token":
            raise ValueError(
                f"discount={self.discount} has no effect with credit={self.credit!r}: must be 1"
            )

    def __call__(self, rewards_PG: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
        """Return the [P][<=G][C] float32 advantages of the tokens.

        Args:
            rewards_PG: [P][<=G][C] float64 rewards of the tokens: a sample's at its last token, a
                turn's at the turn's last token, a penalty by token everywhere. A sample without
                tokens counts in no mean.
        """
        _check_sizes(rewards_PG)
        by_token = self.credit == "token"
        sums_P, values_P, lengths_PG = [], [], []
        for rewards_G in rewards_PG:
            sums = _sum_samples(rewards_G)
            sums_P.append(sums)
            values_P.append(self._compute_returns(rewards_G) if by_token else sums)
            lengths_PG.append([*map(len, rewards_G)])

        centered_P = list(self._subtract_baseline(values_P, lengths_PG))
        if self.baseline in ("group_mean", "leave_one_out"):
            # Exact zeros: a group of equal rewards must give no gradient, and rounding in the mean
            # would leave a small one, which a division by the standard deviation makes large.
            for p, sums in enumerate(sums_P):
                if not len(sums) or np.ptp(sums) == 0:
                    centered_P[p] = np.zeros_like(centered_P[p])

        advantages_PG = []
        for values, lengths in zip(self._divide_by_scale(centered_P), lengths_PG, strict=True):
            advantages_PG.append(_split(values.astype(np.float32), lengths, by_token=by_token))
        return advantages_PG

    def _compute_returns(self, rewards_G: Sequence[np.ndarray]) -> np.ndarray:
        """Return the value of every token of a group."""
        returns = [
            compute_returns_to_go(rewards_C, discount=self.discount) for rewards_C in rewards_G
        ]
        return np.concatenate([np.zeros(0), *returns])

    def _subtract_baseline(
        self, values_P: Sequence[np.ndarray], lengths_PG: Sequence[Sequence[int]]
    ) -> Sequence[np.ndarray]:
        if self.baseline == "none":
            return values_P
        if self.baseline == "leave_one_out":
            centered_P = []
            for values, lengths_G in zip(values_P, lengths_PG, strict=True):
                # With credit "sequence" there is one value for each sample, whatever its length.
                sizes_G = lengths_G if self.credit == "token" else [1] * len(values)
                centered_P.append(_leave_one_out(values, sizes_G))
            return centered_P
        means_P = _compute_by_pool(_compute_mean, values_P, by_group=self.baseline == "group_mean")
        return [values - mean for values, mean in zip(values_P, means_P, strict=True)]

    def _divide_by_scale(self, values_P: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        if self.scale == "none":
            return values_P
        stds_P = _compute_by_pool(self._compute_std, values_P, by_group=self.scale == "group_std")
        return [values / std for values, std in zip(values_P, stds_P, strict=True)]

    def _compute_std(self, values: np.ndarray) -> float:
        """Return the Bessel-corrected standard deviation plus eps; 1 if all values are equal."""
        if len(values) < 2 or np.ptp(values) == 0:
            return 1.0
        return float(values.std(ddof=1)) + self.eps


def compute_returns_to_go(rewards_C: np.ndarray, *, discount: float = 1.0) -> np.ndarray:
    """Return [C] float64: the sum over k of discount^k times the reward k tokens later."""
    if discount == 1:
        return np.cumsum(rewards_C[::-1])[::-1]
    returns_C = rewards_C.astype(np.float64)
    for t in range(len(returns_C) - 2, -1, -1):
        returns_C[t] += discount * returns_C[t + 1]
    return returns_C


def _leave_one_out(values: np.ndarray, sizes_G: Sequence[int]) -> np.ndarray:
    """Subtract the mean of the other samples' values from each; zeros if there are no others."""
    values_G = np.split(values, np.cumsum(sizes_G)[:-1])
    total, count = sum(v.sum() for v in values_G), len(values)

    centered_G = []
    for v in values_G:
        num_others = count - len(v)
        if num_others:
            centered_G.append(v - (total - v.sum()) / num_others)
        else:
            centered_G.append(np.zeros_like(v))
    return np.concatenate(centered_G)


def _sum_samples(rewards_G: Sequence[np.ndarray]) -> np.ndarray:
    """Return the sum of rewards of each sample that has tokens."""
    sums = []
    for rewards_C in rewards_G:
        if len(rewards_C):
            sums.append(rewards_C.sum())
    return np.array(sums)


def _compute_mean(values: np.ndarray) -> float:
    """Return the mean, exact if all values are equal; 0 for no values."""
    if not len(values):
        return 0.0
    return float(values[0] if np.ptp(values) == 0 else values.mean())


def _compute_by_pool(
    statistic: Callable[[np.ndarray], float], values_P: Sequence[np.ndarray], *, by_group: bool
) -> list[float]:
    """Return a statistic for each group, over the group's values or over the batch's."""
    if by_group:
        return [statistic(values) for values in values_P]
    return [statistic(np.concatenate([np.zeros(0), *values_P]))] * len(values_P)


def _split(values: np.ndarray, lengths_G: Sequence[int], *, by_token: bool) -> list[np.ndarray]:
    """Return [G][C] advantages of tokens.

    `values` are those of the tokens, or of all samples that have tokens.
    """
    if not by_token:
        # A sample without tokens has no value, so its length is left out here.
        values = np.repeat(values, [length for length in lengths_G if length])

    advantages_G = []
    begin = 0
    for length in lengths_G:
        advantages_G.append(values[begin : begin + length])
        begin += length
    return advantages_G


def _check_sizes(rewards_PG: Sequence[Sequence[np.ndarray]]) -> None:
    # One look at all values: the loop below, which finds the culprit, is slow in a large batch.
    everything = np.concatenate([np.zeros(0), *chain(*rewards_PG)])
    if np.abs(everything).max(initial=0.0) <= MAX_TOKEN_REWARD:
        return
    for p, rewards_G in enumerate(rewards_PG):
        for g, rewards_C in enumerate(rewards_G):
            largest = float(np.abs(rewards_C).max(initial=0.0))
            # "not <=" rather than ">", so that NaN is refused too.
            if not largest <= MAX_TOKEN_REWARD:
                problem = "too large" if math.isfinite(largest) else "not finite"
                raise ValueError(
                    f"group {p}, sample {g}: a reward is {problem}: {rewards_C}; must be within "
                    f"{MAX_TOKEN_REWARD:g} of 0"
                )


@dataclass(kw_only=True, slots=True)
class OverlongPunishment:
    """Addition to the reward of a long completion; 0 unless enabled.

    Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (arXiv 2503.14476),
    equation 13.
    """

    enable: bool = False
    """Lower the reward of completions that end within the buffer."""
    buffer_tokens: int | None = field(default=4096, metadata=only_if("enable", True))
    """Last tokens of a completion's limit, over which the punishment grows: DAPO's L_cache. None: a
    quarter of the limit."""
    penalty: float = field(default=1.0, metadata=only_if("enable", True))
    """Largest punishment, in units of reward."""

    def __post_init__(self) -> None:
        check_bounds(self, "buffer_tokens", at_least=1)
        check_bounds(self, "penalty", at_least=0, at_most=MAX_REWARD)

    def __call__(self, num_tokens: int, *, max_tokens: int) -> float:
        """Return 0 up to `max_tokens` less the buffer, then a value that falls to -`penalty` at
        `max_tokens`.
        """
        if not self.enable:
            return 0.0
        buffer_tokens = self.buffer_tokens or max(1, max_tokens // 4)
        # 0 at the beginning of the buffer, 1 at the limit.
        share = (num_tokens - (max_tokens - buffer_tokens)) / buffer_tokens
        # "0.0 -" rather than a sign, which would give -0.0 for a reply before the buffer.
        return self.penalty * (0.0 - min(max(share, 0.0), 1.0))


@dataclass(kw_only=True, slots=True)
class KLReward:
    """Penalty on the reward of each token: coef times `compute_kl_penalty` of the generator's
    logprobs.

    Ouyang et al., "Training language models to follow instructions with human feedback" (arXiv
    2203.02155), section 3.4, token by token.
    """

    coef: float = 0.0
    """Weight of the penalty; above 0 it needs the reference policy (trainer.reference.enable)."""
    estimator: Literal["k1", "k2", "k3"] = field(default="k1", metadata=unless("coef", 0.0))
    """Estimator of the KL divergence; k1 gives its gradient on average, k2 and k3 do not."""

    def __post_init__(self) -> None:
        check_bounds(self, "coef", at_least=0, at_most=MAX_REWARD)


def compute_kl_penalty(
    logprobs_C: np.ndarray,
    reference_logprobs_C: np.ndarray,
    estimator: Literal["k1", "k2", "k3"] = "k1",
) -> np.ndarray:
    """Return [C] float64, an estimate of KL(policy || reference) at each token, see `losses.ops`.

    In a reward, k1 gives on average the gradient of the divergence, which it does not as a term of
    a loss; k2 and k3 do not (Tang and Munos, "On a few pitfalls in KL divergence gradient
    estimation for RL", arXiv 2506.09477). The logprobs are in nats; raises ValueError if one is not
    finite.
    """
    if not (np.isfinite(logprobs_C).all() and np.isfinite(reference_logprobs_C).all()):
        raise ValueError("logprobs must be finite for all tokens that the model produced")
    penalty_C: np.ndarray = KL_ESTIMATORS[estimator](
        logprobs_T=torch.from_numpy(logprobs_C.astype(np.float64)),
        reference_logprobs_T=torch.from_numpy(reference_logprobs_C.astype(np.float64)),
    ).numpy()
    return penalty_C
