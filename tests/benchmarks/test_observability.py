"""Variants of the observability benchmark, and the statistics of their times."""

import pytest

from benchmarks.observability import SIDES, figures, order


def test_every_side_takes_every_place_equally_often():
    rounds = [order(number) for number in range(2 * len(SIDES))]
    for place in range(len(SIDES)):
        assert sorted(sides[place] for sides in rounds) == sorted(SIDES * 2)


def test_overheads_compare_steps_of_the_same_round():
    times = {
        "off": [1.0, 2.0, 1.0],  # a round in which the machine was slow
        "timeline": [1.005, 2.01, 1.5],
        "all": [1.02, 2.04, 1.02],
        "control": [1.0, 2.0, 0.9],
    }
    found = figures(times)
    assert found["overhead"] == pytest.approx({"timeline": 0.005, "all": 0.02, "control": 0.0})
    assert found["ratio"] == pytest.approx(1.02)
    assert found["met"] == {"timeline": True, "all": True}
    assert found["step_s"]["off"] == 1.0
    assert found["interval"]["all"] == pytest.approx((0.02, 0.02))
    assert found["interval"]["timeline"] == pytest.approx((0.005, 0.5))
    slow = figures(times | {"all": [1.04, 2.08, 1.04]})
    assert slow["met"] == {"timeline": True, "all": False}
