"""Time to reward, read from the records of a run."""

import pytest

from benchmarks.time_to_reward import first_reached

RECORDS: list[dict[str, float]] = [
    {"step": 0, "eval/correct": 0.3},
    {"step": 1, "time/step_s": 1.5, "age/max": 0},
    {"step": 2, "time/step_s": 2.0, "age/max": 1},
    {"step": 2, "eval/correct": 0.89, "time/eval_s": 9.0},
    {"step": 3, "time/step_s": 0.5, "age/max": 0},
    {"step": 3, "eval/correct": 0.9, "time/eval_s": 9.0},
    {"step": 4, "time/step_s": 7.0, "age/max": 2},
]


def test_steps_are_counted_up_to_the_first_evaluation_at_the_goal():
    assert first_reached(RECORDS, goal=0.9) == {"step": 3, "seconds": 4.0, "age_max": 1}


def test_run_that_misses_the_goal_is_an_error():
    with pytest.raises(ValueError, match=r"no evaluation reached 0\.95"):
        first_reached(RECORDS, goal=0.95)
