"""The staleness bound: which groups may start and which a step takes."""

import random
import time

import numpy as np
import pytest

from rl.rollouts.group import Group
from rl.rollouts.staleness import StalenessBound, StalePolicyError, WeightVersions
from rl.types import Score
from tests.support.fakes import completion_of, prompt_of, rollout_of
from tests.support.loops import PROBLEM


def fill(bound: StalenessBound, first: int = 0) -> list[int]:
    """Start groups, numbered from `first`, as long as the bound allows."""
    started: list[int] = []
    while bound.may_start():
        bound.start(first + len(started))
        started.append(first + len(started))
    return started


def finish(bound: StalenessBound, *groups: int) -> list[int] | None:
    """Finish groups and return what the next step takes."""
    for group in groups:
        bound.finish(group)
    return bound.take()


def test_later_group_overtakes_a_slow_one_while_that_stays_in_time():
    bound = StalenessBound(max_off_policy_steps=1, groups_per_batch=2, num_steps=9)
    fill(bound)  # 0 to 3, each to be taken by step 2
    assert finish(bound, 0, 2) == [0, 2]  # 1 is slow: step 2 takes it, with 3
    bound.record_pull(1)
    assert fill(bound, 4) == [4, 5]
    assert finish(bound, 3, 4, 5) is None  # step 2 waits for 1
    assert finish(bound, 1) == [1, 3]


def next_groups(bound: StalenessBound, finished: list[int]) -> list[int] | None:
    """Return what a step takes by the definition: a list of all groups, sorted and searched."""
    last_steps, num = bound._last_steps, bound.groups_per_batch
    first = sorted(finished, key=lambda group: (last_steps[group], group))[:num]
    if len(first) < num:
        return None
    left = sorted(last for group, last in last_steps.items() if group not in first)
    if any(last <= bound.num_taken + 1 + place // num for place, last in enumerate(left)):
        return None
    return sorted(first)


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
            expected = next_groups(bound, finished)
            taken = bound.take()
            assert taken == expected
            if taken is not None:
                step = bound.num_taken
                assert len(taken) == groups_per_batch
                assert max(step - 1 - served_at[group] for group in taken) <= max_steps
                finished = [group for group in finished if group not in taken]
            behind = bound.num_taken - bound.num_taken % publish_every
            if bound.served < behind and (taken is None or rng.random() < 0.5):
                bound.record_pull(behind)
            elif taken is None:
                assert running, "nothing runs, and no step can be taken"
                group = running.pop(rng.randrange(len(running)))
                if rng.random() < 0.2:
                    bound.release(group)
                else:
                    finished.append(group)
                    bound.finish(group)
        assert bound.outstanding == ()


def test_group_that_finishes_costs_the_same_however_many_wait_for_a_slow_one():
    bound = StalenessBound(max_off_policy_steps=1, groups_per_batch=2_000, num_steps=9)
    fill(bound)
    assert finish(bound, *range(1, 2_001)) is not None
    bound.record_pull(1)
    fill(bound, 4_000)
    started_s = time.thread_time()
    for group in range(2_001, 6_000):
        assert finish(bound, group) is None
    assert time.thread_time() - started_s < 1.0  # 10 s with lists of the groups
    assert finish(bound, 0) == [0, *range(2_001, 4_000)]


def test_off_policy_steps_count_from_the_step_after_which_a_version_was_published():
    completions = [completion_of([1, 2, 0], version=4), completion_of([3, 0], version=6)]
    completions[0].policy_versions[2] = 6
    rollouts = [rollout_of(prompt_of(PROBLEM), completion) for completion in completions]
    group = Group(number=0, rollouts=rollouts, scores=[Score(reward=0.0, correct=False)] * 2)

    def steps(**published):
        versions = WeightVersions(max_off_policy_steps=2)
        for name, step in published.items():
            versions.record_push(int(name[1:]), step=step)
        return versions.count_off_policy_steps([group], step=5)

    assert steps(v4=2, v6=4).tolist() == [2, 2, 0, 0, 0]
    assert steps(v4=3, v5=0, v6=3).dtype == np.int64
    for published in ({"v4": 1, "v6": 4}, {"v6": 4}, {"v4": 5, "v6": 4}):
        with pytest.raises(
            StalePolicyError, match=r"policy versions \[4, 6\].* only on versions \[6\]"
        ):
            steps(**published)
