import random

import pytest

from rl.rollouts.age_bound import AgeBound


def fill(bound: AgeBound, first: int = 0) -> list[int]:
    """Start groups, numbered from `first`, until there is no place."""
    started: list[int] = []
    while bound.may_start():
        bound.start(first + len(started))
        started.append(first + len(started))
    return started


def test_with_age_0_a_step_starts_its_own_groups_and_no_more():
    bound = AgeBound(max_age=0, num_prompts=3, num_steps=9)
    assert fill(bound) == [0, 1, 2]
    assert bound.take([2, 0]) is None
    assert bound.take([2, 0, 1]) == [0, 1, 2]
    assert not bound.may_start()  # the generators still serve the old weights
    bound.serve(1)
    assert fill(bound, 3) == [3, 4, 5]


def test_with_age_2_three_steps_of_groups_are_under_way():
    bound = AgeBound(max_age=2, num_prompts=2, num_steps=9)
    assert len(fill(bound)) == 6
    assert bound.take(range(6)) == [0, 1]
    assert not bound.may_start()  # a group that started now could be taken by step 3 at the latest
    bound.serve(1)
    assert fill(bound, 6) == [6, 7]


def test_nothing_starts_that_no_step_would_take():
    bound = AgeBound(max_age=5, num_prompts=2, num_steps=2)
    assert len(fill(bound)) == 4


def test_a_later_group_overtakes_an_unfinished_one_only_as_long_as_that_one_stays_in_time():
    bound = AgeBound(max_age=1, num_prompts=2, num_steps=9)
    fill(bound)  # 0 to 3, each to be taken by step 2
    assert bound.take([0, 2]) == [0, 2]  # 1 is slow: step 2 takes it, with 3
    bound.serve(1)
    assert fill(bound, 4) == [4, 5]
    assert bound.take([3, 4, 5]) is None  # step 2 waits for 1
    assert bound.take([1, 3, 4, 5]) == [1, 3]


def test_a_released_group_gives_its_place_to_another():
    bound = AgeBound(max_age=0, num_prompts=2, num_steps=9)
    fill(bound)
    bound.release(0)
    assert fill(bound, 2) == [2]
    assert bound.take([1, 2]) == [1, 2]


@pytest.mark.parametrize(
    ("max_age", "publish_every"), [(0, 1), (1, 1), (2, 1), (4, 1), (1, 2), (2, 3), (4, 3)]
)
def test_whatever_finishes_and_is_dropped_in_whatever_order_no_group_is_ever_too_old(max_age, publish_every):
    for seed in range(60):
        rng = random.Random(seed)
        num_prompts, num_steps = rng.randint(1, 4), 12
        bound = AgeBound(max_age=max_age, num_prompts=num_prompts, num_steps=num_steps)
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
                assert len(taken) == num_prompts
                assert max(step - 1 - served_at[group] for group in taken) <= max_age
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
