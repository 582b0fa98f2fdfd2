"""Which share of the rewards may fail, however many belong to a batch."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from rl.errors import RunError
from rl.observability.recorder import Recorder, RecorderConfig, read_rollouts
from rl.rollouts.evaluation import FailedEvaluationError
from rl.rollouts.rubric import Criterion, Rubric
from rl.rollouts.settings import Evaluation
from rl.tasks.sum_digits import make_problem
from rl.types import Rollout
from tests.support.loops import PROBLEM, make_loop, number_of, problems, run, some_right
from tests.support.simulated import SimulatedPolicy
from tests.support.virtual_time import run_in_virtual_time


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


FAILING: dict[str, Any] = {"num_steps": 8, "num_prompts": 8, "num_samples": 4, "max_failed_rewards": 0.1}


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


def recorded_until_it_stops(
    tmp_path: Path, rubric: Rubric, error: type[RunError] = RunError, **settings: Any
) -> list[dict[str, Any]]:
    loop, _ = make_loop(SimulatedPolicy(reply=some_right), problems=problems(), rubric=rubric, **settings)
    loop.recorder = Recorder(tmp_path / "rollouts.jsonl", config=RecorderConfig())
    with pytest.raises(error):
        run_in_virtual_time(loop.run())
    return read_rollouts(loop.recorder.path)


def test_what_stopped_a_run_is_recorded(tmp_path):
    lines = recorded_until_it_stops(tmp_path, failing_every(6)[0], **FAILING | {"max_failed_rewards": 0.0})
    assert {line["kind"] for line in lines} == {"pending"}
    assert {line["step"] for line in lines} == {1}
    failures = [line["failure"] for line in lines if "failure" in line]
    # All 8 groups of 4 end at the same time: each sixth reward of 32, and the others of the first two groups.
    assert len(failures) == 5
    assert all("no judge is there" in failure for failure in failures)
    assert len(lines) > len(failures)


def test_groups_that_were_dropped_before_the_run_stopped_are_recorded(tmp_path):
    rubric, _ = failing_every(1)
    settings: dict[str, Any] = FAILING | {
        "num_samples": 2,
        "max_failed_rewards": 0.2,
    }  # of 16: the first group may fail
    lines = recorded_until_it_stops(tmp_path, rubric, **settings)
    assert [(line["kind"], line.get("dropped")) for line in lines] == [
        *[("pending", None)] * 8,  # two groups, and what failed of others that ended with them
        *[("dropped", "failed")] * 2,
    ]
    assert all("no judge is there" in line["failure"] for line in lines)


def test_an_evaluation_that_stopped_a_run_is_recorded(tmp_path):
    rubric, _ = failing_every(1)
    lines = recorded_until_it_stops(tmp_path, rubric, FailedEvaluationError, **FAILING | {"eval_every": 1})
    (line,) = lines
    assert (line["kind"], line["step"], line["set"]) == ("eval", 0, "held_out")
    assert "no judge is there" in line["failure"]


def test_the_share_that_may_fail_holds_for_evaluations_of_the_loop_too():
    calls = count(1)

    def fails_once(rollout: Rollout) -> float:
        return 1 / (next(calls) > 1)

    rubric = Rubric(criteria=(Criterion(name="a", function=fails_once),), correct=lambda rollout: True)
    settings: dict[str, Any] = {"num_steps": 0, "eval_every": 1, "max_failed_rewards": 0.5}
    loop, sink = make_loop(
        SimulatedPolicy(reply=lambda prompt, sample: "no"),
        rubric=rubric,
        evaluation=Evaluation(num_samples=2),
        held_out=[PROBLEM, make_problem([56, 78])],
        **settings,
    )
    run_in_virtual_time(loop.run())
    (record,) = sink.records
    assert (record["eval/num_failed"], record["eval/num_problems"], record["eval/a"]) == (1, 2, 1.0)
