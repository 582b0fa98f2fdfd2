import asyncio
import threading
from itertools import repeat
from typing import ClassVar

import pytest

from rl.errors import RunError
from rl.rollouts.environment import SingleTurn
from rl.rollouts.environment_thread import EnvironmentThreads
from rl.rollouts.tried_environments import TriedEnvironments
from rl.supervised import SupervisedWarmup
from rl.tasks.sum_digits import SumDigits
from rl.types import Observation, Reply
from tests.support.conversations import Counting, Factory
from tests.support.fakes import RENDERER, FakePolicy

PROBLEM = next(SumDigits.Config(num_integers=2).build().warmup_problems(seed=0))


def warm_up(policy, *, num_problems):
    warmup = SupervisedWarmup.Config(num_steps=2, num_demonstrations=3).build(
        learner=policy, renderer=RENDERER, environments=TriedEnvironments(make=SingleTurn.of)
    )
    losses: list[float] = []
    asyncio.run(warmup.run(repeat(PROBLEM, num_problems), on_step=losses.append))
    return losses


def test_a_step_trains_on_its_demonstrations_and_reports_the_loss_of_a_token():
    policy = FakePolicy(reply=lambda prompt, i: "")
    assert warm_up(policy, num_problems=6) == [-1.0, -1.0]
    assert [len(samples) for samples in policy.trained] == [3, 3]
    assert policy.calls == ["forward_backward", "optim_step"] * 2


def test_a_task_that_runs_out_of_demonstrations_stops_the_run_and_says_so():
    policy = FakePolicy(reply=lambda prompt, i: "")
    says = r"warm-up problems are used up at step 2: 2 left, of warmup\.num_demonstrations=3 "
    with pytest.raises(RunError, match=says):
        warm_up(policy, num_problems=5)


class Blocks(Counting):
    """In its step, until it is let go."""

    runs_inline: ClassVar[bool] = False
    free: ClassVar[threading.Event]

    async def step(self, reply: Reply) -> Observation:
        self.free.wait(60)
        return await super().step(reply)


def test_an_environment_that_blocks_ends_the_warm_up_by_problem_and_step_while_the_controllers_loop_goes_on():
    Blocks.free = threading.Event()
    environments = TriedEnvironments(
        make=Factory(Blocks, turns=0), threads=EnvironmentThreads(grace_s=0.05), step_timeout_s=0.05
    )
    warmup = SupervisedWarmup.Config(num_steps=2, num_demonstrations=3).build(
        learner=FakePolicy(reply=lambda prompt, i: ""), renderer=RENDERER, environments=environments
    )

    async def main() -> int:
        running = asyncio.create_task(warmup.run(repeat(PROBLEM), on_step=lambda loss: None))
        num_turns = 0
        while not running.done():
            num_turns += 1
            await asyncio.sleep(0.001)
        with pytest.raises(ValueError, match=r"turn 1 of problem .* is blocked by turn 1") as raised:
            await running
        assert raised.value.__notes__ == ["warm-up step 1"]
        return num_turns

    try:
        assert asyncio.run(main()) > 5
    finally:
        Blocks.free.set()
