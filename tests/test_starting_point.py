from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl.config.tree import rebuild
from rl.models.qwen3 import model_registry
from rl.models.starting_point import write_random_model
from rl.starting_point import StartingPoint, random_model, warmed_up_model
from rl.supervised import SupervisedWarmup
from rl.tasks.sum_digits import SumDigits

SPEC = model_registry("tiny")


def planned(cache: Path, *, task: SumDigits.Config | None = None, **changes: Any) -> StartingPoint:
    task = task or SumDigits.Config(num_integers=2)
    arguments: dict[str, Any] = {
        "spec": SPEC,
        "seed": 0,
        "warmup": SupervisedWarmup.Config(),
        "demonstrations": task.build().warmup_problems(seed=0),
        "arithmetic": {"dtypes": "float32"},
    }
    return warmed_up_model(cache, **(arguments | changes))


def test_planning_writes_nothing_and_knows_its_tokenizer(tmp_path):
    start = planned(tmp_path / "cache")
    _, stop_ids = start.tokenizer()
    assert stop_ids == (256, 258)
    assert not (tmp_path / "cache").exists()


def test_a_kept_warm_up_is_the_start_of_the_next_run(tmp_path):
    first = planned(tmp_path)
    assert first.warmed_up is not None
    assert first.folder == random_model(tmp_path, spec=SPEC, seed=0).folder
    write_random_model(first.warmed_up, spec=SPEC, seed=7)  # stands for the warmed-up weights
    second = planned(tmp_path)
    assert second == StartingPoint(folder=first.warmed_up, spec=SPEC)
    second.make()  # nothing left to make


@pytest.mark.parametrize(
    "task",
    [
        SumDigits.Config(num_integers=2, reward="noise"),
        SumDigits.Config(num_integers=2, num_eval=64, format_reward=0.5),
    ],
)
def test_what_does_not_shape_the_warm_up_shares_its_result(tmp_path, task):
    assert planned(tmp_path, task=task).warmed_up == planned(tmp_path).warmed_up


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"warmup": SupervisedWarmup.Config(num_steps=10)},
        {"task": SumDigits.Config(num_integers=2, haste=0.5)},
        {"task": SumDigits.Config(num_integers=3)},
        {"arithmetic": {"dtypes": "bfloat16"}},
        {"spec": replace(SPEC, model=rebuild(SPEC.model, {"num_layers": 2}))},
    ],
    ids=["seed", "warm-up", "haste", "integers", "dtype", "layers"],
)
def test_what_shapes_the_warm_up_gets_one_of_its_own(tmp_path, change):
    assert planned(tmp_path, **change).warmed_up != planned(tmp_path).warmed_up
