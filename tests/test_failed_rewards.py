"""Which share of the rewards may fail, however many belong to a batch."""

from collections.abc import Iterator
from itertools import count

import pytest

from rl.errors import RunError
from rl.rollouts.rubric import Criterion, Rubric
from rl.types import Rollout
from tests.support.loops import number_of, run, some_right
from tests.support.simulated import SimulatedPolicy


def failing_every(interval: int) -> tuple[Rubric, Iterator[int]]:
    """A rubric whose reward of every so many rollouts fails, and a count whose next is how many it was asked
    for."""
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


FAILING = {"num_steps": 8, "num_prompts": 8, "num_samples": 4, "max_failed_rewards": 0.1}


@pytest.mark.parametrize(
    ("reply", "settings"),
    [
        (some_right, {"max_policy_age": 0}),
        (some_right, {"max_policy_age": 3}),
        (rarely_right, {"equal_groups": "drop"}),
        (rarely_right, {"equal_groups": "drop", "max_policy_age": 3}),
    ],
)
def test_half_as_many_failed_rewards_as_may_be_stop_no_run_however_many_belong_to_a_batch(reply, settings):
    rubric, calls = failing_every(20)
    records, _ = run(SimulatedPolicy(reply=reply), rubric=rubric, **FAILING | settings)
    assert len(records) == 8
    assert next(calls) > 8 * 32
    assert sum(record["reward/num_failed"] for record in records) >= 8 * 32 // 20


@pytest.mark.parametrize("settings", [{}, {"max_policy_age": 3}, {"equal_groups": "drop"}])
def test_a_run_whose_rewards_all_fail_stops_before_a_steps_worth_of_them(settings):
    rubric, _ = failing_every(1)
    says = (
        r"^step 1: 4 of 4 rewards failed since the last batch, where loop\.max_failed_rewards=0\.1 .*no judge"
    )
    with pytest.raises(RunError, match=says):
        run(SimulatedPolicy(reply=some_right), rubric=rubric, **FAILING | settings)


@pytest.mark.parametrize("settings", [{"max_policy_age": 3}, {"equal_groups": "drop"}])
def test_twice_as_many_failed_rewards_as_may_be_stop_the_run(settings):
    rubric, _ = failing_every(5)
    with pytest.raises(RunError, match=r"rewards failed since the last batch"):
        run(SimulatedPolicy(reply=rarely_right), rubric=rubric, **FAILING | settings)
