"""Runs that differ only by seed: which belong together, their name, and their band."""

import math

from rl.reporting.html.groups import group_runs, name_group, pack_bands


def config(*, lr=1e-5, seed=0, name="x", function="tiny"):
    values = {"name": name, "seed": seed, "dump_folder": f"/{name}", "optimizer": {"lr": lr}}
    return {"module": "m", "config": function, "values": values}


def test_runs_that_differ_by_seed_and_name_only_are_one_group():
    configs = [
        config(seed=0, name="a"),
        config(lr=3e-5),
        config(seed=1, name="b"),
        config(function="other"),
        config(lr=3e-5, seed=4),
    ]
    assert group_runs(configs) == [[0, 2], [1, 4], [3]]


def test_runs_without_a_config_stand_alone():
    assert group_runs([{}, {}, {"values": {}}]) == [[0], [1], [2]]


def test_group_is_named_by_what_its_runs_have_in_common():
    configs = [config(seed=1), config(seed=0)]
    names = ["try-lr_1e-5-seed_1", "try-lr_1e-5-seed_0"]
    assert name_group(names, configs) == "try-lr_1e-5 (seeds 0, 1)"
    assert name_group(["try-seed_10", "try-seed_1"], configs) == "try (seeds 0, 1)"
    assert name_group(["b", "a"], configs) == "b (seeds 0, 1)"
    assert name_group(["run-1", "run-2"], [config(), config()]) == "run (2 runs)"


def test_band_has_mean_and_extremes_of_each_step():
    runs = [
        [{"step": 1, "reward": 0.0, "loss": 1.0}, {"step": 2, "reward": 0.5}],
        [{"step": 1, "reward": 0.5, "loss": 3.0}, {"step": 2, "reward": 1.0}],
        [{"step": 1, "reward": 1.0, "loss": math.nan}],
    ]
    evaluations = [[{"step": 0, "eval/correct": 0.25}], [{"step": 0, "eval/correct": 0.75}], []]
    found = pack_bands(runs, evaluations)
    assert found["xs"] == [[1, 2], [1], [0]]
    assert found["series"] == {
        "reward": {"x": 0, "y": [0.5, 0.75], "low": [0, 0.5], "high": [1, 1], "num": [3, 2]},
        "loss": {"x": 1, "y": [2], "low": [1], "high": [3]},
        "eval/correct": {"x": 2, "y": [0.5], "low": [0.25], "high": [0.75]},
    }


def test_long_band_keeps_its_extremes():
    runs = [[{"step": step, "loss": float(step)} for step in range(1, 11)] for _ in range(2)]
    runs[1][6]["loss"] = 100.0
    found = pack_bands(runs, max_points=4)
    assert found["xs"] == [[2, 5, 8, 10]]
    assert found["series"]["loss"]["high"] == [3, 6, 100, 10]
    assert found["series"]["loss"]["y"] == [2, 5, (53.5 + 8 + 9) / 3, 10]
