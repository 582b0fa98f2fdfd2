"""Curves of any length as a page draws them."""

import math

import pytest

from rl.reporting.html.series import curves


def test_each_number_of_the_records_is_a_curve_over_its_own_steps():
    steps = [{"step": 1, "reward/mean": 0.25, "loss": 1}, {"step": 2, "reward/mean": 0.5}]
    found = curves(steps, [{"step": 0, "eval/correct": 0.1}, {"step": 2, "eval/correct": 0.9}])
    assert found["xs"] == [[1, 2], [1], [0, 2]]
    assert found["series"] == {
        "reward/mean": {"x": 0, "y": [0.25, 0.5]},
        "loss": {"x": 1, "y": [1]},
        "eval/correct": {"x": 2, "y": [0.1, 0.9]},
    }


def test_a_name_that_two_sources_have_is_that_of_the_first():
    found = curves([{"step": 1, "policy_version": 1}], [{"step": 9, "policy_version": 9}])
    assert found == {"xs": [[1]], "series": {"policy_version": {"x": 0, "y": [1]}}}


def test_values_that_are_not_finite_are_gaps_whose_steps_are_named():
    values = [1.0, math.nan, math.inf, 4.0]
    found = curves([{"step": i, "loss": value} for i, value in enumerate(values)])
    assert found["series"]["loss"] == {"x": 0, "y": [1, None, None, 4], "bad": [1, 2], "num_bad": 2}


def test_of_many_steps_as_many_together_have_their_mean_least_and_largest():
    found = curves([{"step": step, "loss": float(step)} for step in range(1, 11)], max_points=4)
    assert found["xs"] == [[2, 5, 8, 10]]
    assert found["series"]["loss"] == {
        "x": 0,
        "y": [2, 5, 8, 10],
        "low": [1, 4, 7, 10],
        "high": [3, 6, 9, 10],
    }


def test_one_spike_in_ten_thousand_steps_is_still_drawn():
    records = [{"step": step, "grad": 900.0 if step == 7777 else 1.0} for step in range(1, 10_001)]
    curve = curves(records)["series"]["grad"]
    assert len(curve["y"]) == 1000
    assert max(curve["high"]) == 900
    assert curve["y"][777] == pytest.approx(1 + 899 / 10)


def test_a_part_without_a_finite_value_is_a_gap():
    records = [{"step": s, "loss": math.nan if s < 2 else 1.0} for s in range(4)]
    found = curves(records, max_points=2)
    assert found["series"]["loss"]["y"] == [None, 1]
    assert found["series"]["loss"]["num_bad"] == 2
