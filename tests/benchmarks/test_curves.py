"""Values read from the records of learning runs."""

import pytest

from benchmarks.curves import curve, shortfalls
from benchmarks.time_to_reward import first_reached

RECORDS: list[dict[str, float]] = [
    {"step": 0, "eval/correct": 0.25, "eval/reward": 0.5},
    {"step": 20, "eval/correct": 0.5, "eval/reward": 0.625},
    {"step": 21, "reward/mean": 0.75},
    {"step": 40, "eval/correct": 0.875, "eval/reward": 0.9},
]


def test_curve_has_the_evaluations_in_order():
    assert curve(RECORDS) == {
        "steps": [0, 20, 40], "correct": [0.25, 0.5, 0.875], "reward": [0.5, 0.625, 0.9],
        "correct_rose": 0.625, "reward_rose": 0.4,
    }  # fmt: skip
    with pytest.raises(ValueError, match="must be at 0 and at a later one"):
        curve(RECORDS[1:])


@pytest.mark.parametrize(
    ("config", "reward_rose", "correct_rose", "missed"),
    [
        ("tiny", 0.2, 0.0, None),
        ("tiny", 0.1999, 0.5, "the reward rose by +0.1999, should by 0.2"),
        ("tiny_noise", 0.0, 0.05, None),
        ("tiny_noise", 0.3, -0.05, None),  # its rewards are coin flips
        ("tiny_noise", 0.0, 0.0501, "correct moved by +0.0501, at most 0.05 is noise"),
    ],
)
def test_runs_that_learn_too_little_and_controls_that_move_are_named(
    config, reward_rose, correct_rose, missed
):
    made = {"task": "reverse_text", "config": config, "seed": 3}
    good = {
        "task": "alphabet_sort",
        "config": "tiny",
        "seed": 0,
        "reward_rose": 0.4,
        "correct_rose": 0.3,
    }
    said = shortfalls([good, made | {"reward_rose": reward_rose, "correct_rose": correct_rose}])
    assert said == ([f"reverse_text, {config}, seed 3: {missed}"] if missed else [])


# Time to reward

TIMED: list[dict[str, float]] = [
    {"step": 0, "eval/correct": 0.3},
    {"step": 1, "time/step_s": 1.5, "staleness/max": 0},
    {"step": 2, "time/step_s": 2.0, "staleness/max": 1},
    {"step": 2, "eval/correct": 0.89, "time/eval_s": 9.0},
    {"step": 3, "time/step_s": 0.5, "staleness/max": 0},
    {"step": 3, "eval/correct": 0.9, "time/eval_s": 9.0},
    {"step": 4, "time/step_s": 7.0, "staleness/max": 2},
]


def test_steps_are_counted_up_to_the_first_evaluation_at_the_goal():
    assert first_reached(TIMED, goal=0.9) == {"step": 3, "seconds": 4.0, "staleness_max": 1}
    with pytest.raises(ValueError, match=r"no evaluation reached 0\.95"):
        first_reached(TIMED, goal=0.95)
