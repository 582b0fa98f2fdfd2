"""What is read out of the records of learning runs."""

import pytest

from benchmarks.curves import curve, table

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
