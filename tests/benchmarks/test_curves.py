"""What is read out of the records of learning runs."""

import pytest

from benchmarks.curves import curve, runs, shortfalls, table

RECORDS: list[dict[str, float]] = [
    {"step": 0, "eval/correct": 0.25, "eval/reward": 0.5},
    {"step": 1, "reward/mean": 0.75},
    {"step": 20, "eval/correct": 0.5, "eval/reward": 0.625},
    {"step": 21, "reward/mean": 0.75},
    {"step": 40, "eval/correct": 0.875, "eval/reward": 0.9},
]
READ = {
    "steps": [0, 20, 40],
    "correct": [0.25, 0.5, 0.875],
    "reward": [0.5, 0.625, 0.9],
    "correct_rose": 0.625,
    "reward_rose": 0.4,
}


def test_a_curve_is_what_the_evaluations_say_in_order():
    assert curve(RECORDS) == READ


@pytest.mark.parametrize("records", [RECORDS[:2], RECORDS[1:], []])
def test_a_run_without_a_first_and_a_last_evaluation_is_an_error(records):
    with pytest.raises(ValueError, match="must be at 0 and at a later one"):
        curve(records)


def test_the_table_shows_the_first_and_the_last_evaluation():
    run = {"task": "reverse_text", "config": "tiny", "seed": 1, "seconds": 200.5}
    *_, line = table([run | READ]).splitlines()
    assert line == "| reverse_text | tiny | 1 | 40 | 0.250 -> 0.875 | 0.500 -> 0.900 | 200.5 |"


@pytest.mark.parametrize(
    ("config", "reward_rose", "correct_rose", "missed"),
    [
        ("tiny", 0.2, 0.0, None),
        ("tiny", 0.1999, 0.5, "the reward rose by +0.1999, should by 0.2"),
        ("tiny", -0.3, 0.0, "the reward rose by -0.3, should by 0.2"),
        ("tiny_noise", 0.0, 0.05, None),
        ("tiny_noise", 0.3, -0.05, None),  # its rewards are coins
        ("tiny_noise", 0.0, 0.0501, "correct moved by +0.0501, at most 0.05 is noise"),
        ("tiny_noise", 0.0, -0.0501, "correct moved by -0.0501, at most 0.05 is noise"),
    ],
)
def test_a_run_that_learns_too_little_and_a_control_that_moves_are_named(
    config, reward_rose, correct_rose, missed
):
    made = {"task": "reverse_text", "config": config, "seed": 3}
    good = {"task": "alphabet_sort", "config": "tiny", "seed": 0, "reward_rose": 0.4, "correct_rose": 0.3}
    said = shortfalls([good, made | {"reward_rose": reward_rose, "correct_rose": correct_rose}])
    assert said == ([f"reverse_text, {config}, seed 3: {missed}"] if missed else [])


def test_controls_are_run_for_the_first_seed_or_for_each():
    learning = [("tiny", 4), ("tiny", 5)]
    assert runs([4, 5], controls=False) == [*learning, ("tiny_noise", 4)]
    assert runs([4, 5], controls=True) == [*learning, ("tiny_noise", 4), ("tiny_noise", 5)]
