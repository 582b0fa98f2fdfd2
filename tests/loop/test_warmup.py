import asyncio
from itertools import repeat

import pytest

from rl.loop.warmup import SupervisedWarmup
from rl.rollouts.environment import Environments, SingleTurn
from rl.tasks.sum_digits import SumDigits
from rl.utils.errors import RunError
from tests.support.fakes import RENDERER, FakePolicy

PROBLEM = next(SumDigits.Config(num_integers=2).build().warmup_problems(seed=0))


def warm_up(policy, *, num_problems):
    warmup = SupervisedWarmup.Config(num_steps=2, num_demonstrations=3).build(
        trainer=policy, renderer=RENDERER, environments=Environments(make=SingleTurn.of)
    )
    losses: list[float] = []
    asyncio.run(warmup.run(repeat(PROBLEM, num_problems), on_step=losses.append))
    return losses


def test_a_step_trains_on_its_demonstrations():
    policy = FakePolicy(reply=lambda prompt, i: "")
    assert warm_up(policy, num_problems=6) == [-1.0, -1.0]
    assert [len(samples) for samples in policy.trained] == [3, 3]
    assert policy.calls == ["forward_backward", "optim_step"] * 2


def test_a_task_without_enough_demonstrations_stops_the_run():
    policy = FakePolicy(reply=lambda prompt, i: "")
    says = r"warm-up problems are used up: 2 left, of warmup\.num_demonstrations=3"
    with pytest.raises(RunError, match=says):
        warm_up(policy, num_problems=5)
