"""Limits that could never be met, or held, are refused by name."""

import math

import pytest

from rl.rollouts.settings import EpisodeLimits, Evaluation


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_turns": 0}, "max_turns=0 is less than 1"),
        ({"max_tokens": 1}, "max_tokens=1: must be at least 2, or None"),
        ({"step_timeout_s": 0.0}, "step_timeout_s=0.0: must be above 0 and finite"),
        ({"step_timeout_s": math.nan}, "step_timeout_s=nan: must be above 0 and finite"),
        ({"timeout_s": math.inf}, "timeout_s=inf: must be above 0 and finite"),
    ],
)
def test_limits_of_episodes_out_of_range_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        EpisodeLimits(**settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_samples": -1}, "num_samples=-1 is less than 0"),
        ({"temperature": 0.0}, "temperature=0.0: must be at least 0.01 and finite"),
        ({"temperature": math.inf}, "temperature=inf: must be at least 0.01 and finite"),
    ],
)
def test_settings_of_an_evaluation_out_of_range_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        Evaluation(**settings)
