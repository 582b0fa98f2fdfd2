import numpy as np
import pytest

from rl.rollouts.advantage import GroupAdvantage


def test_mean_normalization_subtracts_the_groups_mean():
    assert GroupAdvantage()(np.array([1.0, 0.0, 0.0, 1.0])).tolist() == [0.5, -0.5, -0.5, 0.5]


def test_mean_std_divides_by_the_bessel_corrected_deviation():
    advantages = GroupAdvantage(normalization="mean_std", eps=0.0)(np.array([1.0, 0.0, 0.0]))
    assert advantages == pytest.approx(np.array([2 / 3, -1 / 3, -1 / 3]) / np.sqrt(1 / 3))


@pytest.mark.parametrize("eps", [float("nan"), float("inf"), -1e-6])
def test_an_eps_that_would_spoil_every_advantage_is_refused(eps):
    with pytest.raises(ValueError, match=f"eps={eps}: must be at least 0 and finite"):
        GroupAdvantage(eps=eps)


@pytest.mark.parametrize("normalization", ["mean", "mean_std"])
def test_equal_rewards_give_exact_zeros(normalization):
    # 0.1 has no exact mean in floating point: a naive difference would leave a residue.
    advantages = GroupAdvantage(normalization=normalization)(np.array([0.1] * 7))
    assert (advantages == 0).all()
