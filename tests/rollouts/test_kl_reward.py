"""The penalty for moving away from the reference policy, against its formulas."""

import math

import numpy as np
import pytest

from rl.rollouts.kl_reward import KLReward

LOGPROBS = np.array([-1.0, -2.0, -0.25], dtype=np.float32)
REFERENCE = np.array([-1.5, -0.5, -0.25], dtype=np.float32)


@pytest.mark.parametrize(
    ("estimator", "of"),
    [
        # d: log of the policy's probability over the reference's.
        ("k1", lambda d: d),
        ("k2", lambda d: d * d / 2),
        ("k3", lambda d: math.exp(-d) - 1 + d),
    ],
)
def test_each_estimator_is_its_formula_by_token(estimator, of):
    kl_C = KLReward(coef=0.1, estimator=estimator).estimate(
        logprobs_C=LOGPROBS, reference_logprobs_C=REFERENCE
    )
    assert kl_C.dtype == np.float64
    assert kl_C.tolist() == pytest.approx([of(0.5), of(-1.5), of(0.0)], abs=1e-12)


@pytest.mark.parametrize("coef", [-0.1, math.inf, math.nan])
def test_a_coefficient_that_is_no_penalty_is_refused(coef):
    with pytest.raises(ValueError, match=f"coef={coef}: must be a finite number of at least 0"):
        KLReward(coef=coef)
