"""Advantages by hand, the overlong punishment and the KL penalty."""

import itertools
import math
from typing import Any

import numpy as np
import pytest

from rl.rollouts.advantage import Advantage, OverlongPunishment, compute_kl_penalty


def final(*rewards, num_tokens=2):
    """Return a group whose samples earn their rewards at the last token."""
    return [np.array([0.0] * (num_tokens - 1) + [reward]) for reward in rewards]


def by_sample(advantages_PG):
    """Return the common advantage of each sample's tokens."""
    assert all(len(set(a.tolist())) == 1 for group in advantages_PG for a in group)
    return [[float(a[0]) for a in group] for group in advantages_PG]


def test_group_mean_is_subtracted_for_every_token():
    advantages = Advantage()([final(1.0, 0.0, 0.0, 1.0), final(3.0, 1.0, num_tokens=5)])
    assert by_sample(advantages) == [[0.5, -0.5, -0.5, 0.5], [1.0, -1.0]]
    assert [[a.shape for a in group] for group in advantages] == [[(2,)] * 4, [(5,)] * 2]
    assert {a.dtype for group in advantages for a in group} == {np.dtype(np.float32)}


def test_leave_one_out_compares_with_the_others_mean():
    (group,) = by_sample(Advantage(baseline="leave_one_out")([final(1.0, 0.0, 2.0)]))
    assert group == [1.0 - 1.0, 0.0 - 1.5, 2.0 - 0.5]


def test_batch_mean_is_over_all_samples_of_all_groups():
    advantages = by_sample(
        Advantage(baseline="batch_mean")([final(1.0, 0.0), final(5.0, 2.0, 2.0)])
    )
    assert advantages == [[-1.0, -2.0], [3.0, 0.0, 0.0]]


def test_scales_are_bessel_corrected_standard_deviations():
    groups = [final(1.0, 0.0, 0.0), final(4.0, 2.0)]
    by_group = by_sample(Advantage(scale="group_std", eps=0.0)(groups))
    assert by_group[0] == pytest.approx(np.array([2 / 3, -1 / 3, -1 / 3]) / math.sqrt(1 / 3))
    assert by_group[1] == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])
    # Left are 2/3, -1/3, -1/3, 1, -1: squares 2/3 and 2, over 4.
    by_batch = by_sample(Advantage(scale="batch_std", eps=0.0)(groups))
    assert by_batch[0] == pytest.approx(
        np.array([2 / 3, -1 / 3, -1 / 3]) / math.sqrt((2 / 3 + 2) / 4)
    )
    assert by_batch[1] == pytest.approx(np.array([1, -1]) / math.sqrt((2 / 3 + 2) / 4))
    with_eps = by_sample(Advantage(scale="group_std", eps=0.5)(groups))
    assert with_eps[1] == pytest.approx([1 / (math.sqrt(2) + 0.5), -1 / (math.sqrt(2) + 0.5)])


def test_credit_by_token_gives_returns_to_go():
    # Two turns of two tokens: the first earns 1, the second 2; a penalty of 0.5 at the first token.
    (group,) = Advantage(baseline="none", credit="token")([[np.array([-0.5, 1.0, 0.0, 2.0])]])
    assert group[0].tolist() == [2.5, 3.0, 2.0, 2.0]
    (group,) = Advantage(baseline="none", credit="token", discount=0.5)(
        [[np.array([0.0, 1.0, 0.0, 2.0])]]
    )
    assert group[0].tolist() == [0.75, 1.5, 1.0, 2.0]


def test_group_baselines_by_token_are_means_over_tokens():
    group = [np.array([1.0, 2.0]), np.array([0.0, 0.0, 1.0])]  # returns 3, 2 and 1, 1, 1
    (mean,) = Advantage(credit="token")([group])
    np.testing.assert_allclose(np.concatenate(mean), np.array([3, 2, 1, 1, 1]) - 8 / 5, rtol=1e-6)
    (others,) = Advantage(credit="token", baseline="leave_one_out")([group])
    assert [a.tolist() for a in others] == [[2.0, 1.0], [-1.5, -1.5, -1.5]]


BASELINES = ["group_mean", "leave_one_out", "batch_mean", "none"]
SCALES = ["none", "group_std", "batch_std"]


@pytest.mark.parametrize(
    ("baseline", "scale", "credit"),
    list(itertools.product(BASELINES, SCALES, ["sequence", "token"])),
)
def test_equal_rewards_give_exact_zeros_against_a_baseline(baseline, scale, credit):
    # 0.1 has no exact mean in floating point: a naive difference would leave a residue, and eps
    # enlarge it.
    settings: dict[str, Any] = {"baseline": baseline, "scale": scale, "credit": credit}
    equal = final(*[0.1] * 7)
    for group in Advantage(**settings)([equal, equal]):
        for advantages in group:
            expected = 0.1 if baseline == "none" else 0.0
            assert advantages.tolist() == pytest.approx([expected] * 2, abs=0.0, rel=1e-6)
    first, second = Advantage(**settings)([equal, final(1.0, 0.0)])
    assert all(np.isfinite(a).all() for a in (*first, *second))
    if baseline in ("group_mean", "leave_one_out"):
        assert not np.concatenate(first).any()
    assert np.concatenate(second).any()


@pytest.mark.parametrize("reward", [1e39, -1e200, math.inf, math.nan])
def test_reward_whose_advantage_would_overflow_is_refused(reward):
    with pytest.raises(ValueError, match=r"group 1, sample 0: a reward is (too large|not finite)"):
        Advantage(scale="group_std")([final(1.0, 0.0), final(reward, 0.0)])
    (group,) = by_sample(Advantage()([final(1e20, -1e20)]))
    assert group == pytest.approx([1e20, -1e20])


def test_single_sample_and_sample_without_tokens_have_no_advantage():
    assert by_sample(Advantage(baseline="leave_one_out")([final(2.0)])) == [[0.0]]
    for baseline, credit in itertools.product(BASELINES, ["sequence", "token"]):
        settings: dict[str, Any] = {"baseline": baseline, "scale": "group_std", "credit": credit}
        (plain,) = Advantage(**settings)([final(1.0, 0.0)])
        (group,) = Advantage(**settings)([[*final(1.0, 0.0), np.zeros(0)]])
        assert [a.tolist() for a in group] == [*(a.tolist() for a in plain), []]
        assert Advantage(**settings)([[]]) == [[]]
    assert Advantage(baseline="batch_mean")([]) == []


# Penalties


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, 0.0), (75, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (120, -1.0)],
)
def test_punishment_falls_over_the_buffer(num_tokens, expected):
    settings = OverlongPunishment(enable=True, buffer_tokens=20, penalty=0.5)
    assert settings(num_tokens, max_tokens=100) == pytest.approx(0.5 * expected)
    assert OverlongPunishment(buffer_tokens=20)(num_tokens, max_tokens=100) == 0.0


@pytest.mark.parametrize(
    ("max_tokens", "num_tokens", "expected"), [(40, 30, 0.0), (40, 35, -0.5), (3, 3, -1.0)]
)
def test_default_buffer_is_a_quarter_of_the_limit(max_tokens, num_tokens, expected):
    assert (
        OverlongPunishment(enable=True, buffer_tokens=None)(num_tokens, max_tokens=max_tokens)
        == expected
    )


# The policy says 1/2, 1/4 and 1/4, the reference 1/4, 1/2 and 1/4.
LOGPROBS = np.log([0.5, 0.25, 0.25]).astype(np.float32)
REFERENCE = np.log([0.25, 0.5, 0.25]).astype(np.float32)
LOG2 = math.log(2)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [LOG2, -LOG2, 0.0]),
        ("k2", [LOG2**2 / 2, LOG2**2 / 2, 0.0]),
        ("k3", [0.5 - 1 + LOG2, 2 - 1 - LOG2, 0.0]),
    ],
)
def test_kl_penalty_by_hand(estimator, expected):
    penalty = compute_kl_penalty(LOGPROBS, REFERENCE, estimator)
    assert penalty.dtype == np.float64
    assert penalty.tolist() == pytest.approx(expected, abs=1e-7)


def test_logprobs_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="logprobs must be finite"):
        compute_kl_penalty(LOGPROBS, LOGPROBS * np.nan)
