import math

import numpy as np
import pytest

from rl.rollouts.kl_reward import KLReward, kl_penalty

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
def test_penalty_by_hand(estimator, expected):
    penalty = kl_penalty(LOGPROBS, REFERENCE, estimator)
    assert penalty.dtype == np.float64
    assert penalty.tolist() == pytest.approx(expected, abs=1e-7)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="estimator='k4': must be one of k1, k2, k3"):
        kl_penalty(LOGPROBS, REFERENCE, "k4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be the same tokens"):
        kl_penalty(LOGPROBS, REFERENCE[:2])
    with pytest.raises(ValueError, match="reference_logprobs must be finite"):
        kl_penalty(LOGPROBS, np.array([0.0, np.nan, 0.0]))


@pytest.mark.parametrize("coef", [-0.1, math.inf, math.nan])
def test_a_coefficient_that_is_no_penalty_is_refused(coef):
    with pytest.raises(ValueError, match=f"coef={coef}: must be a finite number of at least 0"):
        KLReward(coef=coef)
