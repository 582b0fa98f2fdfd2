"""A run in a few numbers."""

import dataclasses
import math
from pathlib import Path

import pytest

from rl.reporting.html.facts import breakdown, facts, state
from rl.reporting.run_data import RunData

EMPTY = RunData(
    folder=Path("outputs/x"),
    status="running",
    config={},
    steps=[],
    evaluations=[],
    rollouts=[],
    events=[],
    spans=[],
    problems=[],
)


def run(**parts):
    return dataclasses.replace(EMPTY, **parts)


def step(number, **others):
    return {"step": number, "time/step_s": 4.0, "time/generate_s": 3.0, "time/train_s": 1.0, **others}


def test_first_last_and_middle_are_those_of_the_steps_that_tell():
    told = facts(
        run(
            steps=[
                step(1, **{"reward/mean": 0.25, "perf/samples_per_s": 9.0}),
                step(2, **{"reward/mean": math.nan, "perf/samples_per_s": 3.0, "logprob_diff/max": 0.5}),
                step(3, **{"reward/mean": 0.75, "perf/samples_per_s": 4.0, "logprob_diff/max": 0.25}),
            ],
            evaluations=[{"step": 0, "eval/correct": 0.1}, {"step": 3, "eval/correct": 0.9}],
            config={
                "module": "m",
                "config": "f",
                "values": {"model": "qwen3/tiny", "loop": {"num_steps": 8}},
            },
        ),
        is_alive=None,
    )
    assert told["reward"] == [0.25, 0.75]
    assert told["evaluation"] == [0.1, 0.9]
    assert told["samples_per_s"] == 4
    assert told["logprob_diff_max"] == 0.5
    assert (told["step"], told["num_steps"], told["training_s"]) == (3, 8, 12)
    assert (told["config"], told["model"]) == ("m.f", "qwen3/tiny")


def test_a_run_without_a_step_has_no_numbers():
    told = facts(EMPTY, is_alive=None)
    assert told["training_s"] == 0
    assert {told[name] for name in ("step", "reward", "evaluation", "step_s", "started")} == {None}
    assert breakdown(EMPTY) == {"step_s": None, "parts": {}, "beside": {}, "idle": {}, "limits": {}}


@pytest.mark.parametrize(
    ("status", "last", "is_alive", "expected"),
    [
        ("finished", "finished", False, "finished"),
        ("running", "started", True, "running"),
        ("running", "started", None, "running"),
        ("running", "started", False, "ended"),
        ("running", "stopped", False, "stopped"),
        (None, "started", None, "unknown"),
    ],
)
def test_the_state_is_what_the_folder_and_the_controller_say(status, last, is_alive, expected):
    assert state(run(status=status, events=[{"time": 1.0, "event": last}]), is_alive=is_alive) == expected


def test_parts_of_a_step_are_what_the_loop_waited_for_largest_first():
    told = breakdown(
        run(
            steps=[
                step(1, **{"time/push_s": 0.5, "time/trainer_idle_s": 3.0, "limit/decode": 0.2}),
                step(2, **{"time/push_s": 0.5, "time/trainer_idle_s": 1.0, "limit/decode": 0.4}),
            ],
            evaluations=[{"step": 0, "time/eval_s": 7.0}],
        )
    )
    assert list(told["parts"].items()) == [("generate", 3), ("train", 1)]
    assert sum(told["parts"].values()) == told["step_s"] == 4
    assert told["beside"] == {"push": 0.5, "eval": 7}
    assert told["idle"] == {"trainer": 0.5}
    assert told["limits"] == {"decode": pytest.approx(0.3)}
