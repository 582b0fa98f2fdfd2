"""Parts of a report that are visible at once."""

import math
from pathlib import Path

import pytest

from rl.config.json import to_dict
from rl.config.registry import resolve
from rl.reporting.data import RunData
from rl.reporting.evidence import Finding, RolloutEvidence
from rl.reporting.html.overview import (
    break_down,
    collect_facts,
    describe_state,
    find_evidence_lines,
    list_config,
    pack_curves,
)

# Facts


def run(*, status="running", config=None, **parts):
    return RunData(folder=Path("outputs/x"), status=status, config=config or {}, **parts)


def step(number, **others):
    return {
        "step": number,
        "time/step_s": 4.0,
        "time/generate_s": 3.0,
        "time/train_s": 1.0,
        **others,
    }


def test_facts_ignore_missing_and_infinite_numbers():
    told = collect_facts(
        run(
            steps=[
                step(1, **{"reward/mean": 0.25, "perf/samples_per_s": 9.0}),
                step(
                    2,
                    **{"reward/mean": math.nan, "perf/samples_per_s": 3.0, "logprob_diff/max": 0.5},
                ),
                step(
                    3, **{"reward/mean": 0.75, "perf/samples_per_s": 4.0, "logprob_diff/max": 0.25}
                ),
            ],
            evaluations=[{"step": 0, "eval/correct": 0.1}, {"step": 3, "eval/correct": 0.9}],
            config={
                "module": "m",
                "config": "f",
                "values": {"model": "tiny", "loop": {"num_steps": 8}},
            },
        ),
        is_alive=None,
    )
    assert told["reward"] == [0.25, 0.75]
    assert told["evaluation"] == [0.1, 0.9]
    assert told["samples_per_s"] == 4
    assert told["logprob_diff_max"] == 0.5
    assert (told["step"], told["num_steps"], told["training_s"]) == (3, 8, 12)
    assert (told["config"], told["model"]) == ("m.f", "tiny")


def test_single_evaluation_and_step_are_single_values():
    told = collect_facts(
        run(
            steps=[step(1, **{"reward/mean": 0.25})],
            evaluations=[{"step": 0, "eval/correct": 0.4}],
        ),
        is_alive=None,
    )
    assert told["evaluation"] == [0.4]
    assert told["reward"] == [0.25]
    assert told["num_recorded"] == 1
    assert collect_facts(run(), is_alive=None)["evaluation"] is None


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
def test_state_follows_from_the_folder_and_the_controller(status, last, is_alive, expected):
    assert (
        describe_state(run(status=status, events=[{"time": 1.0, "event": last}]), is_alive=is_alive)
        == expected
    )


def test_breakdown_lists_the_waits_largest_first():
    told = break_down(
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


# Curves


def test_each_metric_is_a_curve_over_its_own_steps():
    steps = [{"step": 1, "reward/mean": 0.25, "loss": 1}, {"step": 2, "reward/mean": 0.5}]
    found = pack_curves(steps, [{"step": 0, "eval/correct": 0.1}, {"step": 2, "eval/correct": 0.9}])
    assert found["xs"] == [[1, 2], [1], [0, 2]]
    assert found["series"] == {
        "reward/mean": {"x": 0, "y": [0.25, 0.5]},
        "loss": {"x": 1, "y": [1]},
        "eval/correct": {"x": 2, "y": [0.1, 0.9]},
    }


def test_values_that_are_not_finite_are_gaps():
    values = [1.0, math.nan, math.inf, 4.0]
    found = pack_curves([{"step": i, "loss": value} for i, value in enumerate(values)])
    assert found["series"]["loss"] == {"x": 0, "y": [1, None, None, 4], "bad": [1, 2], "num_bad": 2}


def test_long_curves_are_merged_into_mean_minimum_and_maximum():
    found = pack_curves(
        [{"step": step, "loss": float(step)} for step in range(1, 11)], max_points=4
    )
    assert found["xs"] == [[2, 5, 8, 10]]
    merged = {"y": [2, 5, 8, 10], "low": [1, 4, 7, 10], "high": [3, 6, 9, 10]}
    assert found["series"]["loss"] == {"x": 0, **merged}


# Config

MODULE = "tests.config.example_configs"


def test_changed_option_has_its_default():
    values = to_dict(resolve(MODULE, "tiny").config)
    values["trainer"]["optimizer"]["lr"] = 0.5
    values["of_an_older_version"] = [1]
    config = {"module": MODULE, "config": "tiny", "values": values}
    rows, problem = list_config(config, defaults=to_dict(resolve(MODULE, "tiny").config))
    assert problem is None
    changed = [row for row in rows if "default" in row]
    assert changed == [
        {"path": "trainer.optimizer.lr", "value": "0.5", "default": "0.001"},
        {"path": "of_an_older_version", "value": "[1]", "default": "absent"},
    ]
    assert {"path": "trainer.optimizer.kind", "value": '"fused"'} in rows
    rows, problem = list_config(config, defaults={})
    assert len(rows) > len(changed)
    assert not [row for row in rows if "default" in row]
    assert problem is not None
    assert problem.startswith(f"what differs from {MODULE}.tiny is unknown")


def test_config_that_cannot_be_read_has_no_options():
    assert list_config({}, defaults={}) == ([], None)


# Findings


def test_recorded_rollouts_of_findings_are_returned():
    reply = RolloutEvidence(step=3, problem="p", sample=1, text="so long", note="nine tokens")
    finding = Finding(
        kind="length_drift", title="", since_step=3, sentence="", advice="", evidence=(reply,)
    )
    lines = [
        {"step": step, "problem": "p", "sample": sample} for step in (2, 3) for sample in (0, 1)
    ]
    assert find_evidence_lines([finding], lines) == {3}
    assert find_evidence_lines([], lines) == frozenset()
