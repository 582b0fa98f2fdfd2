import math

import pytest

from rl.training.schedule import LRSchedule, check_total_steps


def factors(steps, **config):
    schedule = LRSchedule.Config(**config).build()
    return [schedule.factor(step) for step in steps]


def test_decay_never_starts_before_the_warmup_is_over():
    got = factors(range(5), warmup_steps=2, decay="linear", total_steps=4)
    assert got == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        # Warm-up over 2 of 12 steps, decay over the last half: progress (step - 6) / 6 at 6, 9, 11, 12.
        ("linear", [1.0, 0.1 + 0.9 / 2, 0.1 + 0.9 / 6, 0.1]),
        ("cosine", [1.0, 0.1 + 0.9 / 2, 0.1 + 0.9 * (1 - math.sqrt(3) / 2) / 2, 0.1]),
        ("sqrt", [1.0, 0.1 + 0.9 * (1 - math.sqrt(1 / 2)), 0.1 + 0.9 * (1 - math.sqrt(5 / 6)), 0.1]),
    ],
)
def test_every_shape_over_the_last_half_down_to_a_tenth(decay, expected):
    config = {"warmup_steps": 2, "decay": decay, "decay_ratio": 0.5, "min_ratio": 0.1, "total_steps": 12}
    assert factors([0, 1, 2, 5], **config) == [0.5, 1.0, 1.0, 1.0]
    assert factors([6, 9, 11, 12, 99], **config) == pytest.approx([*expected, 0.1])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"decay": "linear"}, "total_steps=0"),
        (
            {"decay": "cosine", "warmup_steps": 5, "total_steps": 5},
            "total_steps=5, warmup_steps=5",
        ),
        ({"total_steps": 10}, "total_steps have no effect with decay='constant'"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"min_ratio": 1.5}, r"min_ratio=1\.5: must be between"),
        ({"decay_ratio": -0.1}, r"decay_ratio=-0\.1"),
        (
            {"decay": "linear", "total_steps": 10, "min_ratio": 1.0},
            r"min_ratio=1\.0: nothing would decay",
        ),
        (
            {"decay": "cosine", "total_steps": 10, "decay_ratio": 0.04},
            "decay_ratio=0.04, .*: nothing would decay",
        ),
    ],
)
def test_impossible_schedule_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        LRSchedule.Config(**config)


def test_schedule_with_another_number_of_steps_than_the_loop_is_refused():
    schedule = LRSchedule.Config(decay="linear", total_steps=80)
    check_total_steps(schedule, num_steps=80, num_minibatches=1)
    check_total_steps(schedule, num_steps=20, num_minibatches=4)
    check_total_steps(schedule, num_steps=0, num_minibatches=1)  # an evaluation-only run
    check_total_steps(LRSchedule.Config(warmup_steps=10), num_steps=2, num_minibatches=1)
    for num_steps, num_minibatches, steps in ((80, 2, 160), (10, 1, 10)):
        with pytest.raises(
            ValueError, match=rf"total_steps=80 with decay='linear': must be {steps}, the opt"
        ):
            check_total_steps(schedule, num_steps=num_steps, num_minibatches=num_minibatches)
