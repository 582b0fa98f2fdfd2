"""The staleness bound: which groups may start and which a step takes."""

import random

import pytest

from rl.rollouts.staleness import StalenessBound


def fill(bound: StalenessBound, first: int = 0) -> list[int]:
    """Start groups, numbered from `first`, as long as the bound allows."""
    started: list[int] = []
    while bound.may_start():
        bound.start(first + len(started))
        started.append(first + len(started))
    return started


def test_later_group_overtakes_a_slow_one_while_that_stays_in_time():
    bound = StalenessBound(max_off_policy_steps=1, groups_per_batch=2, num_steps=9)
    fill(bound)  # 0 to 3, each to be taken by step 2
    assert bound.take([0, 2]) == [0, 2]  # 1 is slow: step 2 takes it, with 3
    bound.serve(1)
    assert fill(bound, 4) == [4, 5]
    assert bound.take([3, 4, 5]) is None  # step 2 waits for 1
    assert bound.take([1, 3, 4, 5]) == [1, 3]


@pytest.mark.parametrize(
    ("max_steps", "publish_every"), [(0, 1), (1, 1), (2, 1), (4, 1), (1, 2), (2, 3), (4, 3)]
)
def test_no_group_is_too_old_in_any_order_of_finishing_and_dropping(max_steps, publish_every):
    for seed in range(60):
        rng = random.Random(seed)
        groups_per_batch, num_steps = rng.randint(1, 4), 12
        bound = StalenessBound(
            max_off_policy_steps=max_steps, groups_per_batch=groups_per_batch, num_steps=num_steps
        )
        served_at: dict[int, int] = {}
        running: list[int] = []
        finished: list[int] = []
        next_group = 0
        while bound.num_taken < num_steps:
            while bound.may_start():
                bound.start(next_group)
                served_at[next_group] = bound.served
                running.append(next_group)
                next_group += 1
            taken = bound.take(finished)
            if taken is not None:
                step = bound.num_taken
                assert len(taken) == groups_per_batch
                assert max(step - 1 - served_at[group] for group in taken) <= max_steps
                finished = [group for group in finished if group not in taken]
            behind = bound.num_taken - bound.num_taken % publish_every
            if bound.served < behind and (taken is None or rng.random() < 0.5):
                bound.serve(behind)
            elif taken is None:
                assert running, "nothing runs, and no step can be taken"
                group = running.pop(rng.randrange(len(running)))
                if rng.random() < 0.2:
                    bound.release(group)
                else:
                    finished.append(group)
        assert bound.outstanding == ()
