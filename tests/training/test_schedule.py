import math

import pytest

from rl.training.schedule import LRSchedule, check_total_steps


def factors(steps, **config):
    schedule = LRSchedule.Config(**config).build()
    return [schedule.factor(step) for step in steps]


def test_default_is_constant():
    assert factors([0, 1, 10**6]) == [1.0, 1.0, 1.0]


def test_warmup_reaches_the_peak_with_its_last_step():
    assert factors(range(6), warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decay_over_the_last_half():
    got = factors(range(11), decay="linear", decay_ratio=0.5, total_steps=10)
    assert got == pytest.approx([1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0])


def test_decay_never_starts_before_the_warmup_is_over():
    got = factors(range(5), warmup_steps=2, decay="linear", total_steps=4)
    assert got == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])


def test_cosine_and_square_root_at_a_quarter_of_the_way():
    at_quarter = {"decay": "cosine", "total_steps": 8, "min_ratio": 0.2}
    assert factors([2], **at_quarter)[0] == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)
    assert factors([2], **(at_quarter | {"decay": "sqrt"}))[0] == pytest.approx(0.2 + 0.8 * 0.5)


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
    assert factors([6, 9, 11, 12], **config) == pytest.approx(expected)


def test_factor_stays_at_the_minimum_after_the_last_step():
    assert factors([8, 100], decay="cosine", total_steps=8, min_ratio=0.1) == [0.1, 0.1]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"decay": "linear"}, "total_steps=0"),
        ({"decay": "cosine", "warmup_steps": 5, "total_steps": 5}, "total_steps=5: .*warmup_steps=5"),
        ({"total_steps": 10}, "total_steps=10 has no effect with decay='constant'"),
        ({"min_ratio": 0.5}, r"min_ratio=0\.5 has no effect"),
        ({"decay_ratio": 0.5}, r"decay_ratio=0\.5 has no effect"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"min_ratio": 1.5}, r"min_ratio=1\.5: must be between"),
        ({"decay_ratio": -0.1}, r"decay_ratio=-0\.1"),
        (
            {"decay": "linear", "total_steps": 10, "min_ratio": 1.0},
            r"min_ratio=1\.0: decay='linear' to the peak",
        ),
        ({"decay": "sqrt", "total_steps": 10, "decay_ratio": 0.0}, r"decay_ratio=0\.0: .* over no step"),
        ({"decay": "cosine", "total_steps": 10, "decay_ratio": 0.04}, r"over no step of total_steps=10"),
    ],
)
def test_impossible_schedule_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        LRSchedule.Config(**config)


def test_decay_over_another_number_of_steps_than_the_loops_is_refused():
    schedule = LRSchedule.Config(decay="linear", total_steps=80)
    check_total_steps(schedule, num_steps=80, num_minibatches=1)
    check_total_steps(schedule, num_steps=20, num_minibatches=4)
    check_total_steps(schedule, num_steps=0, num_minibatches=1)  # evaluates alone
    check_total_steps(LRSchedule.Config(warmup_steps=10), num_steps=2, num_minibatches=1)
    for num_steps, num_minibatches, steps in ((80, 2, 160), (10, 1, 10)):
        with pytest.raises(
            ValueError, match=rf"total_steps=80 with decay='linear': must be {steps}, the opt"
        ):
            check_total_steps(schedule, num_steps=num_steps, num_minibatches=num_minibatches)
