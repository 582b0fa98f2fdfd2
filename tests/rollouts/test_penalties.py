"""The overlong punishment and the KL penalty."""

import math

import numpy as np
import pytest

from rl.rollouts.penalties import OverlongPunishment, kl_penalty


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
    assert OverlongPunishment(enable=True, buffer_tokens=None)(num_tokens, max_tokens=max_tokens) == expected


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
    penalty = kl_penalty(LOGPROBS, REFERENCE, estimator)
    assert penalty.dtype == np.float64
    assert penalty.tolist() == pytest.approx(expected, abs=1e-7)


def test_buffer_beyond_the_limit_and_logprobs_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="buffer_tokens=4096: must be at most max_tokens=32"):
        OverlongPunishment(enable=True).check(max_tokens=32)
    with pytest.raises(ValueError, match="logprobs must be finite"):
        kl_penalty(LOGPROBS, LOGPROBS * np.nan)
