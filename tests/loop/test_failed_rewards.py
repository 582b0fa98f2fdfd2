"""Share of rewards that may fail, independent of the batch size."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from rl.rollouts.rubric import Criterion, Rubric
from rl.types import Rollout
from rl.utils.errors import RunError
from tests.support.loops import number_of, run, some_right
from tests.support.simulated import SimulatedPolicy


def failing_every(interval: int) -> tuple[Rubric, Iterator[int]]:
    """Return a rubric that fails for every `interval`-th rollout, and the counter of its calls."""
    calls = count(1)

    def has_answer(rollout: Rollout) -> float:
        if next(calls) % interval == 0:
            raise ValueError("no judge is there")
        return float("ANSWER" in rollout.text)

    criterion = Criterion(name="answer", function=has_answer)
    return Rubric(criteria=(criterion,), correct=lambda rollout: True), calls


def rarely_right(prompt: str, sample: int) -> str:
    """Groups of unequal rewards are one in six."""
    return some_right(prompt, sample) if number_of(prompt) % 6 == 0 else "no"


FAILING: dict[str, Any] = {"num_steps": 8, "groups_per_batch": 8, "group_size": 4, "max_failed_rewards": 0.1}
AHEAD, DROPPING = {"max_off_policy_steps": 3}, {"drop_zero_advantage_groups": True}


@pytest.mark.parametrize(
    ("reply", "settings"),
    [(some_right, {}), (some_right, AHEAD), (rarely_right, DROPPING), (rarely_right, DROPPING | AHEAD)],
)
def test_half_the_allowed_share_of_failed_rewards_does_not_stop_a_run(reply, settings):
    rubric, calls = failing_every(20)
    records, _ = run(SimulatedPolicy(reply=reply), rubric=rubric, **FAILING | settings)
    assert len(records) == 8
    assert next(calls) > 8 * 32
    assert sum(record["reward/num_failed"] for record in records) >= 8 * 32 // 20


@pytest.mark.parametrize(
    ("interval", "settings", "says"),
    [
        *((1, settings, r"^step 1: 4 of 4 rewards failed .*; loop\.max_failed_rewards=0\.1 .*no judge")
          for settings in ({}, AHEAD, DROPPING)),
        *((5, settings, "rewards failed since the last batch") for settings in (AHEAD, DROPPING)),
    ],
)  # fmt: skip
def test_more_than_the_allowed_share_of_failed_rewards_stops_the_run(interval, settings, says):
    rubric, _ = failing_every(interval)
    with pytest.raises(RunError, match=says):
        run(SimulatedPolicy(reply=rarely_right), rubric=rubric, **FAILING | settings)
